"""A Gemma 3 GGUF file as a Hugging Face folder: for engines that read no GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lamella.model_executor.models.gemma3_weights import GEMMA3_WEIGHTS

from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.models.config import LayerConfig, ModelConfig
from lamella.model_executor.models.registry import parse_gguf_config
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.chat_templates import gguf_chat_templates
from lamella.model_executor.text.gguf_tokenizer import tokenizer_json
from lamella.model_executor.text.gguf_vocabulary import TOKENIZER_ARRAYS, special_token_ids
from lamella.model_executor.weights.checkpoint import GgufCheckpoint
from lamella.model_executor.weights.conversion import is_norm
from lamella.model_executor.weights.gguf_header import GgufHeader, read_gguf_header


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
    ropes = {layer.kind: _rope(layer) for layer in config.layers}
    windows = [layer.window_tokens for layer in config.layers if layer.window_tokens is not None]
    full, sliding = ropes.get("full_attention"), ropes.get("sliding_attention")
    old_keys: dict[str, Any] = {}
    if full is not None:
        old_keys["rope_theta"] = full["rope_theta"]
        if full["rope_type"] == "linear":
            old_keys["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    if sliding is not None:
        old_keys["rope_local_base_freq"] = sliding["rope_theta"]
    query_pre_attn_scalar = config.query_scale**-2
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "query_pre_attn_scalar": round(query_pre_attn_scalar),
        "sliding_window": windows[0] if windows else None,
        "layer_types": [layer.kind for layer in config.layers],
        "rope_parameters": ropes,
        **old_keys,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_logit_softcapping": config.attn_logit_softcap,
        "final_logit_softcapping": config.final_logit_softcap,
        **_special_ids(config),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _rope(layer: LayerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": layer.rope_theta}
    return rope if layer.rope_scale == 1.0 else {**rope, "rope_type": "linear", "factor": layer.rope_scale}


def _special_ids(config: ModelConfig) -> dict[str, Any]:
    # One id plainly, as checkpoints write it; several as a list.
    ends: Any = config.eos_token_ids
    return {"bos_token_id": config.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None}


def _weights(gguf: Path) -> dict[str, torch.Tensor]:
    checkpoint = GgufCheckpoint(gguf, GEMMA3_WEIGHTS)
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        if tensor.problem is not None:
            raise ModelLoadError(f"{gguf}: {tensor.problem}")
        values = checkpoint.read_rows(name, 0, tensor.shape[0]).float()
        full_name = name if name == "lm_head.weight" else f"model.{name}"
        weights[full_name] = (values - 1.0 if is_norm(name) else values).contiguous()
    return weights


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
