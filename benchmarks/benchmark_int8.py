"""Rates of the int8 and GGUF kernels beside what the machine can do: python benchmarks/benchmark_int8.py [--gguf FILE]

Every rate is the best of several calls, alternated with the machine's own ceilings.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import torch

from lamella.native.gguf_linear import FORMATS, linear_gguf, pack_gguf
from lamella.native.int8 import linear_int8, quantize_int8, require_library
from lamella.native.int8_head import build_int8_head
from lamella.native.library import Int, Pointer
from lamella.native.w8a8 import linear_w8a8

SHAPES = [(640, 4096), (2048, 640)]  # inputs, outputs
ROWS = [1, 2, 4, 8, 16, 64, 256, 1024]
HEAD_ROWS = [1, 2, 4, 8, 16, 32, 64]
REPEATS = 7


def best_seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


class Ceilings:
    def __init__(self) -> None:
        library = require_library()
        self._gflops = library.function("peak_gflops", Int, restype=ctypes.c_double)
        self._gbps = library.function("read_gbps", Pointer, Int, restype=ctypes.c_double)
        self._data = torch.ones(2**26)

    def measure(self) -> tuple[float, float]:
        """GFLOP/s of float multiply-adds, GB/s read from memory."""
        gflops = max(self._gflops(1_000_000) for _ in range(REPEATS))
        return gflops, max(self._gbps(self._data.data_ptr(), self._data.numel()) for _ in range(3))


def report(name: str, num_operations: int, num_bytes: int, seconds: float, ceilings: Ceilings) -> None:
    gflops, gbps = ceilings.measure()
    rate, stream = num_operations / seconds / 1e9, num_bytes / seconds / 1e9
    print(
        f"{name:40} {seconds * 1e3:9.3f} ms {rate:7.1f} GFLOP/s ({rate / gflops:4.2f} of {gflops:.0f}) "
        f"{stream:6.1f} GB/s ({stream / gbps:4.2f} of {gbps:.1f})",
        flush=True,
    )


def run_layers(ceilings: Ceilings) -> None:
    for num_in, num_out in SHAPES:
        weight = quantize_int8(torch.randn(num_out, num_in))
        for num_rows in ROWS:
            x = torch.randn(num_rows, num_in)
            for name, linear in (("int8", linear_int8), ("w8a8", linear_w8a8)):
                seconds = best_seconds(lambda linear=linear, x=x, weight=weight: linear(x, weight))
                label = f"{name} {num_in}->{num_out}, {num_rows} rows"
                report(label, 2 * num_rows * num_in * num_out, weight.num_bytes, seconds, ceilings)


def run_head(ceilings: Ceilings, num_in: int, num_out: int) -> None:
    panels = torch.randn(num_out // 16, num_in, 16)
    head = build_int8_head(panels, num_out)
    for num_rows in HEAD_ROWS:
        # states that lean to one output, as a model's do
        states = panels[torch.randint(0, panels.shape[0], (num_rows,)), :, 3] + torch.randn(num_rows, num_in)
        states = states.contiguous()
        seconds = best_seconds(lambda states=states: head.best(states), 3)
        label = f"head {num_in}->{num_out}, {num_rows} rows"
        report(label, 2 * num_rows * num_in * num_out, head.weight.num_bytes, seconds, ceilings)


def run_gguf(path: str, ceilings: Ceilings) -> None:
    """Every matrix of the file once: what a token of one request has to stream."""
    import gguf

    tensors = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.tensor_type.name in FORMATS]
    weights = [pack_gguf(tensor.data, tensor.tensor_type.name) for tensor in tensors]
    num_bytes = sum(weight.num_bytes for weight in weights)
    num_weights = sum(weight.num_out * weight.num_in for weight in weights)
    for num_rows in (1, 2, 4, 8):
        inputs = {weight.num_in: torch.randn(num_rows, weight.num_in) for weight in weights}

        def token(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                linear_gguf(inputs[weight.num_in], weight)

        report(
            f"all GGUF matrices, {num_rows} rows", 2 * num_rows * num_weights, num_bytes, best_seconds(token), ceilings
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", help=f"a GGUF file of types {', '.join(FORMATS)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--head", type=int, nargs=2, default=(640, 262_144), metavar=("INPUTS", "OUTPUTS"))
    parser.add_argument("--only", choices=("layers", "head", "gguf"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ceilings = Ceilings()
    if arguments.only in (None, "layers"):
        run_layers(ceilings)
    if arguments.only in (None, "head"):
        run_head(ceilings, *arguments.head)
    if arguments.gguf and arguments.only in (None, "gguf"):
        run_gguf(arguments.gguf, ceilings)


if __name__ == "__main__":
    main()
