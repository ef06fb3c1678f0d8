"""From a checkpoint's tensors to the model's: fused, in the compute dtype, norms as float32 multipliers.

First a plan is made from headers alone, which finds every problem before memory is taken; then pieces of a
few megabytes are read and converted by a few threads.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import torch

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import ceil_div
from lamella.model_executor.models.config import ModelConfig, kv_sharing
from lamella.model_executor.weights.checkpoint import Checkpoint
from lamella.model_executor.weights.kv_scales import kv_scale_layer
from lamella.model_executor.weights.parameters import Parameter, Part, is_float32, is_norm
from lamella.model_executor.weights.row_pairs import unpaired

_PIECE_ELEMENTS = 1 << 20  # 4 MiB as float32: stays in the cache between reading and writing
_MAX_PROBLEMS_TOLD = 5

_In = TypeVar("_In")
_Out = TypeVar("_Out")


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
    """Norms, sinks and the like are float32 whatever the compute dtype is."""
    return torch.float32 if is_float32(name) else dtype


def plan_parameters(
    checkpoint: Checkpoint, config: ModelConfig, parameters: Sequence[Parameter], dtype: torch.dtype
) -> list[ParameterPlan]:
    """A plan per parameter, wider dtypes first. Reads headers only.

    Raises one ModelLoadError that lists the first problems: tensors that are missing, of the wrong shape, stored in
    a form that cannot be read, or that the model has no place for.
    """
    plans, problems, used = [], [], set()
    for name, shape, parts in ((each.name, each.shape, stored_parts(checkpoint, each)) for each in parameters):
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
        plans.append(ParameterPlan(name, shape, parameter_dtype(name, dtype), parts))
    if config.tie_word_embeddings:
        used.add("lm_head.weight")  # where one is stored, it has been found to equal the embeddings
    left_out = tuple(
        f"{prefix}.{config.num_layers + extra}."  # of names that the family does not know, as GGUF spells them
        for prefix in ("layers", "blk")
        for extra in range(config.num_left_out_layers)
    )
    problems += [
        f"{stored.stored_name} has no place in the model"
        for name, stored in checkpoint.tensors.items()
        if name not in used
        and not name.startswith(left_out)
        and not _is_own_kv_scale(name, config)
        and not _is_of_read_kv(name, config)
    ]
    if problems:
        told = "; ".join(problems[:_MAX_PROBLEMS_TOLD])
        more = f"; and {len(problems) - _MAX_PROBLEMS_TOLD} more" if len(problems) > _MAX_PROBLEMS_TOLD else ""
        raise ModelLoadError(f"the weights do not fit the model's configuration: {told}{more}")
    return sorted(plans, key=lambda plan: -plan.dtype.itemsize)


def stored_parts(checkpoint: Checkpoint, parameter: Parameter) -> tuple[Part, ...]:
    """The parameter's parts as the checkpoint has them: where it holds the parameter fused, under its own name, that is
    the only one."""
    if len(parameter.parts) > 1 and parameter.name in checkpoint.tensors:
        return (Part(parameter.name, parameter.shape[0]),)
    return parameter.parts


def _is_own_kv_scale(name: str, config: ModelConfig) -> bool:
    layer = kv_scale_layer(name)
    return layer is not None and layer < config.num_layers


def _is_of_read_kv(name: str, config: ModelConfig) -> bool:
    """Whether the tensor would make K or V in a layer that reads another's: some checkpoints have it, to no end."""
    found = re.fullmatch(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.(weight|bias)", name)
    return found is not None and int(found[1]) in kv_sharing(config)


def converted_pieces(checkpoint: Checkpoint, plans: Iterable[ParameterPlan]) -> Iterator[Piece]:
    """Every parameter in pieces, in the plans' order and rows ascending; a few are in flight at once."""

    def convert(job: _Job) -> Piece:
        values = checkpoint.read_rows(job.part.name, job.start, job.stop)
        if is_norm(job.plan.name) and checkpoint.norm_offset:
            values = values.float() + checkpoint.norm_offset
        if job.part.head_rows and checkpoint.has_pairs:
            values = unpaired(values, job.part.head_rows, job.part.paired_rows)
        if job.part.factor != 1.0:
            values = values.float() * job.part.factor
        return Piece(job.plan, job.row_start, values.to(job.plan.dtype))

    return _mapped_in_order(convert, _jobs(plans), num_threads=min(4, os.cpu_count() or 1))


class _Job(NamedTuple):
    """Rows [start, stop) of a part, which begin at row_start of the parameter."""

    plan: ParameterPlan
    part: Part
    start: int
    stop: int
    row_start: int


def _jobs(plans: Iterable[ParameterPlan]) -> Iterator[_Job]:
    for plan in plans:
        row_start = 0
        for part in plan.parts:
            piece_rows = max(1, _PIECE_ELEMENTS // prod(plan.shape[1:]))
            if part.head_rows:  # whole heads, for their rows may change places
                piece_rows = ceil_div(piece_rows, part.head_rows) * part.head_rows
            for start in range(0, part.num_rows, piece_rows):
                yield _Job(plan, part, start, min(start + piece_rows, part.num_rows), row_start + start)
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
