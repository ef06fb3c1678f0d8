"""Time one attention backend on the layers of Gemma 3 270M: 15 sliding (W = 512) and 3 full.

Every layer has its own pages in one arena, scattered, so nothing is in the processor's cache that
would not be there in the model. A step includes what the backend derives from fresh metadata.

    python benchmarks/benchmark_attention.py --workload decode-64x192 --page-tokens 16
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from lamella.attention.backend import BACKEND_NAMES, AttentionBackend, AttentionParams, LayerCache, choose_backend
from lamella.attention.metadata import AttentionMetadata
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WINDOW_TOKENS = 4, 1, 256, 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# (tokens in the cache, new tokens) of each request.
WORKLOADS: dict[str, list[tuple[int, int]]] = {
    "decode-64x192": [(128 + 2 * i, 1) for i in range(64)],
    "decode-32x2100": [(2068 + 2 * i, 1) for i in range(32)],
    "decode-8x4100": [(4096 + i, 1) for i in range(8)],
    "prefill-16x128": [(0, 128)] * 16,
    "prefill-2048": [(0, 2048)],
    "prefill-2048-at-2048": [(2048, 2048)],
}


@dataclass(frozen=True, slots=True)
class Measurement:
    workload: str
    layer_kind: str
    num_layers: int
    page_tokens: int
    kv_dtype: str
    num_threads: int
    layer_ms: float  # median over the steps of (step / layers), write included
    gigabytes_per_second: float  # decode: visible K and V read
    gigaflops: float  # on visible (query, key) pairs


@dataclass(frozen=True, slots=True)
class Group:
    params: AttentionParams
    layers: list[LayerCache]
    make_metadata: Callable[[], AttentionMetadata]
    num_pairs: int
    num_keys_read: int


def make_group(
    backend: AttentionBackend,
    spec: KVCacheSpec,
    num_layers: int,
    requests: list[tuple[int, int]],
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
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
    pages = block_tables[rows, positions // page_tokens - first_blocks[rows]]
    seq_lens = np.array([prior + new for prior, new in requests])

    layer_bytes = page_tokens * spec.token_bytes
    unit_bytes = layer_bytes * num_layers
    arena = torch.zeros((int(widths.sum()) + 1) * unit_bytes, dtype=torch.uint8, device=device)
    arena.view(dtype).normal_()
    layers = [
        backend.layer_cache(
            arena,
            spec=spec,
            dtype=dtype,
            page_tokens=page_tokens,
            unit_bytes=unit_bytes,
            offset_bytes=layer * layer_bytes,
        )
        for layer in range(num_layers)
    ]

    def make_metadata() -> AttentionMetadata:
        host = {
            "query_start": query_start,
            "seq_lens": seq_lens,
            "first_blocks": first_blocks,
            "first_keys": np.zeros_like(first_blocks),
            "block_tables": block_tables,
        }
        return AttentionMetadata(
            page_tokens=page_tokens,
            num_decodes=sum(new == 1 for _, new in requests),
            slot_mapping=torch.from_numpy(pages * page_tokens + positions % page_tokens).to(device),
            **{name: torch.from_numpy(array).to(device) for name, array in host.items()},
            **{f"{name}_host": array for name, array in host.items()},
        )

    return Group(
        params=AttentionParams(spec=spec, num_heads=NUM_HEADS, scale=HEAD_DIM**-0.5),
        layers=layers,
        make_metadata=make_metadata,
        num_pairs=sum(int(position) + 1 - spec.first_visible(int(position)) for position in positions),
        num_keys_read=sum(prior + new - spec.first_visible(prior) for prior, new in requests),
    )


def measure(backend: AttentionBackend, group: Group, dtype: torch.dtype, num_steps: int) -> float:
    """Median milliseconds of one layer."""
    spec = group.params.spec
    device = group.layers[0].keys.device
    metadata = group.make_metadata()
    num_tokens, num_decodes = metadata.num_tokens, metadata.num_decodes
    query = torch.randn(num_tokens, NUM_HEADS, spec.k_dim, device=device).to(dtype)
    key = torch.randn(num_tokens, spec.num_kv_heads, spec.k_dim, device=device).to(dtype)
    value = torch.randn(num_tokens, spec.num_kv_heads, spec.v_dim, device=device).to(dtype)
    out = torch.empty(num_tokens, NUM_HEADS, spec.v_dim, device=device, dtype=dtype)
    seconds = []
    for _ in range(num_steps + 1):
        metadata = group.make_metadata()
        begin = time.perf_counter()
        for cache in group.layers:
            backend.write_kv(cache, key, value, metadata)
            if num_decodes:
                backend.decode(group.params, cache, query, metadata, out)
            else:
                backend.prefill(group.params, cache, query, metadata, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[1:])) * 1e3 / len(group.layers)


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> list[Measurement]:
    device = torch.device(arguments.device)
    dtype = DTYPES[arguments.kv_dtype]
    backend = choose_backend(arguments.backend, device)
    if arguments.num_threads:
        torch.set_num_threads(arguments.num_threads)
    shape = {"num_kv_heads": NUM_KV_HEADS, "k_dim": HEAD_DIM, "v_dim": HEAD_DIM, "itemsize_bytes": dtype.itemsize}
    kinds: dict[str, tuple[KVCacheSpec, int]] = {
        "sliding": (SlidingWindowSpec(window_tokens=WINDOW_TOKENS, **shape), 15),
        "full": (FullAttentionSpec(**shape), 3),
    }
    measurements = []
    print(f"{'workload':22} {'layers':>10} {'ms/layer':>9} {'GB/s':>6} {'GF':>6}")
    for name in arguments.workload or WORKLOADS:
        step_ms = 0.0
        for kind, (spec, num_layers) in kinds.items():
            group = make_group(backend, spec, num_layers, WORKLOADS[name], arguments.page_tokens, dtype, device)
            layer_ms = measure(backend, group, dtype, arguments.num_steps)
            flops = 2 * group.num_pairs * NUM_HEADS * (spec.k_dim + spec.v_dim)
            result = Measurement(
                workload=name,
                layer_kind=kind,
                num_layers=num_layers,
                page_tokens=arguments.page_tokens,
                kv_dtype=arguments.kv_dtype,
                num_threads=torch.get_num_threads(),
                layer_ms=layer_ms,
                gigabytes_per_second=group.num_keys_read * spec.token_bytes / layer_ms / 1e6,
                gigaflops=flops / layer_ms / 1e6,
            )
            measurements.append(result)
            step_ms += layer_ms * num_layers
            print(
                f"{name:22} {f'{num_layers} {kind}':>10} {layer_ms:9.2f} "
                f"{result.gigabytes_per_second:6.1f} {result.gigaflops:6.1f}",
                flush=True,
            )
        print(f"{name:22} {'all 18':>10} {step_ms:9.1f} ms a step", flush=True)
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--backend", choices=BACKEND_NAMES, default="torch")
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--kv-dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--num-steps", type=int, default=5, help="timed steps; the median counts")
    parser.add_argument("--output-json", help="write the measurements there")
    arguments = parser.parse_args()
    measurements = run(arguments)
    if arguments.output_json:
        with open(arguments.output_json, "w", encoding="utf-8") as file:
            json.dump([asdict(measurement) for measurement in measurements], file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
