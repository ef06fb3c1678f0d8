"""Trying a tile: does it compile, without spills, to a kernel that gives right results, and how long does it take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from attention_compile_report import SHAPES, SHARED_LIMITS, NamedShape, compile_kernel, kernels
from attention_roofline import Workload
from gpu_attention.batches import make_batch
from gpu_attention.comparison import MAX_DIFFERENCE, relative_difference
from gpu_attention.peers import backend_call
from gpu_attention.tile_choice import Trial
from gpu_attention.timing import Timer
from lamella.attention.reference import ReferenceBackend
from lamella.attention.triton.backend import TritonBackend
from lamella.attention.triton.shapes import visibility_rule
from lamella.attention.triton.tuning import Tile
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

PAGE_TOKENS = 16
DTYPES = {2: torch.bfloat16, 4: torch.float32}
V_DIMS = {192: 128}  # of head classes whose V is narrower than K: MiMo and DeepSeek


def specs(head_dim: int, itemsize_bytes: int, window_tokens: int) -> tuple[KVCacheSpec, KVCacheSpec]:
    """A sliding and a full layer. Eight KV heads; fewer of the widest, as models have."""
    shape = {
        "num_kv_heads": 8 if head_dim <= 256 else 2,
        "k_dim": head_dim,
        "v_dim": V_DIMS.get(head_dim, head_dim),
        "itemsize_bytes": itemsize_bytes,
    }
    return SlidingWindowSpec(window_tokens=window_tokens, **shape), FullAttentionSpec(**shape)


def trial_workloads(kernel: str, head_dim: int, itemsize_bytes: int) -> tuple[Workload, ...]:
    """What a tile is timed on: four query heads to a KV head, in a sliding and a full layer."""
    workloads = []
    for spec in specs(head_dim, itemsize_bytes, 1024):
        sizes = (64, 8191, 1) if kernel == "decode" else (1, 4096, 4096)
        workloads.append(Workload(kernel, spec, 4 * spec.num_kv_heads, *sizes))
    return tuple(workloads)


def named_shape(work: Workload, dtype: torch.dtype) -> NamedShape:
    """The layer of a workload as the compile report describes it."""
    spec = work.spec
    rule, reach = visibility_rule(spec)
    shape = dataclasses.replace(
        SHAPES[0].shape,
        rule=rule,
        reach=reach,
        num_kv_heads=spec.num_kv_heads,
        group=work.num_heads // spec.num_kv_heads,
        k_dim=spec.k_dim,
        v_dim=spec.v_dim,
        page_tokens=PAGE_TOKENS,
        dtype=dtype,
    )
    return NamedShape(work.name, shape)


def compile_problem(kernel: str, named: NamedShape, tile: Tile, target: str) -> str | None:
    """Why `tile` is not to be used for `kernel` ("decode" or "prefill") on `target` ("sm_90", "gfx942"); None if the
    compiler makes of it a kernel that spills nothing and fits."""
    own = next(one for one in kernels(named, target) if one.name == kernel)
    constants = own.constants | {
        "GROUP_BLOCK": min(named.shape.group, tile.block_m),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    if kernel == "decode":
        # As decode_constants has it: no more rows than query heads, but what a matrix unit takes.
        constants["BLOCK_M"] = min(tile.block_m, max(16, 1 << (named.shape.group - 1).bit_length()))
    try:
        measured = compile_kernel(dataclasses.replace(own, constants=constants, tile=tile), named, target)
    except Exception as error:  # whatever the compiler raises: this tile is out, the next one is tried
        first_line = (str(error) or "no message").splitlines()[0]
        return f"does not compile ({type(error).__name__}: {first_line})"
    if measured.spilled:
        return f"spills {measured.spilled}"
    limit = SHARED_LIMITS.get(target)
    if limit is not None and measured.shared_bytes > limit:
        return f"wants {measured.shared_bytes:,} bytes of shared memory, {target} has {limit:,}"
    return None


def result_problem(kernel: str, tile: Tile, *, head_dim: int, itemsize_bytes: int, device: torch.device) -> str | None:
    """By how much the outputs with `tile` differ from the reference's, where that is too much."""
    dtype = DTYPES[itemsize_bytes]
    for spec in specs(head_dim, itemsize_bytes, 37):
        sizes = (2, 299, 1) if kernel == "decode" else (1, 60, 75)
        work = Workload(kernel, spec, 4 * spec.num_kv_heads, *sizes)
        batch = make_batch(work, page_tokens=PAGE_TOKENS, dtype=dtype, device=device)
        expected = backend_call(ReferenceBackend(), batch)()
        difference = relative_difference(backend_call(TritonBackend(tile=tile), batch)(), expected)
        if difference > MAX_DIFFERENCE[dtype]:
            return f"outputs differ from the reference's by {difference:.1%}"
    return None


def try_tiles(
    kernel: str,
    tiles: Sequence[Tile],
    *,
    head_dim: int,
    itemsize_bytes: int,
    target: str,
    timer: Timer,
) -> list[Trial]:
    """A trial per tile, on the timer's device, which is a `target`."""
    workloads = trial_workloads(kernel, head_dim, itemsize_bytes)
    dtype = DTYPES[itemsize_bytes]
    layers = [named_shape(work, dtype) for work in workloads]
    batches = [make_batch(work, page_tokens=PAGE_TOKENS, dtype=dtype, device=timer.device) for work in workloads]

    def problem_of(tile: Tile) -> str | None:
        for layer in layers:
            problem = compile_problem(kernel, layer, tile, target)
            if problem is not None:
                return problem
        return result_problem(kernel, tile, head_dim=head_dim, itemsize_bytes=itemsize_bytes, device=timer.device)

    trials = []
    for tile in tiles:
        problem = problem_of(tile)
        if problem is None:
            calls = [backend_call(TritonBackend(tile=tile), batch) for batch in batches]
            trials.append(Trial(tile, tuple(timer.seconds(call) for call in calls)))
        else:
            trials.append(Trial(tile, problem=problem))
    return trials
