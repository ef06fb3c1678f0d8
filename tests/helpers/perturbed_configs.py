"""Folders of small models in whose config.json one field has another value, so that transformers gives other logits.

Which fields there are is not known here: any field that transformers wrote, and some that it did not, may be drawn; one
that changes nothing in transformers, or its weights' shapes, or that it fails on, is drawn again.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.helpers.tiny_gemma import VOCAB_SIZE

LEAST_CHANGE = 1e-2
NUM_PROMPT_TOKENS = 73  # two windows and more
_MOST_DRAWS = 150
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Names, training and generation: they do not say what a forward pass computes.
_INERT = {
    *("architectures", "model_type", "transformers_version", "dtype", "initializer_range", "use_cache", "vocab_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "output_router_logits", "pretraining_tp"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "router_aux_loss_coef", "vision_config"),
}
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu")
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 200.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
# Values for fields whose own value says too little about what may stand there.
_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"), (1e-2, 1e-1)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _ACTIVATIONS),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size"), (None, 4, 7, 40)),
    **dict.fromkeys(("attn_logit_softcapping", "moe_router_logit_softcapping"), (None, 0.5, 2.0)),
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap"), (None, 1.0, 4.0)),
    **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"), (None,)),
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "rope_type": ("default", "linear", "dynamic", "llama3", "yarn"),
    "rope_theta": (100.0, 3e3, 2e6),
    "partial_rotary_factor": (0.25, 0.5, 0.75, 1.0),
    "query_pre_attn_scalar": (None, 4, 100),
    "attention_value_scale": (None, 0.4, 2.0),
    "routed_scaling_factor": (0.5, 2.5),
    "max_position_embeddings": (256, 1024, 4096),
    "num_kv_shared_layers": (0, 1, 2, 3),
    "gating": (True, "per-head", "per-element"),
    "layer_rope_theta": (None,),
    "mlp_only_layers": ([], [0], [1]),
    "moe_layers": ([0], [1, 2]),
    "tie_word_embeddings": (True,),
}
# Fields that files have under older names or that another family has: what transformers does with them is to be done.
_ADDED = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "sliding_window", "attn_logit_softcapping"),
    *("final_logit_softcapping", "query_pre_attn_scalar", "sliding_window_size", "routed_scaling_factor"),
)
_KIND_NAMES = (_FULL, _SLIDING, "dense", "sparse")


class Perturbed(NamedTuple):
    """tokens: of the prompt. expected: transformers' log-probabilities after it, float32 [vocab_size]."""

    folder: Path
    change: str
    tokens: list[int]
    expected: torch.Tensor


def perturbed(folder: Path, name: str, seed: int, used: set[str]) -> Perturbed:
    """Change the config.json of the small model in `folder`. used: fields that are passed over; the one that is changed
    is added to them. Where transformers leaves tensors unused under the new config, they are taken out of the file.

    Raises RuntimeError where no draw changed transformers' logits.
    """
    generator = random.Random(f"{name} {seed}")
    tokens = np.random.default_rng(seed).integers(6, VOCAB_SIZE, size=NUM_PROMPT_TOKENS).tolist()
    original = json.loads((folder / "config.json").read_text())
    before = scores(folder, tokens)
    assert before is not None
    for place, (field, value) in enumerate(_draws(original, generator, used)):
        if place == _MOST_DRAWS:
            break
        changed = folder.with_name(f"{folder.name}-{place}")
        shutil.copytree(folder, changed)
        (changed / "config.json").write_text(json.dumps(_with(original, field, value), indent=2))
        if field[-1] == "tie_word_embeddings":
            _drop_head(changed)
        after = scores(changed, tokens)
        if after is not None and (after - before).abs().max() > LEAST_CHANGE:
            used.add(field[-1])
            change = f"{'.'.join(field)}: {_shown(original, field)} -> {'left out' if value is _LEFT_OUT else value}"
            return Perturbed(changed, change, tokens, after)
        shutil.rmtree(changed)
    raise RuntimeError(f"{name} {seed}: no draw changed what transformers computes")


