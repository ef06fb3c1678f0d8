"""adapter_config.json of a LoRA adapter, as PEFT (0.21) reads it: which modules it is for, what rank and scale each
has."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lamella.errors import ModelLoadError
from lamella.model_executor.adapters.module_patterns import PatternClock
from lamella.model_executor.models.typed_fields import TypedFields, finite_float, is_integer, is_text, shown
from lamella.model_executor.models.typed_json import read_json_object

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
MOST_RANK = 2**16
_MAX_CONFIG_BYTES = 4 << 20
_MAX_PATTERN_LENGTH = 20_000

# What an adapter may say and need not: it has no part in what a trained one computes.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
_READ = {
    *("alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "use_rslora"),
}
# Fields that change what is computed in a way that is not built -> why, and what would work.
_REFUSED = {
    "modules_to_save": "whole modules stored beside the adapter are not read; train it without modules_to_save, or "
    "merge it into the model",
    "use_dora": "DoRA changes every weight's norm, which no batch of several adapters can share; merge it into the "
    "model",
    "use_qalora": "QALoRA pools the inputs, which is not built; merge it into the model",
    "lora_bias": "biases of an adapter's own are not built; merge it into the model",
    "layer_replication": "layers that stand for several are not built; save the model so grown, and adapt that",
    "trainable_token_indices": "rows of the embeddings of its own are not built; merge it into the model",
    "target_parameters": "parameters that are no linear layers' (experts' among them) are not built; merge it into the "
    "model",
    "alora_invocation_tokens": "an adapter that begins at a token of the prompt is not built; merge nothing, train a "
    "plain LoRA",
    "megatron_config": "layers of Megatron are not built; save it from transformers' layers",
    "use_bdlora": "block-diagonal updates are not built; merge it into the model",
    "arrow_config": "routing among adapters is not built; name one adapter for a request",
    "kasa_config": "KaSA is not built; merge it into the model",
    "velora_config": "VeLoRA is not built; merge it into the model",
    "monteclora_config": "MonteCLoRA is not built; merge it into the model",
}
# Those that leave the model's own weights as they are. Others take something away from them when the model is loaded.
_INITIALIZATIONS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """target_modules: a regular expression, ALL_LINEAR, or names, each of which stands for all modules whose path it
    is or ends. layers_to_transform: the layers that names stand for; None: all. layers_pattern: expressions for what
    stands before a layer's number; none: any name.
    rank_pattern, alpha_pattern: expression for a path or its end -> what such modules have instead of `rank`,
    `alpha`."""

    place: str
    rank: int
    alpha: float
    is_rank_stabilized: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    clock: PatternClock

    def rank_of(self, module: str) -> int:
        """module: its path in transformers' model."""
        key = self._key("rank_pattern", self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """What up(down(x)) is multiplied by: alpha / r, or alpha / sqrt(r) where it is rank-stabilised (arXiv
        2312.03732)."""
        key = self._key("alpha_pattern", self.alpha_pattern, module)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def is_target(self, module: str) -> bool:
        """Whether a linear layer of the model's is adapted. module: its path, which has at most one number that is a
        layer's."""
        if self._is_named("exclude_modules", self.exclude_modules, module):
            return False
        targets = self.target_modules
        if isinstance(targets, str):
            if targets.lower() == ALL_LINEAR:
                return module != "lm_head" and not module.endswith(".lm_head")
            return self._is_named("target_modules", targets, module)
        if module in targets:
            return True
        return self._is_named("target_modules", targets, module) and self._is_in_layers(module)

    def _is_named(self, field: str, names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, str):
            return bool(names) and self.clock.matches(field, names, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _is_in_layers(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        if not self.layers_pattern:
            found = re.search(r"\.[^.]*\.(\d+)\.", module)
            return found is not None and self._has_layer(found[1])
        for pattern in self.layers_pattern:
            matched = self.clock.matches(
                "layers_pattern", pattern, module, wrapped=r"(?:|.*?\.)(?:{})\.(?P<layer>\d+)\..*"
            )
            if matched is not None:
                return self._has_layer(matched["layer"])
        return False

    def _has_layer(self, digits: str) -> bool:
        return (digits.lstrip("0") or "0") in map(str, self.layers_to_transform or ())

    def _key(self, field: str, patterns: Mapping[str, object], module: str) -> str | None:
        """The first of the patterns that matches the path or what follows a dot in it."""
        for pattern in patterns:
            if self.clock.matches(field, pattern, module, wrapped=r"(?:.*\.)?(?:{})") is not None:
                return pattern
        return None


def read_lora_config(folder: Path) -> LoraConfig:
    """Raises ModelLoadError for what is not there, is not what PEFT writes, or asks for what is not built."""
    fields = read_json_object(folder / CONFIG_NAME, max_bytes=_MAX_CONFIG_BYTES)
    _refuse_others(fields)
    targets = _names(fields, "target_modules")
    if not targets:
        raise fields.error("target_modules", "a list of module names, a regular expression, or 'all-linear'")
    layers = _layers(fields)
    patterns = _names(fields, "layers_pattern")
    alpha = finite_float(fields.raw("lora_alpha")) if "lora_alpha" in fields else 8.0
    if alpha is None:
        raise fields.error("lora_alpha", "a finite number")
    return LoraConfig(
        place=fields.place,
        rank=fields.integer("r", 8, low=1, high=MOST_RANK),
        alpha=alpha,
        is_rank_stabilized=fields.optional_boolean("use_rslora") or False,
        target_modules=targets,
        exclude_modules=_names(fields, "exclude_modules"),
        layers_to_transform=layers,
        layers_pattern=(patterns,) if isinstance(patterns, str) and patterns else tuple(patterns),
        rank_pattern=_ranks(fields),
        alpha_pattern=_alphas(fields),
        clock=PatternClock(fields.place),
    )


def _refuse_others(fields: TypedFields) -> None:
    kind = fields.string("peft_type")
    if kind.upper() != "LORA":
        raise ModelLoadError(f"{fields.place}: peft_type={shown(kind)}: only LoRA adapters are built; must be 'LORA'")
    bias = fields.optional_string("bias") or "none"
    if bias != "none":
        raise ModelLoadError(
            f"{fields.place}: bias={shown(bias)}: such an adapter changes the model's biases, which is not built; must "
            "be 'none', or merge it into the model"
        )
    start = fields.raw("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _INITIALIZATIONS):
        raise ModelLoadError(
            f"{fields.place}: init_lora_weights={shown(start)}: it may change the model's own weights; convert the "
            "adapter to a plain one when it is saved (path_initial_model_for_weight_conversion), which writes true"
        )
    for name in fields:
        asks = fields.raw(name) not in (None, False, "", [], {})
        if name in _REFUSED and asks:
            raise ModelLoadError(f"{fields.place}: {name}={shown(fields.raw(name))}: {_REFUSED[name]}")
        if name not in _READ | _WITHOUT_EFFECT | _REFUSED.keys() and asks:
            raise ModelLoadError(
                f"{fields.place}: {shown(name)}={shown(fields.raw(name))}: not a field of LoRA's that is known; leave "
                "it out, if the adapter does not depend on it"
            )


def _names(fields: TypedFields, name: str) -> str | tuple[str, ...]:
    """A string as it is; null and an absent field are no names."""
    if not fields.has_value(name):
        return ()
    value = fields.raw(name)
    if isinstance(value, str):
        if not is_text(value) or len(value) > _MAX_PATTERN_LENGTH:
            raise fields.error(name, f"a regular expression of at most {_MAX_PATTERN_LENGTH} characters")
        return value
    names = fields.strings(name)
    if any(not each or len(each) > _MAX_PATTERN_LENGTH for each in names):
        raise fields.error(name, f"names of 1 to {_MAX_PATTERN_LENGTH} characters")
    return names


def _layers(fields: TypedFields) -> tuple[int, ...] | None:
    if not fields.has_value("layers_to_transform"):
        return None
    if is_integer(fields.raw("layers_to_transform")):
        return (fields.integer("layers_to_transform"),)
    return fields.integers("layers_to_transform") or None


def _ranks(fields: TypedFields) -> dict[str, int]:
    patterns = fields.optional_object("rank_pattern")
    return {_pattern(patterns, key): patterns.integer(key, low=1, high=MOST_RANK) for key in patterns}


def _alphas(fields: TypedFields) -> dict[str, float]:
    patterns = fields.optional_object("alpha_pattern")
    return {_pattern(patterns, key): patterns.number(key) for key in patterns}


def _pattern(patterns: TypedFields, key: str) -> str:
    if not is_text(key) or not 0 < len(key) <= _MAX_PATTERN_LENGTH:
        raise patterns.error(key, f"named by a regular expression of at most {_MAX_PATTERN_LENGTH} characters")
    return key
