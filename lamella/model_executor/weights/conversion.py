"""From a checkpoint's tensors to the model's: fused, in the compute dtype, norms as float32 multipliers.

First a plan is made from headers alone, which finds every problem before memory is taken; then pieces of a
few megabytes are read and converted by a few threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.weights.checkpoint import Checkpoint
from lamella.model_executor.weights.kv_scales import kv_scale_layer

_PIECE_ELEMENTS = 1 << 20  # 4 MiB as float32: stays in the cache between reading and writing
_MAX_PROBLEMS_TOLD = 5
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Part(NamedTuple):
    """A checkpoint tensor and how many rows of the parameter it fills."""

    name: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter of the model: its parts, from the first row to the last, fill its shape exactly."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


class Piece(NamedTuple):
    """Converted rows [row_start, row_start + len(values)) of a parameter."""

    plan: ParameterPlan
    row_start: int
    values: torch.Tensor


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Norm multipliers are float32 whatever the compute dtype is."""
    return torch.float32 if is_norm(name) else dtype


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def plan_parameters(
    checkpoint: Checkpoint, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> list[ParameterPlan]:
    """A plan per parameter in `shapes`, wider dtypes first. Reads headers only.

    Raises one ModelLoadError that lists the first problems: tensors that are missing, of the wrong shape, stored in
    a form that cannot be read, or that the model has no place for.
    """
    plans, problems, used = [], [], set()
    for name, shape in shapes.items():
        parts = _parts_of(name, tuple(shape), config)
        for part in parts:
            used.add(part.name)
            stored = checkpoint.tensors.get(part.name)
            wanted = (part.num_rows, *shape[1:])
            if stored is None:
                problems.append(f"{part.name} is missing")
            elif stored.problem is not None:
                problems.append(stored.problem)
            elif stored.shape != wanted:
                problems.append(f"{stored.stored_name} has shape {list(stored.shape)}, wanted {list(wanted)}")
        plans.append(ParameterPlan(name, tuple(shape), parameter_dtype(name, dtype), parts))
    if config.tie_word_embeddings:
        used.add("lm_head.weight")  # where one is stored, it has been found to equal the embeddings
    problems += [
        f"{stored.stored_name} has no place in the model"
        for name, stored in checkpoint.tensors.items()
        if name not in used and not _is_own_kv_scale(name, config)
    ]
    if problems:
        told = "; ".join(problems[:_MAX_PROBLEMS_TOLD])
        more = f"; and {len(problems) - _MAX_PROBLEMS_TOLD} more" if len(problems) > _MAX_PROBLEMS_TOLD else ""
        raise ModelLoadError(f"the weights do not fit the model's configuration: {told}{more}")
    return sorted(plans, key=lambda plan: -plan.dtype.itemsize)


def _is_own_kv_scale(name: str, config: ModelConfig) -> bool:
    layer = kv_scale_layer(name)
    return layer is not None and layer < config.num_layers


def part_names(name: str) -> tuple[str, ...]:
    """The checkpoint's tensors that the parameter `name` is made of, first rows first."""
    for fused, names in _FUSED.items():
        if fused in name:
            return tuple(name.replace(fused, part) for part in names)
    return (name,)


def _parts_of(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[Part, ...]:
    for fused in _FUSED:
        if fused in name:
            if fused == "mlp.gate_up_proj":
                rows: tuple[int, ...] = (config.intermediate_size,) * 2
            else:
                kv_rows = config.num_kv_heads * config.head_dim
                rows = (config.num_heads * config.head_dim, kv_rows, kv_rows)
            if sum(rows) != shape[0]:
                raise ModelLoadError(
                    f"{name}: the model expects {shape[0]} rows, the configuration gives {' + '.join(map(str, rows))}"
                )
            return tuple(Part(part, num_rows) for part, num_rows in zip(part_names(name), rows, strict=True))
    return (Part(name, shape[0]),)


def converted_pieces(checkpoint: Checkpoint, plans: Iterable[ParameterPlan]) -> Iterator[Piece]:
    """Every parameter in pieces, in the plans' order and rows ascending; a few are in flight at once."""

    def convert(job: tuple[ParameterPlan, str, int, int, int]) -> Piece:
        plan, name, start, stop, row_start = job
        values = checkpoint.read_rows(name, start, stop)
        if is_norm(plan.name) and checkpoint.norm_offset:
            values = values.float() + checkpoint.norm_offset
        return Piece(plan, row_start, values.to(plan.dtype))

    return _mapped_in_order(convert, _jobs(plans), num_threads=min(4, os.cpu_count() or 1))


def _jobs(plans: Iterable[ParameterPlan]) -> Iterator[tuple[ParameterPlan, str, int, int, int]]:
    for plan in plans:
        piece_rows = max(1, _PIECE_ELEMENTS // prod(plan.shape[1:]))
        row_start = 0
        for part in plan.parts:
            for start in range(0, part.num_rows, piece_rows):
                stop = min(start + piece_rows, part.num_rows)
                yield plan, part.name, start, stop, row_start + start
            row_start += part.num_rows


def _mapped_in_order(function: Callable[[_In], _Out], items: Iterable[_In], *, num_threads: int) -> Iterator[_Out]:
    """Like map(), computed by threads that stay at most two items each ahead of the consumer."""
    with ThreadPoolExecutor(num_threads) as pool:
        ahead: deque[Future[_Out]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
