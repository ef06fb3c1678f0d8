"""A Gemma 3 GGUF file as a Hugging Face folder: for engines that read no GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lamella.errors import ConfigError, InvariantError, ModelLoadError
from lamella.model_executor.models.config import AttentionConfig, ModelConfig, RotaryConfig
from lamella.model_executor.models.gemma3 import GEMMA3
from lamella.model_executor.models.mlp_config import MLPConfig
from lamella.model_executor.models.registry import parse_gguf_config
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.chat_templates import gguf_chat_templates
from lamella.model_executor.text.gguf_tokenizer import tokenizer_json
from lamella.model_executor.text.gguf_vocabulary import TOKENIZER_ARRAYS, special_token_ids
from lamella.model_executor.weights.checkpoint import GgufCheckpoint
from lamella.model_executor.weights.gguf_header import GgufHeader, read_gguf_header
from lamella.model_executor.weights.parameters import is_norm

# Of a layer: the model's name -> the checkpoint's.
_LAYER_NAMES = {ours: theirs for theirs, ours in GEMMA3.weights.safetensors_layer.items()}


def write_hf_folder(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32) and the tokenizer into `folder`, which
    is made where needed.

    Weights are the GGUF's values, expanded: norms as w where the file holds 1 + w, so that a norm may be off by the
    rounding of one addition. A file whose vocabulary cannot be rebuilt is written without a tokenizer.
    Raises ModelLoadError where the GGUF cannot be read or is not Gemma 3, ConfigError where `folder` holds another
    model or cannot be written.
    """
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise ConfigError(f"out={str(folder)!r} already holds a model; name another folder")
    header = read_gguf_header(gguf, string_arrays=TOKENIZER_ARRAYS)
    config = parse_gguf_config(header)
    if config.architecture != GEMMA3.name:
        raise ModelLoadError(f"{gguf} holds a model of family {config.architecture!r}; only {GEMMA3.name!r} is written")
    weights = _weights(gguf)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Last, so that a folder cut short is not taken for a model.
        _write_tokenizer(header, folder)
        _write_weights(weights, folder)
        _write_json(folder / "generation_config.json", {"do_sample": False, **_special_ids(config)})
        _write_json(folder / "config.json", hf_config(config))
    except OSError as error:
        raise ConfigError(f"out={str(folder)!r} cannot be written: {error}") from error


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config` as config.json: in transformers 5's keys, and in those that transformers 4 reads."""
    attentions = [layer.attention for layer in config.layers]  # they differ in windows and rotary embedding alone
    ropes = {each.kind: _rope(_rotary(each)) for each in attentions}
    windows = [each.window_tokens for each in attentions if each.window_tokens is not None]
    first = attentions[0]
    full, sliding = ropes.get("full_attention"), ropes.get("sliding_attention")
    old_keys: dict[str, Any] = {}
    if full is not None:
        old_keys["rope_theta"] = full["rope_theta"]
        if full["rope_type"] == "linear":
            old_keys["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    if sliding is not None:
        old_keys["rope_local_base_freq"] = sliding["rope_theta"]
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MLPConfig)  # Gemma 3 has no experts
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.k_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "query_pre_attn_scalar": round(first.scale**-2),
        "sliding_window": windows[0] if windows else None,
        "layer_types": [each.kind for each in attentions],
        "rope_parameters": ropes,
        **old_keys,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_logit_softcapping": first.softcap,
        "final_logit_softcapping": config.final_logit_softcap,
        **_special_ids(config),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _rotary(attention: AttentionConfig) -> RotaryConfig:
    if attention.rotary is None:
        raise InvariantError(f"a {attention.kind} layer of {GEMMA3.name!r} has no rotary embedding; each must have one")
    return attention.rotary


def _rope(rotary: RotaryConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.theta}
    divisor = rotary.position_divisor
    return rope if divisor == 1.0 else {**rope, "rope_type": "linear", "factor": divisor}


def _special_ids(config: ModelConfig) -> dict[str, Any]:
    # One id plainly, as checkpoints write it; several as a list.
    ends: Any = config.eos_token_ids
    return {"bos_token_id": config.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None}


def _weights(gguf: Path) -> dict[str, torch.Tensor]:
    checkpoint = GgufCheckpoint(gguf, GEMMA3.weights)
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.problem is not None:
            raise ModelLoadError(f"{gguf}: {tensor.problem}")
        values = checkpoint.read_rows(name, 0, tensor.shape[0]).float()
        weights[_full_name(name)] = (values - 1.0 if is_norm(name) else values).contiguous()
    return weights


def _full_name(name: str) -> str:
    """As checkpoints spell the model's parameter `name`."""
    if name == "lm_head.weight":
        return name
    if not name.startswith("layers."):
        return f"model.{name}"
    _, layer, part = name.split(".", 2)
    stem, ending = part.rsplit(".", 1)
    return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{ending}"


def _write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    fields = TypedFields(header.metadata, header.path)
    template = gguf_chat_templates(fields)
    try:
        document = tokenizer_json(fields, template)
    except ModelLoadError:
        return  # prompts are token ids: most engines need none
    (folder / "tokenizer.json").write_text(document, encoding="utf-8")
    tokens = header.metadata["tokenizer.ggml.tokens"]
    special = {name: tokens[token_id] for name, token_id in special_token_ids(fields).items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | ({"chat_template": template} if template else {}))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
