"""How a model is divided among workers that compute every layer together: a rule for each kind of parameter, and the
model that one worker has.

Each worker has some heads, some columns of every MLP or some of its experts, and some rows of the vocabulary. What it
computes of a layer's output is a part of a sum over workers (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from lamella.errors import ConfigError
from lamella.model_executor.models.config import AttentionConfig, LayerConfig, ModelConfig
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig


class Unit(Enum):
    """What no cut divides."""

    HEAD = "query head"
    KV_HEAD = "kv head"
    ROW = "row"  # any output or input by itself


@dataclass(frozen=True, slots=True)
class Whole:
    """Each worker has all of it: replication."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Its outputs, rows of the weight and numbers of the bias, are divided: column parallelism. Where there are more
    workers than KV heads, several have the same one."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class Inputs:
    """Its inputs, columns of the weight, are divided, so that products are summed over workers: row parallelism.

    The bias is added once: by each worker behind the sum, so that each has all of it; or, with bias_before_sum, by the
    first one, and the others have zeros.
    """

    unit: Unit
    bias_before_sum: bool = False


@dataclass(frozen=True, slots=True)
class OfExpert:
    """An expert's, which is one worker's altogether; or, with `Worker.cuts_experts`, everybody's as `cut` says."""

    cut: Outputs | Inputs


@dataclass(frozen=True, slots=True)
class OfVocabulary:
    """A row for each token: divided as `cut` says, or, with `Worker.keeps_vocabulary`, everybody's."""

    cut: Outputs


ShardRule = Whole | Outputs | Inputs | OfExpert | OfVocabulary

# Of a model's parameters, without layer, expert, ".weight" and ".bias".
SHARDING: dict[str, ShardRule] = {
    "embed_tokens": OfVocabulary(Outputs(Unit.ROW)),
    "lm_head": OfVocabulary(Outputs(Unit.ROW)),
    "norm": Whole(),
    "self_attn.q_proj": Outputs(Unit.HEAD),
    "self_attn.k_proj": Outputs(Unit.KV_HEAD),
    "self_attn.v_proj": Outputs(Unit.KV_HEAD),
    "self_attn.o_proj": Inputs(Unit.HEAD),
    "self_attn.gate_proj": Outputs(Unit.HEAD),
    "self_attn.sinks": Outputs(Unit.HEAD),
    "self_attn.q_norm": Whole(),
    "self_attn.k_norm": Whole(),
    "mlp.gate_proj": Outputs(Unit.ROW),
    "mlp.up_proj": Outputs(Unit.ROW),
    "mlp.down_proj": Inputs(Unit.ROW),
    "mlp.experts.gate_proj": OfExpert(Outputs(Unit.ROW)),
    "mlp.experts.up_proj": OfExpert(Outputs(Unit.ROW)),
    "mlp.experts.down_proj": OfExpert(Inputs(Unit.ROW, bias_before_sum=True)),
    # What the shared MLP gives joins what the experts give before the sum over workers.
    "mlp.shared.gate_proj": Outputs(Unit.ROW),
    "mlp.shared.up_proj": Outputs(Unit.ROW),
    "mlp.shared.down_proj": Inputs(Unit.ROW, bias_before_sum=True),
    "mlp.shared_gate": Whole(),
    # Every worker routes every token.
    "mlp.router": Whole(),
    **{f"{place}_norm": Whole() for place in ("input", "post_attention", "mlp", "post_mlp")},
    **{f"mlp.{place}_norm": Whole() for place in ("experts", "router", "post_experts", "post_dense")},
    "layer_scalar": Whole(),
    # Small, and normed in the middle: each worker computes a layer's own input by itself.
    "embed_tokens_per_layer": OfVocabulary(Outputs(Unit.ROW)),
    "per_layer_model_projection": Whole(),
    "per_layer_projection_norm": Whole(),
    "per_layer_input_gate": Whole(),
    "per_layer_projection": Whole(),
    "post_per_layer_input_norm": Whole(),
}
# Of families that norm all heads of Q, and of K, as one row. The mean of squares of such a row is the mean over workers
# of those of their columns, as all have equally many, and each KV head is had by equally many.
ROW_NORM_SHARDING: dict[str, ShardRule] = {
    **SHARDING,
    "self_attn.q_norm": Outputs(Unit.HEAD),
    "self_attn.k_norm": Outputs(Unit.KV_HEAD),
}


@dataclass(frozen=True, slots=True)
class Worker:
    """One of `num_workers`; rank counts from 0. ConfigError for a rank that none has.

    cuts_experts: experts are divided as other MLPs are, each among all workers; else each is one worker's.
    keeps_vocabulary: it has all of the embeddings and of the head, so that neither is a sum.
    adds_biases_in_products: the kernels add biases inside of products, so that those of a sum are the first worker's,
    and the others have zeros.
    """

    rank: int
    num_workers: int
    cuts_experts: bool = False
    keeps_vocabulary: bool = False
    adds_biases_in_products: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_workers:
            raise ConfigError(
                f"rank={self.rank} of num_workers={self.num_workers}: ranks count from 0; give num_workers of 1 or "
                "more and a rank below it"
            )

    def piece(self, count: int) -> range:
        """Which of `count` things, of which all workers have equally many, are this one's."""
        size = count // self.num_workers
        return range(self.rank * size, (self.rank + 1) * size)

    def tokens(self, count: int) -> range:
        """Which of `count` tokens of a vocabulary are the worker's."""
        return range(count) if self.keeps_vocabulary else self.piece(count)

    def kv_heads(self, count: int) -> range:
        """Which of `count` KV heads the worker's query heads read: one that others have too, where there are fewer than
        workers."""
        if count >= self.num_workers:
            return self.piece(count)
        head = self.rank * count // self.num_workers
        return range(head, head + 1)


