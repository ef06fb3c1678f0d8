"""A decoder as data: its layers, and what stands around them.

A layer says what it is made of and nothing of how it is computed: `Stack` hands layers to `Operators` (see `contract`),
which run them in the way that their device likes best. Families of models never appear here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lamella.errors import InvariantError
from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    PerLayerInputConfig,
)
from lamella.model_executor.models.mlp_config import ExpertsConfig, MLPConfig, RouterConfig
from lamella.model_executor.weights.parameters import Parameter, Part, is_vector


class Norm:
    """RMS norm: x / sqrt(mean(x²) + eps) * weight; or, where `is_layer_norm`, LayerNorm: the same of x - mean(x), plus
    a bias if it has one. weight and bias: float32 [width].

    A norm without a weight of its own multiplies by 1. factor: of weight and bias, taken in when they are loaded.
    """

    def __init__(
        self,
        name: str,
        width: int,
        eps: float,
        *,
        is_layer_norm: bool = False,
        has_weight: bool = True,
        has_bias: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.name = name
        self.width = width
        self.eps = eps
        self.is_layer_norm = is_layer_norm
        self.has_weight = has_weight
        self.has_bias = has_bias
        self.tensors: dict[str, torch.Tensor] = {} if has_weight else {"weight": torch.ones(width)}
        self._factor = factor

    @property
    def weight(self) -> torch.Tensor:
        return self.tensors["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.tensors.get("bias")

    def parameters(self) -> Iterator[Parameter]:
        for ending in ["weight"] * self.has_weight + ["bias"] * self.has_bias:
            name = f"{self.name}.{ending}"
            yield Parameter(name, (self.width,), (Part(name, self.width, factor=self._factor),))


class Vector:
    """Numbers that stay as they are whatever form weights have, float32 [*shape]; checkpoints call them
    `stored_name`."""

    def __init__(self, name: str, stored_name: str, *shape: int) -> None:
        self.name = name
        self.shape = shape
        self.tensors: dict[str, torch.Tensor] = {}
        self._stored_name = stored_name

    @property
    def values(self) -> torch.Tensor:
        return self.tensors["vector"]

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter(f"{self.name}.vector", self.shape, (Part(self._stored_name, self.shape[0]),))


class Projection:
    """A linear layer [num_out, num_in]: the outputs of its parts side by side.

    tensors: by the last part of their names. Weights are in the form that the operators asked for, which names them:
    "weight" where they lie in rows, others in other forms.
    """

    def __init__(self, name: str, parts: Sequence[Part], num_in: int, *, has_bias: bool = False) -> None:
        """parts: the checkpoint's layers that are fused into this one, without ".weight"."""
        self.name = name
        self.parts = tuple(parts)
        self.num_out = sum(part.num_rows for part in parts)
        self.num_in = num_in
        self.has_bias = has_bias
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def weight(self) -> torch.Tensor:
        return self.tensors["weight"]

    @property
    def bias(self) -> torch.Tensor | None:
        """[num_out]"""
        return self.tensors.get("bias")

    def parameters(self) -> Iterator[Parameter]:
        shapes = {"weight": (self.num_out, self.num_in)} | ({"bias": (self.num_out,)} if self.has_bias else {})
        for ending, shape in shapes.items():
            parts = tuple(part._replace(name=f"{part.name}.{ending}") for part in self.parts)
            yield Parameter(f"{self.name}.{ending}", shape, parts)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """qkv_proj: query heads, then the KV heads' keys, then their values; queries alone where config.kv_owner is set.
    q_norm, k_norm: of a head, or of all heads as one row, see config.qk_norm."""

    config: AttentionConfig
    qkv_proj: Projection
    o_proj: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None  # of a head
    gate_proj: Projection | None  # of num_heads numbers, or of num_heads * v_dim
    sinks: Vector | None  # of num_heads numbers