_LEFT_OUT: Any = object()
Field = tuple[str, ...]


def _draws(config: dict[str, Any], generator: random.Random, used: set[str]) -> Iterator[tuple[Field, Any]]:
    """Fields, with a new value of each; all fields once, then again with other values."""
    prefix = ("text_config",) if "text_config" in config else ()
    text = config[prefix[0]] if prefix else config
    fields = [(*prefix, *field) for field in _fields(text)]
    fields += [(*prefix, name) for name in _ADDED if name not in text]
    if prefix and not config.get("tie_word_embeddings"):
        fields.append(("tie_word_embeddings",))
    fields = [field for field in fields if field[-1] not in used]
    while fields:
        generator.shuffle(fields)
        for field in fields:
            values = _values(field[-1], _get(config, field))
            if values:
                yield field, generator.choice(values)


def _fields(config: dict[str, Any]) -> Iterator[Field]:
    for name, value in config.items():
        if name in _INERT:
            continue
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in _fields(value))


def _get(config: dict[str, Any], field: Field) -> Any:
    value: Any = config
    for name in field:
        value = value.get(name, _LEFT_OUT)
    return value


def _shown(config: dict[str, Any], field: Field) -> str:
    value = _get(config, field)
    return "left out" if value is _LEFT_OUT else str(value)


def _with(config: dict[str, Any], field: Field, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    holder = config
    for name in field[:-1]:
        holder = holder[name]
    if value is _LEFT_OUT:
        del holder[field[-1]]
    else:
        holder[field[-1]] = value
    return config


def _values(name: str, value: Any) -> list[Any]:
    """Other values of a field, that of its absence among them."""
    others: list[Any] = [] if value is _LEFT_OUT else [_LEFT_OUT]
    if name in _VALUES and not (name == "rope_parameters" and _is_by_kind(value)):
        others += [each for each in _VALUES[name] if each != value]
    elif isinstance(value, bool):
        others += [not value] * 3
    elif isinstance(value, int):
        others += [each for each in (value - 1, value + 1, 2 * value) if each >= 0]
    elif isinstance(value, float):
        others += [value / 2, value * 1.5, value * 3] if value else [0.5]
    elif isinstance(value, list) and value:
        others += [[*value[:at], new, *value[at + 1 :]] for at, item in enumerate(value) for new in _items(item)]
    elif isinstance(value, str):
        others += [each for each in ("per-head", "per-element", "default", "linear") if each != value]
    return others


def _is_by_kind(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(each, dict) for each in value.values())


def _items(item: Any) -> list[Any]:
    """Other values of an item of a list."""
    if isinstance(item, str):
        pair = next((pair for pair in (_KIND_NAMES[:2], _KIND_NAMES[2:]) if item in pair), (item,))
        return [each for each in (pair if item != "chunked_attention" else (_FULL,)) if each != item]
    if isinstance(item, bool):
        return [not item]
    if isinstance(item, int):
        return [1 - item] if item in (0, 1) else [item + 1]
    return [item * 2 or 0.5] if isinstance(item, float) else []


def _drop_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def scores(folder: Path, tokens: list[int]) -> torch.Tensor | None:
    """transformers' log-probabilities after `tokens`, float32 [vocab_size]; None where it has no weights for the
    config, or cannot compute. Tensors that it does not use are taken out of the file."""
    import transformers

    has_vision = "vision_config" in json.loads((folder / "config.json").read_text())
    auto = getattr(transformers, "AutoModelForImageTextToText" if has_vision else "AutoModelForCausalLM")
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = auto.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
            )
            if info["missing_keys"] or info["mismatched_keys"]:
                return None
            logits = model.eval()(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
            if info["unexpected_keys"]:
                config = (folder / "config.json").read_text()
                model.save_pretrained(folder)
                (folder / "config.json").write_text(config)
    except Exception:  # whatever transformers raises on a config that it cannot run
        return None
    return logits.log_softmax(-1) if logits.isfinite().all() else None
