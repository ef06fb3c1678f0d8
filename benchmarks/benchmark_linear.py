"""Linear layers on the CPU: the native kernels and torch beside what the processor and its memory can do.

    python benchmarks/benchmark_linear.py --threads 2 --output-json linear.json
    python benchmarks/benchmark_linear.py --layer lm_head --rows 1 --rows 8

Shapes are those of Gemma 3 270M. A figure is the best of many runs that take turns with each other and with the
measurement of the peaks: all of them suffer alike from what else the machine does. With `--threads 1` it is the
processor's time that counts, so other processes hardly matter then. `--cold` reads each weight from
memory, as a model's layers are in a step; without it, all weights but the language model head's stay in the cache.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch.nn import functional

from lamella.native.library import Int, NativeLibrary, Pointer, load_library
from lamella.native.linear import PackedWeight, linear, linear_argmax, linear_topk, pack_weight

# (inputs, outputs)
LAYERS = {
    "qkv_proj": (640, 1536),
    "o_proj": (1024, 640),
    "gate_up_proj": (640, 4096),
    "down_proj": (2048, 640),
    "lm_head": (640, 262_144),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
MAX_LM_HEAD_ROWS = 64  # logits of more are never written
COLD_BYTES = 2**27  # more than a last-level cache
STREAM_BYTES = 2**28
TOPK = 50


@dataclass(frozen=True, slots=True)
class Measurement:
    layer: str
    num_rows: int
    kernel: str
    num_threads: int
    milliseconds: float
    gflops: float
    gigabytes_per_second: float  # of the weight, once
    peak_gflops: float
    peak_gigabytes_per_second: float


def clock() -> float:
    """Seconds. Of the processor's time where there is one thread, for that does not count other processes."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Peaks:
    """The best that was seen so far."""

    def __init__(self, library: NativeLibrary) -> None:
        self._gflops = library.function("peak_gflops", Int, restype=ctypes.c_double)
        self._read = library.function("read_gbps", Pointer, Int, restype=ctypes.c_double)
        self._data = torch.ones(STREAM_BYTES // 4)
        self.gflops = self.gigabytes_per_second = 0.0

    def measure(self) -> None:
        self.gflops = max(self.gflops, self._rate(self._gflops, 500_000))
        read = self._rate(self._read, self._data.data_ptr(), self._data.numel())
        self.gigabytes_per_second = max(self.gigabytes_per_second, read)

    @staticmethod
    def _rate(function: Callable[..., float], *arguments: int) -> float:
        wall_start, start = time.perf_counter(), clock()
        rate = function(*arguments)
        return rate * (time.perf_counter() - wall_start) / (clock() - start)


def copies_of(weight: torch.Tensor, is_cold: bool) -> list[torch.Tensor]:
    num_copies = -(-COLD_BYTES // (weight.numel() * 4)) if is_cold else 1
    return [weight] + [weight.clone() for _ in range(num_copies - 1)]


def best_seconds(runs: dict[str, list[Callable[[], object]]], peaks: Peaks, seconds: float) -> dict[str, float]:
    """The shortest time of each kernel, whose runs differ only in where their weight lies."""
    best = dict.fromkeys(runs, float("inf"))
    stop = time.perf_counter() + seconds
    num_rounds = 0
    while num_rounds < 3 or time.perf_counter() < stop:
        if num_rounds % 10 == 0:
            peaks.measure()
        for kernel, kernel_runs in runs.items():
            # A few in a row: the first finds its threads asleep.
            for run in [kernel_runs[(3 * num_rounds + index) % len(kernel_runs)] for index in range(3)]:
                start = clock()
                run()
                best[kernel] = min(best[kernel], clock() - start)
        num_rounds += 1
    return best


def kernel_runs(layer: str, num_rows: int, weights: list, packed: list) -> dict[str, list[Callable[[], object]]]:
    x = torch.randn(num_rows, LAYERS[layer][0])
    runs: dict[str, list[Callable[[], object]]] = {}
    if layer != "lm_head" or num_rows <= MAX_LM_HEAD_ROWS:
        out = torch.empty(num_rows, LAYERS[layer][1])
        runs["native"] = [lambda weight=weight: linear(x, weight, out=out) for weight in packed]
        runs["torch"] = [lambda weight=weight: functional.linear(x, weight) for weight in weights]
    if layer == "lm_head":
        runs["native argmax"] = [lambda: linear_argmax(x, packed[0])]
        runs["native top-k"] = [lambda: linear_topk(x, packed[0], TOPK, with_logsumexp=True)]
    return runs


def measure_layer(
    layer: str, rows: tuple[int, ...], peaks: Peaks, seconds: float, is_cold: bool
) -> list[tuple[int, str, float]]:
    num_in, num_out = LAYERS[layer]
    weights = copies_of(torch.randn(num_out, num_in), is_cold)
    data = copies_of(pack_weight(weights[0]).data, is_cold)
    packed = [PackedWeight(copy, num_out, num_in) for copy in data]
    results = []
    for num_rows in rows:
        best = best_seconds(kernel_runs(layer, num_rows, weights, packed), peaks, seconds)
        results += [(num_rows, kernel, shortest) for kernel, shortest in best.items()]
        click.echo(f"{layer}, {num_rows} rows: done", err=True)
    return results


def markdown(measurements: list[Measurement]) -> str:
    first = measurements[0]
    lines = [
        f"torch {torch.__version__}, {first.num_threads} threads; peak {first.peak_gflops:.0f} GFLOP/s, "
        f"read {first.peak_gigabytes_per_second:.1f} GB/s",
        "",
        "| layer | rows | kernel | ms | GFLOP/s | of peak | GB/s | of read |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in measurements:
        lines.append(
            f"| {one.layer} | {one.num_rows} | {one.kernel} | {one.milliseconds:.3f} | {one.gflops:.1f} "
            f"| {one.gflops / one.peak_gflops:.0%} | {one.gigabytes_per_second:.1f} "
            f"| {one.gigabytes_per_second / one.peak_gigabytes_per_second:.0%} |"
        )
    return "\n".join(lines)


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--layer", "layers", type=click.Choice(list(LAYERS)), multiple=True, default=tuple(LAYERS))
@click.option("--rows", type=click.IntRange(min=1), multiple=True, default=ROWS)
@click.option("--threads", type=click.IntRange(min=1), help="[default: torch's]")
@click.option("--seconds", type=click.FloatRange(min=0), default=1.0, help="for each layer and number of rows")
@click.option("--cold", "is_cold", is_flag=True, help="take turns at copies of a weight that no cache holds")
@click.option("--output-json", type=click.Path(), help="file for a list of one object per figure")
@click.option("--output-markdown", type=click.Path(), help="file for the table")
def main(layers, rows, threads, seconds, is_cold, output_json, output_markdown) -> None:
    library = load_library()
    if library is None:
        raise click.ClickException("there are no native kernels here; install lamella where there is a C++ compiler")
    if threads is not None:
        torch.set_num_threads(threads)
    peaks = Peaks(library)
    figures = [(layer, *figure) for layer in layers for figure in measure_layer(layer, rows, peaks, seconds, is_cold)]
    measurements = [
        Measurement(
            layer=layer,
            num_rows=num_rows,
            kernel=kernel,
            num_threads=torch.get_num_threads(),
            milliseconds=shortest * 1e3,
            gflops=2e-9 * num_rows * LAYERS[layer][0] * LAYERS[layer][1] / shortest,
            gigabytes_per_second=4e-9 * LAYERS[layer][0] * LAYERS[layer][1] / shortest,
            peak_gflops=peaks.gflops,
            peak_gigabytes_per_second=peaks.gigabytes_per_second,
        )
        for layer, num_rows, kernel, shortest in figures
    ]
    click.echo(markdown(measurements))
    if output_json is not None:
        objects = [asdict(one) for one in measurements]
        Path(output_json).write_text(json.dumps(objects, indent=4) + "\n", encoding="utf-8")
    if output_markdown is not None:
        Path(output_markdown).write_text(markdown(measurements) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