@dataclass(frozen=True, slots=True, eq=False)
class DenseMLP:
    """gate_up_proj: the gate first; without it where the MLP is not gated."""

    config: MLPConfig
    gate_up_proj: Projection
    down_proj: Projection


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """config: its vectors are there where that has them."""

    config: RouterConfig
    weight: Vector  # [num_experts, hidden_size]
    bias: Vector | None  # [num_experts], as the others
    correction: Vector | None
    expert_scale: Vector | None


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """All held experts' layers lie one after the other, as the outputs of one layer: of each expert 2 * width outputs
    of gate_up_proj, its gate first, and hidden_size outputs of down_proj. shared_gate: of one output."""

    config: ExpertsConfig
    router: Router
    gate_up_proj: Projection
    down_proj: Projection
    shared: DenseMLP | None
    shared_gate: Projection | None

    def gate_up_columns(self, expert: int) -> slice:
        """expert: a held one, as in `down_columns`."""
        return self._columns(expert, self.gate_up_proj)

    def down_columns(self, expert: int) -> slice:
        return self._columns(expert, self.down_proj)

    def _columns(self, expert: int, projection: Projection) -> slice:
        held = self.config.held_experts
        size, place = projection.num_out // len(held), held.index(expert)
        return slice(place * size, (place + 1) * size)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsBeside:
    """Experts beside a layer's MLP: post_norm(experts(norm(x))), routed by router_norm(x), joins mlp_post_norm of what
    the MLP gives."""

    experts: Experts
    norm: Norm
    router_norm: Norm
    post_norm: Norm
    mlp_post_norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerGate:
    """How a layer takes in what it alone gets of a token: x + norm(projection(activation(gate(x)) * input))."""

    activation: str
    gate: Projection
    projection: Projection
    norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A layer's parts in the order in which they run. index: which layer of the model it is. is_parallel: the MLP's
    input is attention's."""

    index: int
    input_norm: Norm | None
    attention: Attention
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: DenseMLP | Experts
    experts_beside: ExpertsBeside | None
    post_mlp_norm: Norm | None
    per_layer_gate: PerLayerGate | None
    scalar: Vector | None
    is_parallel: bool


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerInputs:
    """What makes every layer's own input of a token: see `per_layer_inputs.of_tokens`."""

    config: PerLayerInputConfig
    embed_tokens: Projection  # [vocab_size, num_layers * width]
    projection: Projection  # of the embeddings
    norm: Norm  # of one layer's part of it


