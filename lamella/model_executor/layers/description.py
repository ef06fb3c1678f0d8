"""A decoder as data: its layers, and what stands around them.

A layer says what it is made of and nothing of how it is computed: `Stack` hands layers to `Operators` (see `contract`),
which run them in the way that their device likes best. Families of models never appear here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lamella.errors import InvariantError
from lamella.model_executor.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from lamella.model_executor.weights.parameters import Parameter, Part, is_vector


class Norm:
    """An RMS norm: x / sqrt(mean(x²) + eps) * weight, float32 [width]."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        self.name = name
        self.width = width
        self.eps = eps
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def weight(self) -> torch.Tensor:
        return self.tensors["weight"]

    def parameters(self) -> Iterator[Parameter]:
        name = f"{self.name}.weight"
        yield Parameter(name, (self.width,), (Part(name, self.width),))


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
    """qkv_proj: query heads, then the KV heads' keys, then their values; queries alone where config.kv_owner is set."""

    config: AttentionConfig
    qkv_proj: Projection
    o_proj: Projection
    q_norm: Norm | None  # of each head
    k_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class DenseMLP:
    config: MLPConfig
    gate_up_proj: Projection  # gate first
    down_proj: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A layer's parts in the order in which they run. index: which layer of the model it is."""

    index: int
    input_norm: Norm | None
    attention: Attention
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: DenseMLP
    post_mlp_norm: Norm | None


class Model:
    """A model's layers and what stands around them, for `config`; computed in `dtype`. Empty until `load`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._holders: list[Norm | Projection] = []
        hidden = config.hidden_size
        self.embed_tokens = self._projection("embed_tokens", hidden, config.vocab_size)
        self.layers = tuple(self._layer(index, layer) for index, layer in enumerate(config.layers))
        self.norm = self._norm("norm", hidden)
        is_tied = config.tie_word_embeddings
        self.head = self.embed_tokens if is_tied else self._projection("lm_head", hidden, config.vocab_size)

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
            # A weight's form says what its tensors are called; a norm or a bias is one tensor under its own name.
            is_of_form = isinstance(holder, Projection) and ending != "bias"
            if holder is None or not (is_of_form or name in vectors):
                raise InvariantError(f"the model has no place for {name}")
            holder.tensors[ending] = tensor
        lacking = [holder.name for holder in self._holders if not holder.tensors.keys() - {"bias"}]
        lacking += sorted(name for name in vectors - tensors.keys() if name.endswith(".bias"))
        if lacking:
            raise InvariantError(f"the model got no weights for {', '.join(lacking[:5])}")

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
            post_mlp_norm=norm("post_mlp_norm", norms.post_mlp),
        )

    def _attention(self, name: str, config: AttentionConfig) -> Attention:
        hidden = self.config.hidden_size
        parts = [Part(f"{name}.q_proj", config.query_columns, config.k_dim)]
        if config.kv_owner is None:
            parts.append(Part(f"{name}.k_proj", config.key_columns, config.k_dim))
            parts.append(Part(f"{name}.v_proj", config.value_columns))
        qkv_proj = Projection(f"{name}.qkv_proj", parts, hidden, has_bias=config.has_qkv_bias)
        self._holders.append(qkv_proj)
        attended_columns = config.num_heads * config.v_dim
        o_proj = self._projection(f"{name}.o_proj", attended_columns, hidden, has_bias=config.has_output_bias)
        has_key_norm = config.has_head_norms and config.kv_owner is None
        return Attention(
            config=config,
            qkv_proj=qkv_proj,
            o_proj=o_proj,
            q_norm=self._norm(f"{name}.q_norm", config.k_dim) if config.has_head_norms else None,
            k_norm=self._norm(f"{name}.k_norm", config.k_dim) if has_key_norm else None,
        )

    def _mlp(self, name: str, config: MLPConfig) -> DenseMLP:
        hidden = self.config.hidden_size
        parts = (Part(f"{name}.gate_proj", config.width), Part(f"{name}.up_proj", config.width))
        gate_up_proj = Projection(f"{name}.gate_up_proj", parts, hidden, has_bias=config.has_bias)
        self._holders.append(gate_up_proj)
        down_proj = self._projection(f"{name}.down_proj", config.width, hidden, has_bias=config.has_bias)
        return DenseMLP(config, gate_up_proj, down_proj)

    def _norm(self, name: str, width: int) -> Norm:
        norm = Norm(name, width, self.config.rms_norm_eps)
        self._holders.append(norm)
        return norm

    def _projection(self, name: str, num_in: int, num_out: int, *, has_bias: bool = False) -> Projection:
        projection = Projection(name, (Part(name, num_out),), num_in, has_bias=has_bias)
        self._holders.append(projection)
        return projection
