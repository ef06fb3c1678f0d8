"""Seconds from the start of a fresh process to the first token, and to a loaded engine.

    python benchmarks/benchmark_startup.py --model demo:gemma-3-270m --repeats 5

The first process may convert the model; with --cold each one does, in an empty cache folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

FIRST_TOKEN = """
import json, sys
from lamella import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=4096, cache_dir=sys.argv[2] or None) as llm:
    llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print(json.dumps(llm.load_seconds), flush=True)
"""


def run_once(model: str, cache_dir: str) -> tuple[float, float]:
    """(start to first token, time to load) in seconds; the first is measured from outside the process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", FIRST_TOKEN, model, cache_dir], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - start
    if process.wait() or not line:
        raise SystemExit(f"the process failed with exit code {process.returncode}")
    return seconds, json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo:gemma-3-270m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="convert the model anew each time")
    args = parser.parse_args()
    results = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run_once(args.model, folder if args.cold else ""))
        print(f"start to first token {results[-1][0]:.2f} s, of which loading {results[-1][1]:.2f} s", flush=True)
    print(f"median: {statistics.median(total for total, _ in results):.2f} s")


if __name__ == "__main__":
    main()