class Model:
    """A model's layers and what stands around them, for `config`; computed in `dtype`. Empty until `load`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._weightless: list[Norm] = []
        self._holders: list[Norm | Projection | Vector] = []
        hidden = config.hidden_size
        self.embed_tokens = self._projection("embed_tokens", hidden, config.vocab_size)
        self.layers = tuple(self._layer(index, layer) for index, layer in enumerate(config.layers))
        self.per_layer_inputs = self._per_layer_inputs(config.per_layer_input)
        self.norm = self._norm("norm", hidden, factor=config.logits_scale)
        is_tied = config.tie_word_embeddings
        self.head = self.embed_tokens if is_tied else self._projection("lm_head", hidden, config.vocab_size)
        self.head_bias = self._vector("head_bias", "lm_head.bias", config.vocab_size) if config.has_head_bias else None

    def parameters(self) -> list[Parameter]:
        return [parameter for holder in self._holders for parameter in holder.parameters()]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every stored tensor by its name, as `load` took them."""
        return {
            f"{holder.name}.{ending}": tensor for holder in self._holders for ending, tensor in holder.tensors.items()
        }

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors as they are, without a copy (they may be memory-mapped).

        Raises InvariantError for a tensor that no part of the model has a place for, and for a part that gets no
        tensor.
        """
        by_name = {holder.name: holder for holder in self._holders}
        vectors = {each.name for each in self.parameters() if is_vector(each.name)}
        for name, tensor in tensors.items():
            place, _, ending = name.rpartition(".")
            holder = by_name.get(place)
            # A weight's form says what its tensors are called; a vector is one tensor under its own name.
            is_of_form = isinstance(holder, Projection) and ending != "bias"
            if holder is None or not (is_of_form or name in vectors):
                raise InvariantError(f"the model has no place for {name}")
            holder.tensors[ending] = tensor
        self._place_constants()
        lacking = [holder.name for holder in self._holders if not holder.tensors.keys() - {"bias"}]
        lacking += sorted(name for name in vectors - tensors.keys() if name.endswith(".bias"))
        if lacking:
            raise InvariantError(f"the model got no weights for {', '.join(lacking[:5])}")

    def _place_constants(self) -> None:
        """Norms without a weight of their own go where the model is."""
        if "weight" in self.norm.tensors:
            for norm in self._weightless:
                norm.tensors["weight"] = norm.weight.to(self.device)

    def _layer(self, index: int, layer: LayerConfig) -> DecoderLayer:
        name, norms, hidden = f"layers.{index}", layer.norms, self.config.hidden_size

        def norm(place: str, is_there: bool) -> Norm | None:
            return self._norm(f"{name}.{place}", hidden) if is_there else None

        return DecoderLayer(
            index=index,
            input_norm=norm("input_norm", norms.input),
            attention=self._attention(f"{name}.self_attn", layer.attention),
            post_attention_norm=norm("post_attention_norm", norms.post_attention),
            mlp_norm=norm("mlp_norm", norms.mlp),
            mlp=self._mlp(f"{name}.mlp", layer.mlp),
            experts_beside=self._experts_beside(f"{name}.mlp", layer.experts_beside),
            post_mlp_norm=norm("post_mlp_norm", norms.post_mlp),
            per_layer_gate=self._per_layer_gate(name, self.config.per_layer_input),
            scalar=self._vector(f"{name}.layer_scalar", f"{name}.layer_scalar", 1) if layer.has_scalar else None,
            is_parallel=layer.is_parallel,
        )

    def _attention(self, name: str, config: AttentionConfig) -> Attention:
        hidden = self.config.hidden_size
        paired = 0 if config.rotary is None else config.rotary.dim
        parts = [Part(f"{name}.q_proj", config.query_columns, config.k_dim, paired_rows=paired)]
        has_kv = config.kv_owner is None
        if has_kv:
            parts.append(Part(f"{name}.k_proj", config.key_columns, config.k_dim, paired_rows=paired))
            value_name = "k_proj" if config.values_are_keys else "v_proj"
            parts.append(Part(f"{name}.{value_name}", config.value_columns, factor=config.value_scale))
        qkv_proj = Projection(f"{name}.qkv_proj", parts, hidden, has_bias=config.has_qkv_bias)
        self._holders.append(qkv_proj)
        attended_columns = config.num_heads * config.v_dim
        o_proj = self._projection(f"{name}.o_proj", attended_columns, hidden, has_bias=config.has_output_bias)

        def norm(which: str, columns: int, dim: int) -> Norm | None:
            if config.qk_norm is None:
                return None
            if config.qk_norm == "projection":
                return self._own_norm(f"{name}.{which}", columns, eps=config.qk_norm_eps)
            has_weight = config.qk_norm == "heads"
            return self._own_norm(f"{name}.{which}", dim, has_weight=has_weight, eps=config.qk_norm_eps)

        gate = config.gate
        gate_columns = config.num_heads if gate is not None and gate.is_per_head else attended_columns
        return Attention(
            config=config,
            qkv_proj=qkv_proj,
            o_proj=o_proj,
            q_norm=norm("q_norm", config.query_columns, config.k_dim),
            k_norm=norm("k_norm", config.key_columns, config.k_dim) if has_kv else None,
            v_norm=self._own_norm(f"{name}.v_norm", config.v_dim, has_weight=False)
            if config.has_value_norm and has_kv
            else None,
            gate_proj=None if gate is None else self._projection(f"{name}.gate_proj", hidden, gate_columns),
            sinks=self._vector(f"{name}.sinks", f"{name}.sinks", config.num_heads) if config.has_sinks else None,
        )

    def _mlp(self, name: str, config: MLPConfig | ExpertsConfig) -> DenseMLP | Experts:
        return self._dense(name, config) if isinstance(config, MLPConfig) else self._experts(name, config)

    def _experts_beside(self, name: str, config: ExpertsConfig | None) -> ExpertsBeside | None:
        if config is None:
            return None
        hidden = self.config.hidden_size
        return ExpertsBeside(
            self._experts(name, config),
            self._norm(f"{name}.experts_norm", hidden),
            # The router's own scale is the norm's weight, with the root that its logits are divided by.
            self._norm(f"{name}.router_norm", hidden, factor=hidden**-0.5),
            self._norm(f"{name}.post_experts_norm", hidden),
            self._norm(f"{name}.post_dense_norm", hidden),
        )

    def _experts(self, name: str, config: ExpertsConfig) -> Experts:
        hidden, expert, router, count = self.config.hidden_size, config.expert, config.router, config.num_experts
        names = [f"{name}.experts.{each}" for each in config.held_experts]
        both = [Part(f"{each}.{which}", expert.width) for each in names for which in ("gate_proj", "up_proj")]
        gate_up_proj = Projection(f"{name}.experts.gate_up_proj", both, hidden, has_bias=expert.has_bias)
        downs = [Part(f"{each}.down_proj", hidden) for each in names]
        down_proj = Projection(f"{name}.experts.down_proj", downs, expert.width, has_bias=expert.has_bias)
        self._holders += [gate_up_proj, down_proj]

        def vector(which: str, is_there: bool) -> Vector | None:
            return self._vector(f"{name}.router_{which}", f"{name}.router.{which}", count) if is_there else None

        return Experts(
            config,
            Router(
                router,
                self._vector(f"{name}.router", f"{name}.router.weight", count, hidden),
                vector("bias", router.has_bias),
                vector("correction", router.has_correction),
                vector("expert_scale", router.has_expert_scale),
            ),
            gate_up_proj,
            down_proj,
            None if config.shared is None else self._dense(f"{name}.shared", config.shared),
            self._projection(f"{name}.shared_gate", hidden, 1) if config.shared_has_gate else None,
        )

    def _dense(self, name: str, config: MLPConfig) -> DenseMLP:
        hidden = self.config.hidden_size
        inputs = ("gate_proj", "up_proj") if config.is_gated else ("up_proj",)
        parts = tuple(Part(f"{name}.{each}", config.width) for each in inputs)
        gate_up_proj = Projection(f"{name}.gate_up_proj", parts, hidden, has_bias=config.has_bias)
        self._holders.append(gate_up_proj)
        down_proj = self._projection(f"{name}.down_proj", config.width, hidden, has_bias=config.has_bias)
        return DenseMLP(config, gate_up_proj, down_proj)

    def _per_layer_inputs(self, config: PerLayerInputConfig | None) -> PerLayerInputs | None:
        if config is None:
            return None
        columns = self.config.num_layers * config.width
        return PerLayerInputs(
            config,
            self._projection("embed_tokens_per_layer", columns, config.vocab_size),
            self._projection("per_layer_model_projection", self.config.hidden_size, columns),
            self._own_norm("per_layer_projection_norm", config.width),
        )

    def _per_layer_gate(self, name: str, config: PerLayerInputConfig | None) -> PerLayerGate | None:
        if config is None:
            return None
        hidden = self.config.hidden_size
        return PerLayerGate(
            config.activation,
            self._projection(f"{name}.per_layer_input_gate", hidden, config.width),
            self._projection(f"{name}.per_layer_projection", config.width, hidden),
            self._norm(f"{name}.post_per_layer_input_norm", hidden),
        )

    def _norm(self, name: str, width: int, *, factor: float = 1.0) -> Norm:
        """A norm of the residual stream or of what joins it."""
        config = self.config
        is_layer_norm = config.norm_kind == "layer"
        norm = Norm(
            name,
            width,
            config.norm_eps,
            is_layer_norm=is_layer_norm,
            has_bias=config.norm_has_bias,
            factor=factor,
        )
        self._holders.append(norm)
        return norm

    def _own_norm(self, name: str, width: int, *, has_weight: bool = True, eps: float | None = None) -> Norm:
        """An RMS norm of other rows."""
        norm = Norm(name, width, self.config.norm_eps if eps is None else eps, has_weight=has_weight)
        if has_weight:
            self._holders.append(norm)
        else:
            self._weightless.append(norm)
        return norm

    def _vector(self, name: str, stored_name: str, *shape: int) -> Vector:
        vector = Vector(name, stored_name, *shape)
        self._holders.append(vector)
        return vector

    def _projection(self, name: str, num_in: int, num_out: int, *, has_bias: bool = False) -> Projection:
        projection = Projection(name, (Part(name, num_out),), num_in, has_bias=has_bias)
        self._holders.append(projection)
        return projection
