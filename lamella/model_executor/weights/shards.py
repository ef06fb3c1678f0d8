"""Which slices of a model's parameters a worker has, and a worker's weights cut from those of the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from lamella.errors import InvariantError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.config import AttentionConfig, ModelConfig
from lamella.model_executor.models.registry import weight_map
from lamella.model_executor.models.sharding import (
    Inputs,
    OfExpert,
    OfVocabulary,
    Outputs,
    ShardRule,
    Unit,
    Whole,
    Worker,
    shard_config,
)
from lamella.model_executor.weights.parameters import Parameter, Part

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class PartShard(NamedTuple):
    """A worker's slice of a checkpoint's tensor `name`, as `Part.name`.

    first_row: where that tensor's rows begin in the whole model's parameter. rows: which of the tensor's own the worker
    has; columns: which inputs, None for all. is_zero: the worker has zeros of this shape, and another one the values.
    """

    name: str
    first_row: int
    rows: range
    columns: range | None = None
    is_zero: bool = False


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A parameter of a worker's model: its parts fill `shape` from the first row to the last."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[PartShard, ...]


def parameter_shards(config: ModelConfig, worker: Worker) -> list[ParameterShard]:
    """What `Model(shard_config(config, worker), ...)` has, in the order of its parameters, by the rules of the model's
    family (`WeightMap.sharding`). config: of the whole model.

    Raises ConfigError for sizes that the workers cannot divide evenly.
    """
    shard, rules = shard_config(config, worker), weight_map(config).sharding
    whole = {each.name: each for each in Model(config, torch.float32).parameters()}
    return [_shard_of(whole[own.name], own, config, worker, rules) for own in Model(shard, torch.float32).parameters()]


def cut_weights(tensors: Mapping[str, torch.Tensor], shards: Iterable[ParameterShard]) -> dict[str, torch.Tensor]:
    """What the worker's model loads, cut from what the whole model does: tensors in rows (`forms.RowMajor`) by their
    names. The results are copies, of the same dtypes."""
    return {shard.name: torch.cat([_cut(tensors[shard.name], part) for part in shard.parts]) for shard in shards}


def _cut(tensor: torch.Tensor, part: PartShard) -> torch.Tensor:
    rows = tensor[part.first_row + part.rows.start : part.first_row + part.rows.stop]
    piece = rows if part.columns is None else rows[:, part.columns.start : part.columns.stop]
    return torch.zeros_like(piece) if part.is_zero else piece


def _shard_of(
    whole: Parameter, own: Parameter, config: ModelConfig, worker: Worker, rules: Mapping[str, ShardRule]
) -> ParameterShard:
    layer = _LAYER.match(whole.name)
    attention = None if layer is None else config.layers[int(layer[1])].attention
    held = {part.name for part in own.parts}  # of experts, only the worker's
    parts, first_row = [], 0
    for part in whole.parts:
        if part.name in held:
            rule = _rule(part.name, rules)
            parts.append(_part_shard(part, first_row, whole.shape, _effective(rule, worker), attention, worker))
        first_row += part.num_rows
    num_rows = sum(len(part.rows) for part in parts)
    columns = {part.columns for part in parts}
    inputs = tuple(map(len, columns)) if None not in columns else whole.shape[1:]  # type: ignore[arg-type]
    if (num_rows, *inputs) != own.shape:
        raise InvariantError(
            f"{own.name}: by the family's rules the shard is {[num_rows, *inputs]}, and the worker's model wants "
            f"{list(own.shape)}"
        )
    return ParameterShard(own.name, own.shape, tuple(parts))


def _part_shard(
    part: Part,
    first_row: int,
    shape: tuple[int, ...],
    rule: Whole | Outputs | Inputs,
    attention: AttentionConfig | None,
    worker: Worker,
) -> PartShard:
    every_row = range(part.num_rows)
    if isinstance(rule, Outputs):
        return PartShard(part.name, first_row, _slice(part.num_rows, rule.unit, attention, worker))
    if isinstance(rule, Inputs) and part.name.endswith(".weight"):
        columns = _slice(prod(shape[1:]), rule.unit, attention, worker)
        return PartShard(part.name, first_row, every_row, columns)
    is_in_sum = isinstance(rule, Inputs) and (rule.bias_before_sum or worker.adds_biases_in_products)
    is_anothers = is_in_sum and worker.rank > 0
    return PartShard(part.name, first_row, every_row, is_zero=is_anothers)


def _slice(size: int, unit: Unit, attention: AttentionConfig | None, worker: Worker) -> range:
    """Which of `size` rows or columns are the worker's."""
    if unit is Unit.ROW:
        return worker.piece(size)
    assert attention is not None
    count = attention.num_heads if unit is Unit.HEAD else attention.num_kv_heads
    units = worker.piece(count) if unit is Unit.HEAD else worker.kv_heads(count)
    each = size // count
    return range(units.start * each, units.stop * each)


def _effective(rule: ShardRule, worker: Worker) -> Whole | Outputs | Inputs:
    if isinstance(rule, OfExpert):
        return rule.cut if worker.cuts_experts else Whole()
    if isinstance(rule, OfVocabulary):
        return Whole() if worker.keeps_vocabulary else rule.cut
    return rule


def _rule(name: str, rules: Mapping[str, ShardRule]) -> ShardRule:
    """The rule of a checkpoint's tensor, called as the model does. InvariantError for one that has none."""
    inner = _EXPERT.sub(".experts.", _LAYER.sub("", name))
    for key in (inner, inner.rpartition(".")[0]):
        if key in rules:
            return rules[key]
    raise InvariantError(f"there is no rule by which {name} is divided among workers")
