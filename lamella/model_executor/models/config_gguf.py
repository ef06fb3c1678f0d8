"""GGUF metadata as typed fields: what each key may hold, the format's defaults and its old keys, whatever family the
file is of.

Keys are those of the gguf package's constants; what an absent key means is what llama.cpp makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from lamella.errors import InvariantError, ModelLoadError
from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.weights.gguf_header import GgufHeader, SkippedStrings, read_gguf_header

logger = logging.getLogger(__name__)

ARCHITECTURE_KEY = "general.architecture"
TOKENS_KEY = "tokenizer.ggml.tokens"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_END = "<end_of_turn>"
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
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": ranges.NORM_EPSILON,
    "rope.freq_base": ranges.ROPE_THETA,
    "rope.freq_base_swa": ranges.ROPE_THETA,
    "rope.scaling.factor": ranges.ROPE_FACTOR,
    "rope.scale_linear": ranges.ROPE_FACTOR,
    "final_logit_softcapping": ranges.SOFTCAP,
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
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_count": 0,
    "use_parallel_residual": False,
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

    def number_or_off(self, key: str) -> float | None:
        """None where the key is absent or 0, which is how this format switches a factor off."""
        self._read.add(key)
        raw = self._own.raw(key)
        is_off = key not in self._own or (raw == 0 and not isinstance(raw, (bool, str)))
        return None if is_off else self.number(key)

    def refuse(self, key: str, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.place}: {self._own.prefix}{key}={shown(self._own.raw(key))}: {why}")

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

    def sliding_pattern(self, num_layers: int, default_period: int) -> tuple[bool, ...]:
        """Whether each layer slides: one truth value per layer, or every n-th is full."""
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
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))

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
