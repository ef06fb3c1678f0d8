"""Small files in the formats of the public request traces."""

from __future__ import annotations

import gzip
import json


def write_lines(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def agentic(folder, conversations):
    """conversations: id -> [(prompt tokens, output tokens, hash ids)], spans of 16 tokens."""
    rows = [
        {
            "id": name,
            "block_size": 16,
            "requests": [
                {"t": float(index), "in": num_in, "out": num_out, "hash_ids": ids}
                for index, (num_in, num_out, ids) in enumerate(turns)
            ],
        }
        for name, turns in conversations.items()
    ]
    write_lines(folder / "weka_agentic_sample.jsonl.gz", rows)


def mooncake(folder, rows):
    """rows: (prompt tokens, output tokens, hash ids)."""
    write_lines(
        folder / "mooncake_conversation_trace.jsonl.gz",
        [
            {"timestamp": index, "input_length": num_in, "output_length": num_out, "hash_ids": ids}
            for index, (num_in, num_out, ids) in enumerate(rows)
        ],
    )


def write_two_sessions(folder):
    """Sessions a and b, each of two turns, the second of which goes on where the first one ends."""
    # 20 spans of 16 tokens and 32 of output, which the second turn has in its prompt of 24 spans.
    turns = [(320, 32, list(range(20))), (384, 16, list(range(24)))]
    agentic(folder, {"a": turns, "b": turns})
