"""GGUF metadata as typed fields: what each key may hold, the format's defaults and its old keys, whatever family the
file is of.

Keys are those of the gguf package's constants; what an absent key means is what llama.cpp makes of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from lamella.errors import InvariantError, ModelLoadError
from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import (
    LongRopeScaling,
    PairDivisors,
    ProportionalScaling,
    RotaryConfig,
    YarnScaling,
)
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.weights.gguf_header import GgufHeader, SkippedStrings, read_gguf_header
from lamella.model_executor.weights.gguf_tensors import GgufTensorData

logger = logging.getLogger(__name__)

ARCHITECTURE_KEY = "general.architecture"
TOKENS_KEY = "tokenizer.ggml.tokens"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_END = "<end_of_turn>"
# Divisors of rotary frequencies, as tensors; they are part of the configuration.
_DIVISORS, _SHORT_DIVISORS, _LONG_DIVISORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
_NOT_TURNED = 1e29  # llama.cpp's converter writes 1e30
_HALF, _BFLOAT = 1, 30  # ggml's numbers of storage formats; 0 is float32

_INTEGERS = {
    "vocab_size": ranges.VOCABULARY,
    "context_length": ranges.POSITIONS,
    "embedding_length": ranges.WIDTH,
    "feed_forward_length": ranges.WIDTH,
    "block_count": ranges.LAYERS,
    "attention.head_count": ranges.HEADS,
    "attention.head_count_kv": ranges.HEADS,
    "attention.key_length": ranges.HEAD_DIM,
    "attention.value_length": ranges.HEAD_DIM,
    "attention.sliding_window": ranges.POSITIONS,
    "attention.sliding_window_pattern": ranges.LAYERS,
    "rope.dimension_count": ranges.HEAD_DIM,
    "expert_count": ranges.EXPERTS,
    "expert_used_count": ranges.EXPERTS,
    "expert_feed_forward_length": ranges.WIDTH,
    "expert_shared_feed_forward_length": ranges.WIDTH,
    "rope.scaling.original_context_length": ranges.POSITIONS,
    "attention.key_length_swa": ranges.HEAD_DIM,
    "attention.value_length_swa": ranges.HEAD_DIM,
    "attention.shared_kv_layers": ranges.SOME_LAYERS,
    "rope.dimension_count_swa": ranges.HEAD_DIM,
    "embedding_length_per_layer_input": ranges.IntegerRange(0, ranges.WIDTH.high),
    "expert_shared_count": ranges.EXPERTS,
    "expert_group_count": ranges.EXPERTS,
    "expert_group_used_count": ranges.EXPERTS,
    "leading_dense_block_count": ranges.SOME_LAYERS,
    "moe_every_n_layers": ranges.LAYERS,
    "interleave_moe_layer_step": ranges.SOME_LAYERS,
    "nextn_predict_layers": ranges.SOME_LAYERS,
}
_NUMBERS = {
    "expert_count": ranges.NumberRange(0, ranges.EXPERTS.high),
    "expert_weights_scale": ranges.MULTIPLIER,
    "attention.layer_norm_rms_epsilon": ranges.NORM_EPSILON,
    "rope.freq_base": ranges.ROPE_THETA,
    "rope.freq_base_swa": ranges.ROPE_THETA,
    "rope.scaling.factor": ranges.ROPE_FACTOR,
    "rope.scale_linear": ranges.ROPE_FACTOR,
    "rope.scaling.attn_factor": ranges.MULTIPLIER,
    "rope.scaling.yarn_log_multiplier": ranges.MULTIPLIER,
    "rope.scaling.yarn_attn_factor": ranges.MULTIPLIER,
    "rope.scaling.yarn_beta_fast": ranges.ROPE_FACTOR,
    "rope.scaling.yarn_beta_slow": ranges.ROPE_FACTOR,
    "attention.layer_norm_epsilon": ranges.NORM_EPSILON,
    "attention.scale": ranges.MULTIPLIER,
    "attention.temperature_scale": ranges.MULTIPLIER,
    "attention.value_scale": ranges.MULTIPLIER,
    "embedding_scale": ranges.MULTIPLIER,
    "residual_scale": ranges.MULTIPLIER,
    "logit_scale": ranges.MULTIPLIER,
    "attn_logit_softcapping": ranges.SOFTCAP,
    "final_logit_softcapping": ranges.SOFTCAP,
    "router_logit_softcapping": ranges.SOFTCAP,
}
# Keys that say where a model comes from, or that are meant for other programs. They change nothing that is computed.
_TOLD_ONLY = ("vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned", "attn_logit_softcapping")
# Keys that change what a model computes, each with the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.alpha": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.shared_kv_layers": 0,
    "attention.value_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_count": 0,
    "use_parallel_residual": False,
    "router_logit_softcapping": 0.0,
    "nextn_predict_layers": 0,
    "embedding_length_per_layer_input": 0,
}


class ConfigGguf:
    """The typed metadata of one model. Every reader raises ModelLoadError as TypedFields does.

    Keys are given without the architecture's name, which stands before them in the file.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        everything = header.fields()
        self.architecture = everything.string(ARCHITECTURE_KEY)
        self.place = everything.place
        self._everything = everything
        prefix = f"{self.architecture}."
        own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        self._own = TypedFields(own, self.place, prefix)
        self._read: set[str] = set(_TOLD_ONLY)

    def has(self, key: str) -> bool:
        return key in self._own

    def integer(self, key: str, default: int | None = None) -> int:
        self._read.add(key)
        if default is not None and key not in self._own:
            return default
        if key not in _INTEGERS:
            raise InvariantError(f"{key} is not in the table of GGUF's keys; add it with its range")
        low, high = _INTEGERS[key]
        return self._own.integer(key, low=low, high=high)

    def number(self, key: str, default: float | None = None) -> float:
        self._read.add(key)
        if default is not None and key not in self._own:
            return default
        if key not in _NUMBERS:
            raise InvariantError(f"{key} is not in the table of GGUF's keys; add it with its range")
        above, high = _NUMBERS[key]
        return self._own.number(key, above=above, high=high)

    def integers(self, key: str, count: int, default: int | None = None) -> tuple[int, ...]:
        """One of each layer, `count` in all; a file that states one number means it of every layer."""
        if not self._is_array(key):
            return (self.integer(key, default),) * count
        self._read.add(key)
        low, high = _INTEGERS[key]
        values = self._own.integers(key, low=low, high=high)
        if len(values) != count:
            raise self.refuse(key, f"it has {len(values)} entries for {count} layers")
        return values

    def limits(self, key: str, count: int) -> tuple[float | None, ...]:
        """A bound of each layer; None where there is none, which the format writes as 0."""
        self._read.add(key)
        if not self.has(key):
            return (None,) * count
        values = self._own.numbers(key) if self._is_array(key) else (self._own.number(key),) * count
        if len(values) != count or not all(0 <= value <= ranges.SOFTCAP.high for value in values):
            raise self.refuse(key, f"must be {count} numbers of at least 0, one for each layer")
        return tuple(value or None for value in values)

    def boolean(self, key: str, default: bool) -> bool:
        self._read.add(key)
        return self._own.boolean(key, default)

    def choice(self, key: str, choices: Mapping[int, str]) -> str | None:
        """What the number stands for; None where the key is absent."""
        self._read.add(key)
        if not self.has(key):
            return None
        number = self._own.integer(key)
        if number not in choices:
            known = ", ".join(f"{each} ({name})" for each, name in choices.items())
            raise self.refuse(key, f"it is not built; known: {known}")
        return choices[number]

    def _is_array(self, key: str) -> bool:
        return key in self._own and hasattr(self._own.raw(key), "tolist")

    def number_or_off(self, key: str) -> float | None:
        """None where the key is absent or 0, which is how this format switches a factor off."""
        self._read.add(key)
        raw = self._own.raw(key)
        is_off = key not in self._own or (raw == 0 and not isinstance(raw, (bool, str)))
        return None if is_off else self.number(key)

    def window(self) -> int | None:
        """How many keys a sliding layer sees, the query's own included; None where the file has none, or says 0."""
        key = "attention.sliding_window"
        self._read.add(key)
        return self.integer(key) if self.has(key) and self._own.raw(key) != 0 else None

    def refuse(self, key: str, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.place}: {self._own.prefix}{key}={shown(self._own.raw(key))}: {why}")

    def num_extra_layers(self) -> int:
        """Those for predicting several tokens, which come last and are left out."""
        num_extra = self.integer("nextn_predict_layers", 0)
        if num_extra >= self.integer("block_count"):
            raise self.refuse("nextn_predict_layers", f"there are {self.integer('block_count')} layers in all")
        return num_extra

    def num_layers(self) -> int:
        return self.integer("block_count") - self.num_extra_layers()

    def shape_of(self, tensor_name: str) -> tuple[int, ...]:
        """Rows first. ModelLoadError: there is no such tensor."""
        tensor = self._header.tensors.get(tensor_name)
        if tensor is None:
            raise ModelLoadError(f"{self.place}: {tensor_name} is missing")
        return tensor.shape

    def vocab_size(self) -> int:
        embedding = self._header.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape:
            return embedding.shape[0]
        tokens = self._header.metadata.get(TOKENS_KEY)
        if isinstance(tokens, SkippedStrings):
            return tokens.length
        raise ModelLoadError(f"{self.place} has neither token_embd.weight nor a vocabulary")

    def rope_factor(self) -> float:
        """What positions are divided by. A factor without a type scales linearly; `rope.scale_linear` is the name that
        files had before there were types."""
        self._read.update(("rope.scaling.type", "rope.scale_linear"))
        rope_type = self._own.string("rope.scaling.type", "linear")
        if rope_type not in ("none", "linear"):
            raise self.refuse("rope.scaling.type", f"rope scaling {shown(rope_type)} is not built; known: none, linear")
        key = "rope.scaling.factor" if "rope.scaling.factor" in self._own else "rope.scale_linear"
        factor = self.number_or_off(key) or 1.0
        return factor if rope_type == "linear" else 1.0

    def rotary(self, dim: int, default_theta: float, *, divisors_dim: int | None = None) -> RotaryConfig:
        """The embedding of all layers, or of full ones where sliding ones have their own, of the first `dim` elements
        of a head.

        Besides linear scaling the format has divisors of each pair as a tensor (`rope_freqs`, Llama 3's scaling worked
        out), two of them for short and long texts (LongRoPE), and YaRN. divisors_dim: of how many elements the tensor
        has the divisors, a multiple of dim whose pairs have more frequencies, the same ones among them; None: dim.
        """
        theta = self.number("rope.freq_base", default_theta)
        kind = self._own.string("rope.scaling.type", "linear")
        if _LONG_DIVISORS in self._header.tensors:
            return self._longrope(dim, theta)
        if _DIVISORS in self._header.tensors:
            factor = self.rope_factor()
            whole = divisors_dim or dim
            divisors = self._pair_divisors(_DIVISORS, whole)[:: whole // dim]
            return RotaryConfig(dim, theta, factor, _scaling_of(divisors))
        if kind == "yarn":
            return self._yarn(dim, theta)
        return RotaryConfig(dim, theta, self.rope_factor())

    def sliding_rotary(self, dim: int, default_theta: float) -> RotaryConfig:
        """That of sliding layers, where full ones have another. llama.cpp scales the full layers' alone."""
        return RotaryConfig(dim, self.number("rope.freq_base_swa", default_theta))

    def _longrope(self, dim: int, theta: float) -> RotaryConfig:
        self._read.add("rope.scaling.type")
        original = self.integer("rope.scaling.original_context_length")
        magnitude = self.number("rope.scaling.attn_factor", 1.0)
        short, long = (self._pair_divisors(name, dim) for name in (_SHORT_DIVISORS, _LONG_DIVISORS))
        return RotaryConfig(dim, theta, scaling=LongRopeScaling(short, long, original), magnitude=magnitude)

    def _yarn(self, dim: int, theta: float) -> RotaryConfig:
        """llama.cpp multiplies cos and sin by attn_factor * (1 + 0.1 ln factor) unless the file has a multiplier of
        the logarithm, which takes the place of mscale_all_dim (modeling_rope_utils.py) with mscale 1."""
        self._read.update(("rope.scaling.type", "rope.scaling.finetuned"))
        factor = self.number("rope.scaling.factor")
        magnitude = (1.0 + 0.1 * math.log(max(factor, 1.0))) * self.number("rope.scaling.attn_factor", 1.0)
        multiplier = self.number_or_off("rope.scaling.yarn_log_multiplier")
        if multiplier is not None:
            magnitude /= 1.0 + 0.1 * multiplier * math.log(max(factor, 1.0))
        # The converter writes transformers' `attention_factor` under this name, which is the whole factor.
        magnitude = self.number("rope.scaling.yarn_attn_factor", magnitude)
        scaling = YarnScaling(
            factor,
            self.integer("rope.scaling.original_context_length"),
            self.number("rope.scaling.yarn_beta_fast", 32.0),
            self.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        return RotaryConfig(dim, theta, scaling=scaling, magnitude=magnitude)

    def _pair_divisors(self, name: str, dim: int) -> tuple[float, ...]:
        tensor = self._header.tensors.get(name)
        if tensor is None or tensor.shape != (dim // 2,):
            raise ModelLoadError(f"{self.place}: {name} must have {dim // 2} numbers, one for each pair that turns")
        divisors = GgufTensorData(self._header).read_rows(name, 0, dim // 2).float()
        if not bool((divisors > 0).all()):
            raise ModelLoadError(
                f"{self.place}: {name} has numbers that are not above 0; frequencies are divided by them"
            )
        return tuple(divisors.tolist())

    def sliding_pattern(self, num_layers: int, default_period: int, *, is_first_full: bool = False) -> tuple[bool, ...]:
        """Whether each layer slides: one truth value per layer, or of every n the last is full, or the first."""
        key = "attention.sliding_window_pattern"
        if self._own.raw(key) is not None and not isinstance(self._own.raw(key), int):
            self._read.add(key)
            pattern = self._own.raw(key)
            values = pattern.tolist() if hasattr(pattern, "tolist") else None
            if not isinstance(values, list) or any(value not in (0, 1) for value in values):
                raise self.refuse(key, "must be how many layers there are to each full one, or a truth value per layer")
            if len(values) != num_layers:
                raise self.refuse(key, f"sliding_window_pattern has {len(values)} entries for {num_layers} layers")
            return tuple(bool(value) for value in values)
        period = self.integer(key, default_period)
        return tuple((layer + (not is_first_full)) % period != 0 for layer in range(num_layers))

    def bos_token_id(self) -> int | None:
        return self._everything.optional_integer("tokenizer.ggml.bos_token_id", high=ranges.TOKEN_ID.high)

    def end_token_ids(self) -> tuple[int, ...]:
        """Every token that the file says ends a text or a turn."""
        ids = [
            self._everything.optional_integer(f"tokenizer.ggml.{key}", high=ranges.TOKEN_ID.high) for key in _END_KEYS
        ]
        template = self._everything.optional_string("tokenizer.chat_template") or ""
        if _TURN_END in template and self._everything.has_value(TOKENS_KEY):
            # A chat model ends its turn with this token, but many files name only <eos> as their end token.
            tokens = read_gguf_header(self._header.path, string_arrays=(TOKENS_KEY,)).fields().strings(TOKENS_KEY)
            ids.append(tokens.index(_TURN_END) if _TURN_END in tokens else None)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def dtype(self) -> str:
        # Quantised weights have no dtype of their own; norms are always float32.
        types = {tensor.type_id for tensor in self._header.tensors.values()}
        if types <= {0, _HALF, _BFLOAT}:
            return "bfloat16" if _BFLOAT in types else "float16" if _HALF in types else "float32"
        return "float32"

    def refuse_unread(self, known: Collection[str] = ()) -> None:
        """Raise for a key that changes what is computed and was not read; warn once of others that were not.

        known: keys that the family knows to mean nothing to it.
        """
        unread = [key for key in self._own if key not in self._read and key not in known]
        for key in unread:
            if key in _NEUTRAL and self._own.raw(key) != _NEUTRAL[key]:
                raise self.refuse(key, f"it is not built for this architecture; it must be {_NEUTRAL[key]}")
        odd = [f"{key}={shown(self._own.raw(key))}" for key in unread if key not in _NEUTRAL]
        if odd:
            logger.warning("%s: metadata that is not known here is left out: %s", self.place, ", ".join(odd))


def _scaling_of(divisors: tuple[float, ...]) -> ProportionalScaling | PairDivisors:
    """Some files say with a divisor beyond all others which pairs do not turn (Gemma 4)."""
    num_pairs = next((pair for pair, divisor in enumerate(divisors) if divisor >= _NOT_TURNED), len(divisors))
    is_proportional = divisors == (1.0,) * num_pairs + (divisors[-1],) * (len(divisors) - num_pairs)
    if num_pairs < len(divisors) and is_proportional:
        return ProportionalScaling(num_pairs)
    return PairDivisors(divisors)
