"""Which places in texts stay resumable decides what later prompts find in the cache of a hybrid model.

    python examples/retention_policy.py [model [bytes of KV memory]]

A sliding layer's keys are let go once they leave the window. A later prompt resumes only where a window was kept: by
default at the ends of prompts and outputs, and where two prompts were seen to part ("tails"). Here a question parts
from a document inside of it, where none has parted before, after another text wanted the memory. A grid of places, or a
hint in the document's prompt, has kept what it needs.
"""

import sys

from lamella import LLM, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"
DEMO_BYTES = 36_000_000
DOCUMENT = [5 + number % 50 for number in range(700)]
OTHER_TEXT = [60 + number % 70 for number in range(400)]
QUESTION = [*DOCUMENT[:560], 200, 201]
POLICIES = [
    ("none", {"retention": "none"}, []),
    ("tails", {"retention": "tails"}, []),
    ("tails, and a place every 80 tokens", {"retention": "tails", "retention_grid_tokens": 80}, []),
    ("tails, and a hint", {"retention": "tails"}, [560]),
    ("all", {"retention": "all"}, []),
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    kv_bytes = int(sys.argv[2]) if len(sys.argv) > 2 else DEMO_BYTES
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, settings, hint in POLICIES:
        with LLM(model, max_model_len=768, max_num_seqs=1, kv_cache_memory_bytes=kv_bytes, **settings) as llm:
            document = {"prompt_token_ids": DOCUMENT} | ({"prefix_boundary": hint} if hint else {})
            for prompt in (document, {"prompt_token_ids": OTHER_TEXT}):
                llm.generate(prompt, params, use_tqdm=False)
            [output] = llm.generate({"prompt_token_ids": QUESTION}, params, use_tqdm=False)
        print(f"{name}: {output.num_cached_tokens} of {len(QUESTION)} prompt tokens found")


if __name__ == "__main__":
    main()
