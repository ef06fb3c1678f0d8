"""Attention backends on layers of Gemma 3 270M, beside what the processor and its memory can do.

    python benchmarks/benchmark_attention.py --threads 2 --output-json attention.json
    python benchmarks/benchmark_attention.py --workload decode-64-window --page-size 16 --page-size 128
    python benchmarks/benchmark_attention.py --device cuda

On a GPU it is the Triton kernels beside other libraries' kernels, on other workloads: benchmarks/gpu_attention.
What follows is about the CPU.

Steps take turns with each other (backends, and a window at 2k and at 32k of context) and with a measurement of what
memory and arithmetic reach at that moment. A time is the median of the steps, a share the median of what each is to the
measurement of its own turn: best against best would compare moments in which a shared machine ran at different speeds.
A step goes through the model's 15 sliding or 3 full layers (more of them where these would fit the caches), laid out as
the engine does: a page holds one block of every layer, and pages are scattered over one arena, up to 1.3 GB. It writes
K and V and attends; what a backend derives from fresh metadata, once for all layers, counts. GB/s are of the K and V
that queries see, each read once; GFLOP/s are of the (query, key) pairs that are not masked.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import click
import numpy as np
import torch

from lamella.attention.choice import BACKEND_NAMES, choose_backend
from lamella.attention.contract import AttentionBackend, AttentionParams, LayerCache, attend
from lamella.attention.metadata import AttentionMetadata
from lamella.errors import ConfigError
from lamella.kv_cache.memory import host_memory
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.native.library import Int, Pointer, load_library

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW_TOKENS = 4, 1, 256, 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_SLIDING_LAYERS, NUM_FULL_LAYERS = 15, 3
ARENA_BYTES = 2**27  # at least so many bytes of pages, if that takes no more than NUM_SLIDING_LAYERS layers
STREAM_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Workload:
    is_windowed: bool
    requests: tuple[tuple[int, int], ...]  # (tokens in the cache, new tokens) of each

    @property
    def is_decode(self) -> bool:
        return all(num_new == 1 for _, num_new in self.requests)


WORKLOADS = {
    "decode-64-window": Workload(True, tuple((1024 + 2 * i, 1) for i in range(64))),
    "decode-16-full-4096": Workload(False, ((4095, 1),) * 16),
    "decode-64-window-at-2k": Workload(True, ((2048, 1),) * 64),
    "decode-64-window-at-32k": Workload(True, ((32768, 1),) * 64),
    "decode-1-full-4096": Workload(False, ((4095, 1),)),
    "prefill-2048-window": Workload(True, ((0, 2048),)),
    "prefill-512-at-4096-window": Workload(True, ((4096, 512),)),
    "prefill-2048-at-4096-full": Workload(False, ((4096, 2048),)),
}
# Their times are compared with each other, so they are measured in the same minute.
COMPARED = ("decode-64-window-at-2k", "decode-64-window-at-32k")


@dataclass(frozen=True, slots=True)
class Measurement:
    workload: str
    backend: str
    page_tokens: int
    kv_dtype: str
    num_threads: int
    layer_ms: float  # the median step / layers
    gigabytes_per_second: float
    gigaflops: float
    read_share: float | None  # of what memory, and arithmetic, reach; None: not measured, without the native library
    flops_share: float | None


class Peaks:
    """What the processor reaches; not measured without the native library."""

    def __init__(self) -> None:
        self._library = load_library()
        if self._library is not None:
            self._gflops = self._library.function("peak_gflops", Int, restype=ctypes.c_double)
            self._read = self._library.function("read_gbps", Pointer, Int, restype=ctypes.c_double)
            self._data = torch.ones(STREAM_BYTES // 4)

    def measure(self) -> tuple[float, float] | None:
        """GB/s that are read, GFLOP/s of fused multiply-adds."""
        if self._library is None:
            return None
        return self._read(self._data.data_ptr(), self._data.numel()), self._gflops(2_000_000)


@dataclass(frozen=True, slots=True)
class Pages:
    """A workload's pages in every layer: the same numbers for all backends, but the layout is each one's."""

    spec: KVCacheSpec
    layers: list[LayerCache]
    make_metadata: Callable[[], AttentionMetadata]
    num_pairs: int
    num_keys_read: int


def make_pages(backend: AttentionBackend, workload: Workload, page_tokens: int, dtype: torch.dtype) -> Pages:
    shape = {"num_kv_heads": NUM_KV_HEADS, "k_dim": HEAD_DIM, "v_dim": HEAD_DIM, "itemsize_bytes": dtype.itemsize}
    spec: KVCacheSpec = (
        SlidingWindowSpec(window_tokens=WINDOW_TOKENS, **shape) if workload.is_windowed else FullAttentionSpec(**shape)
    )
    requests = workload.requests
    rng = np.random.default_rng(0)
    first_blocks = np.array([spec.first_visible(prior) // page_tokens for prior, _ in requests])
    stop_blocks = np.array([(prior + new - 1) // page_tokens + 1 for prior, new in requests])
    widths = stop_blocks - first_blocks
    block_tables = np.full((len(requests), widths.max()), -1, dtype=np.int64)
    block_tables[np.arange(widths.max()) < widths[:, None]] = 1 + rng.permutation(widths.sum())
    lengths = np.array([new for _, new in requests])
    query_start = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(requests)), lengths)
    positions = np.concatenate([np.arange(prior, prior + new) for prior, new in requests])
    slots = block_tables[rows, positions // page_tokens - first_blocks[rows]] * page_tokens + positions % page_tokens

    layer_bytes = page_tokens * spec.token_bytes
    num_ids = int(widths.sum()) + 1
    num_layers = max(
        NUM_SLIDING_LAYERS if workload.is_windowed else NUM_FULL_LAYERS,
        min(NUM_SLIDING_LAYERS, -(-ARENA_BYTES // (num_ids * layer_bytes))),
    )
    unit_bytes = layer_bytes * num_layers
    arena = host_memory(num_ids * unit_bytes)
    arena.view(dtype).normal_()
    layout = {"spec": spec, "dtype": dtype, "page_tokens": page_tokens, "unit_bytes": unit_bytes}
    layers = [backend.layer_cache(arena, offset_bytes=layer * layer_bytes, **layout) for layer in range(num_layers)]
    host = {
        "query_start": query_start,
        "seq_lens": np.array([prior + new for prior, new in requests]),
        "first_blocks": first_blocks,
        "first_keys": np.zeros_like(first_blocks),
        "block_tables": block_tables,
    }

    def make_metadata() -> AttentionMetadata:
        return AttentionMetadata(
            page_tokens=page_tokens,
            num_decodes=len(requests) if workload.is_decode else 0,
            table_rows=torch.arange(len(requests)),
            slot_mapping=torch.from_numpy(slots),
            **{name: torch.from_numpy(array) for name, array in host.items()},
            **{f"{name}_host": array for name, array in host.items()},
        )

    return Pages(
        spec,
        layers,
        make_metadata,
        num_pairs=sum(int(position) + 1 - spec.first_visible(int(position)) for position in positions),
        num_keys_read=sum(prior + new - spec.first_visible(prior) for prior, new in requests),
    )


def make_inputs(workload: Workload, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value of the new tokens, [tokens, heads, head dim]."""
    num_tokens = sum(num_new for _, num_new in workload.requests)
    return [torch.randn(num_tokens, heads, HEAD_DIM).to(dtype) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def layer_seconds(backend: AttentionBackend, pages: Pages, inputs: list[torch.Tensor]) -> float:
    """One step through all layers, divided by their number."""
    params = AttentionParams(spec=pages.spec, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5)
    metadata = pages.make_metadata()
    start = time.perf_counter()
    for cache in pages.layers:
        attend(backend, params, cache, *inputs, metadata)
    return (time.perf_counter() - start) / len(pages.layers)


@torch.inference_mode()
def measure(
    names: tuple[str, ...],
    backends: list[AttentionBackend],
    page_tokens: int,
    kv_dtype: str,
    num_steps: int,
    peaks: Peaks,
) -> list[Measurement]:
    """The workloads of these names, whose steps take turns."""
    dtype = DTYPES[kv_dtype]
    cases = [
        (name, backend, make_pages(backend, WORKLOADS[name], page_tokens, dtype), make_inputs(WORKLOADS[name], dtype))
        for name in names
        for backend in backends
    ]
    seconds = np.empty((num_steps, len(cases)))
    measured_peaks = []
    for step in range(num_steps):
        measured_peaks.append(peaks.measure())
        for i, (_, backend, pages, inputs) in enumerate(cases):
            seconds[step, i] = layer_seconds(backend, pages, inputs)
    known_peaks = [peak for peak in measured_peaks if peak is not None]
    measurements = []
    for (name, backend, pages, _), times in zip(cases, seconds.T, strict=True):
        gigabytes = pages.num_keys_read * pages.spec.token_bytes / 1e9
        gigaflops = 2 * pages.num_pairs * NUM_HEADS * 2 * HEAD_DIM / 1e9
        read_share = flops_share = None
        if known_peaks:
            rates = np.array([gigabytes, gigaflops]) / times[:, None]
            read_share, flops_share = np.median(rates / np.array(known_peaks), axis=0).tolist()
        median = float(np.median(times))
        measurements.append(
            Measurement(
                name,
                backend.name,
                page_tokens,
                kv_dtype,
                torch.get_num_threads(),
                median * 1e3,
                gigabytes / median,
                gigaflops / median,
                read_share,
                flops_share,
            )
        )
    return measurements


def markdown(measurements: list[Measurement]) -> str:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    lines = [
        f"torch {torch.__version__}, {measurements[0].num_threads} threads",
        "",
        "| workload | page | backend | ms/layer | GB/s | of read | GFLOP/s | of peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in measurements:
        lines.append(
            f"| {one.workload} | {one.page_tokens} | {one.backend} | {one.layer_ms:.2f} "
            f"| {one.gigabytes_per_second:.1f} | {share(one.read_share)} "
            f"| {one.gigaflops:.1f} | {share(one.flops_share)} |"
        )
    return "\n".join(lines)


def parse_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device of torch's; try cpu or cuda") from error


def in_turns(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The names one by one, but those that are compared together."""
    for are_compared, group in groupby(names, COMPARED.__contains__):
        if are_compared:
            yield tuple(group)
        else:
            yield from zip(group)


def check_workloads(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(
                f"workload {name!r} is not one for the CPU; choose from {', '.join(WORKLOADS)}, or leave it out for all"
            )


def write_results(table: str, results: list, output_json: str | None, output_markdown: str | None) -> None:
    click.echo(table)
    if output_json:
        rows = [asdict(result) for result in results]
        Path(output_json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if output_markdown:
        Path(output_markdown).write_text(table + "\n", encoding="utf-8")


def measure_on_gpu(workloads, page_sizes, kv_dtype, device, num_steps, output_json, output_markdown) -> None:
    # These import triton.
    from gpu_attention.comparison import machine_line, run
    from gpu_attention.report import markdown as gpu_markdown

    tables, figures = [], []
    for page_tokens in page_sizes or (16,):
        ceilings, more, missing = run(
            workloads, page_tokens=page_tokens, dtype=DTYPES[kv_dtype], device=device, num_repeats=num_steps
        )
        machine = f"{machine_line(device)}; pages of {page_tokens} tokens, {kv_dtype}"
        tables.append(gpu_markdown(machine, ceilings, more, missing))
        figures += more
    write_results("\n\n".join(tables), figures, output_json, output_markdown)


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--workload", "workloads", multiple=True, help="name, of the device's  [default: all]")
@click.option("--backend", "names", type=click.Choice(BACKEND_NAMES), multiple=True, default=("native", "torch"),
              help="on the CPU; a GPU runs all kernels that are installed")  # fmt: skip
@click.option("--page-size", "page_sizes", type=click.IntRange(min=1), multiple=True,
              help="tokens  [default: 16, and on the CPU 32, 64 and 128 too for decode]")  # fmt: skip
@click.option("--kv-dtype", type=click.Choice(list(DTYPES)), help="[default: float32 on the CPU, bfloat16 on a GPU]")
@click.option("--device", default="cpu")
@click.option("--threads", type=click.IntRange(min=1), help="[default: torch's]")
@click.option("--steps", "num_steps", type=click.IntRange(min=1), default=15,
              help="the median counts")  # fmt: skip
@click.option("--output-json", type=click.Path(), help="file for a list of one object per figure")
@click.option("--output-markdown", type=click.Path(), help="file for the table")
def main(workloads, names, page_sizes, kv_dtype, device, threads, num_steps, output_json, output_markdown) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    measurements = []
    try:
        device = parse_device(device)
        if device.type != "cpu":
            measure_on_gpu(
                workloads, page_sizes, kv_dtype or "bfloat16", device, num_steps, output_json, output_markdown
            )
            return
        check_workloads(workloads)
        peaks = Peaks()
        backends = [choose_backend(name, device) for name in names]
        for group in in_turns(workloads or WORKLOADS):
            for page_tokens in page_sizes or ((16, 32, 64, 128) if WORKLOADS[group[0]].is_decode else (16,)):
                measurements += measure(group, backends, page_tokens, kv_dtype or "float32", num_steps, peaks)
                click.echo(f"{', '.join(group)}, pages of {page_tokens}: done", err=True)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    write_results(markdown(measurements), measurements, output_json, output_markdown)


if __name__ == "__main__":
    main()
