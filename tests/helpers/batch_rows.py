"""Rows of batch files, good and bad, for runs that are killed and runs that are not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINE = ("--max-model-len", "128", "--kv-cache-memory-bytes", str(2**22), "--max-num-seqs", "4")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "one", "cat", "sat", "on", "mats"]


def mixed_rows(count: int) -> list[str]:
    """Lines: OpenAI rows of both kinds, plain rows with ids and without, greedy and sampled, and some that are bad."""
    rng = random.Random(7)
    lines = []
    for index in range(count):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
        messages = [{"role": "user", "content": text}]
        row: Any
        match index % 6:
            case 0:
                body = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 1.0}
                row = {"custom_id": f"chat-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            case 1:
                body = {"model": "m", "prompt": text, "max_tokens": 6, "temperature": 0, "logprobs": 2}
                row = {"custom_id": f"text-{index}", "method": "POST", "url": "/v1/completions", "body": body}
            case 2:
                row = {"prompt": text, "max_tokens": 7, "temperature": 0.9, "n": 2, "source": {"page": index}}
            case 3:
                row = {"custom_id": f"own-{index}", "messages": messages, "max_tokens": 4, "temperature": 0}
            case 4:
                row = {"prompt": text, "temperature": 1.5, "label": "é"}
            case _:
                bad = ["not JSON {", '{"prompt": "a", "temperature": "hot"}', '{"custom_id": 5}', '{"prompt": ""']
                row = bad[index // 6 % len(bad)]
        lines.append(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False))
    return lines


def by_id(path: Path) -> dict[Any, Any]:
    """The rows of an output by their ids, each once; without the times that answers were made."""
    found: dict[Any, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        key = row.get("custom_id") or row["line"]
        assert key not in found
        if row.get("response"):
            del row["response"]["body"]["created"]
        found[key] = row
    return found


def run_batch_process(model: str, source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lamella", "run-batch", "-i", source, "-o", target, "--model", model, *ENGINE]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill_after_rows(process: subprocess.Popen[bytes], target: Path, num_lines: int) -> int:
    """SIGKILL once the output has so many lines; returns how many it has then."""
    while process.poll() is None:
        if target.exists() and target.read_bytes().count(b"\n") >= num_lines:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    process.wait()
    assert process.returncode == -signal.SIGKILL, process.stderr.read() if process.stderr else ""
    return target.read_bytes().count(b"\n")
