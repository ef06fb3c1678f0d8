"""Matrix products of Gemma 3 270M's layers on the CPU: x @ weight.T against weight @ x.T, in GFLOP/s.

python benchmarks/benchmark_linear.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

SHAPES = {"qkv_proj": (640, 1536), "gate_up_proj": (640, 4096), "down_proj": (2048, 640), "lm_head": (640, 262_144)}


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median over `repeats` runs, after two that do not count."""
    times = []
    for index in range(repeats + 2):
        start = time.perf_counter()
        run()
        if index >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 128, 256, 512, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| layer | rows | x @ weight.T | weight @ x.T |\n|---|---|---|---|")
    for name, (in_features, out_features) in SHAPES.items():
        weight = torch.randn(out_features, in_features)
        for rows in args.rows:
            if rows * out_features > 2**25:
                continue
            x = torch.randn(rows, in_features)
            gflop = 2e-9 * rows * in_features * out_features
            plain = gflop / seconds(lambda x=x, w=weight: functional.linear(x, w), args.repeats)
            swapped = gflop / seconds(lambda x=x, w=weight: torch.mm(w, x.t()), args.repeats)
            print(f"| {name} | {rows} | {plain:.0f} | {swapped:.0f} |", flush=True)


if __name__ == "__main__":
    main()