def shard_config(config: ModelConfig, worker: Worker) -> ModelConfig:
    """The model that the worker has: its vocabulary are `worker.tokens(config.vocab_size)`, and what it computes of the
    outputs of attention and MLP are parts of sums.

    Raises ConfigError for sizes that the workers cannot divide evenly, see `check_divisible`.
    """
    check_divisible(config, worker)
    own = config.per_layer_input
    return replace(
        config,
        vocab_size=len(worker.tokens(config.vocab_size)),
        per_layer_input=None if own is None else replace(own, vocab_size=len(worker.tokens(own.vocab_size))),
        layers=tuple(_layer(layer, worker) for layer in config.layers),
    )


def _layer(layer: LayerConfig, worker: Worker) -> LayerConfig:
    attention, mlp, beside = layer.attention, layer.mlp, layer.experts_beside
    return replace(
        layer,
        attention=shard_attention(attention, worker),
        mlp=_mlp(mlp, worker) if isinstance(mlp, MLPConfig) else _experts(mlp, worker),
        experts_beside=None if beside is None else _experts(beside, worker),
    )


def shard_attention(attention: AttentionConfig, worker: Worker) -> AttentionConfig:
    """What the worker has of it; sizes are not checked."""
    return replace(
        attention,
        num_heads=len(worker.piece(attention.num_heads)),
        num_kv_heads=len(worker.kv_heads(attention.num_kv_heads)),
    )


def _mlp(mlp: MLPConfig, worker: Worker) -> MLPConfig:
    return replace(mlp, width=len(worker.piece(mlp.width)))


def _experts(experts: ExpertsConfig, worker: Worker) -> ExpertsConfig:
    shared = None if experts.shared is None else _mlp(experts.shared, worker)
    if worker.cuts_experts:
        return replace(experts, expert=_mlp(experts.expert, worker), shared=shared)
    return replace(experts, held=worker.piece(experts.num_experts), shared=shared)


class _Size(NamedTuple):
    """A field of a ModelConfig that is divided. may_repeat: several workers may have the same one of its things."""

    field: str
    size: int
    may_repeat: bool = False

    def is_divided_by(self, num_workers: int) -> bool:
        return self.size % num_workers == 0 or (self.may_repeat and num_workers % self.size == 0)


def check_divisible(config: ModelConfig, worker: Worker) -> None:
    """Raise ConfigError, with the numbers of workers that would do, where a size of the model cannot be divided: there
    are no uneven shards, so that all workers take the same time and can exchange tensors of one shape."""
    num_workers, sizes = worker.num_workers, list(_sizes(config, worker))
    problem = next((each for each in sizes if not each.is_divided_by(num_workers)), None)
    if problem is None:
        return
    most = min(layer.attention.num_heads for layer in config.layers)
    numbers = [each for each in range(1, most + 1) if all(size.is_divided_by(each) for size in sizes)]
    works = f"num_workers={' or '.join(map(str, numbers))}"
    if all(
        size.is_divided_by(num_workers)
        for size in _sizes(config, replace(worker, cuts_experts=not worker.cuts_experts))
    ):
        works += f" would work, and so would cuts_experts={not worker.cuts_experts}"
    else:
        works += " would work"
    reason = "neither a multiple of it nor a divisor" if problem.may_repeat else "not a multiple of it"
    raise ConfigError(f"num_workers={num_workers}: {problem.field}={problem.size} is {reason}; {works}")


def _sizes(config: ModelConfig, worker: Worker) -> Iterator[_Size]:
    cuts_experts = worker.cuts_experts
    for index, layer in enumerate(config.layers):
        place = f"layers[{index}]"
        yield from _attention_sizes(f"{place}.attention", layer.attention)
        yield from _mlp_sizes(f"{place}.mlp", layer.mlp, cuts_experts)
        if layer.experts_beside is not None:
            yield from _mlp_sizes(f"{place}.experts_beside", layer.experts_beside, cuts_experts)
    if worker.keeps_vocabulary:
        return
    yield _Size("vocab_size", config.vocab_size)
    if config.per_layer_input is not None:
        yield _Size("per_layer_input.vocab_size", config.per_layer_input.vocab_size)


def _attention_sizes(place: str, attention: AttentionConfig) -> Iterator[_Size]:
    yield _Size(f"{place}.num_heads", attention.num_heads)
    yield _Size(f"{place}.num_kv_heads", attention.num_kv_heads, may_repeat=True)


def _mlp_sizes(place: str, mlp: MLPConfig | ExpertsConfig, cuts_experts: bool) -> Iterator[_Size]:
    if isinstance(mlp, MLPConfig):
        yield _Size(f"{place}.width", mlp.width)
        return
    if cuts_experts:
        yield _Size(f"{place}.expert.width", mlp.expert.width)
    else:
        yield _Size(f"{place}.num_experts", mlp.num_experts)
    if mlp.shared is not None:
        yield _Size(f"{place}.shared.width", mlp.shared.width)
