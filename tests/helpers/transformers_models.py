"""Small random models of many architectures, as transformers builds and saves them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from lamella.model_executor.models.transformers_backend.attention_interface import RECORDED_ATTENTION, register
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_tokenizer

WINDOW = 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDES: dict[str, Any] = {"sliding_window": WINDOW}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_ALTERNATE: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"] * 2, **_SLIDES}
_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_PROJECTOR = {"out_hidden_size": 32, "projector_hidden_size": 32}
_AUDIO = {"hidden_sizes": [16] * 4, "depths": [1] * 4, "out_hidden_size": 64}
_LAYER_INPUTS = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}

# model_type -> what its config has besides; at least two periods of its pattern.
RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "afmoe": {**_SLIDES, **_EXPERTS, "num_dense_layers": 1, "num_hidden_layers": 8},
    "apertus": {},
    "arcee": {},
    "beam": {**_SLIDES},
    "bitnet": {},
    "cohere": {},
    "cohere2": {**_SLIDES, "num_hidden_layers": 8},
    "cohere2_moe": {**_SLIDES, **_EXPERTS, "num_hidden_layers": 8},
    "cwm": {**_SLIDES, "num_hidden_layers": 8},
    "ernie4_5": {},
    "exaone4": {**_SLIDES, "sliding_window_pattern": 4, "num_hidden_layers": 8},
    "exaone_moe": {**_SLIDES, **_EXPERTS, "num_hidden_layers": 8},
    "flint": {},
    "gemma2": {**_SLIDES},
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_SIZES, **_SLIDES, "num_hidden_layers": 12},
        "vision_config": _VISION,
    },
    "gemma3_text": {**_SLIDES, "num_hidden_layers": 12},
    "gemma3n_text": {
        **_SLIDES,
        **_LAYER_INPUTS,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5] * 3 + [0.0] * 7,
    },
    "gemma4_text": {
        **_SLIDES,
        **_LAYER_INPUTS,
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "global_head_dim": 32,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified_text": {
        **_SLIDES,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
    },
    "glm4": {},
    "gpt_oss": {**_SLIDES, **_EXPERTS},
    "granite": {"attention_multiplier": 0.2},
    "granite_swa": {**_SLIDES, "num_hidden_layers": 8},
    "granitemoe": {**_EXPERTS, "attention_multiplier": 0.2},
    "granitemoeshared": {**_EXPERTS, "attention_multiplier": 0.2, "shared_intermediate_size": 40},
    "granitemoe_swa": {**_SLIDES, **_EXPERTS, "num_hidden_layers": 8},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hy_v3": _EXPERTS,
    "internlm3": {},
    "kolibri1": {**_ALTERNATE},
    "laguna": {**_ALTERNATE, **_EXPERTS},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama4_text": {
        **_EXPERTS,
        "num_hidden_layers": 8,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 96,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "num_experts_per_tok": 1,
    },
    "mellum": {**_ALTERNATE, **_EXPERTS},
    "mimo_v2_flash": {**_EXPERTS, "num_hidden_layers": 12, "sliding_window_size": WINDOW - 1, "v_head_dim": 8},
    "minimax_m2": _EXPERTS,
    "ministral": {**_SLIDES},
    "ministral3": {**_SLIDES},
    "mistral": {**_SLIDES},
    "mixtral": {**_SLIDES, **_EXPERTS},
    "modernbert-decoder": {
        "local_attention": 2 * WINDOW,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,  # not a field of it: all its heads have keys of their own
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "muse_glimmer": {
        "text_config": {"model_type": "muse_glimmer_text", **_SIZES, **_SLIDES, "num_hidden_layers": 8},
        "vision_config": _VISION,
        **_PROJECTOR,
    },
    "muse_spark": {
        "text_config": {
            "model_type": "muse_spark_text",
            **_SIZES,
            **_SLIDES,
            **_EXPERTS,
            "num_hidden_layers": 8,
            "moe_hidden_size": 32,
        },
        "vision_config": _VISION,
        "audio_config": _AUDIO,
        **_PROJECTOR,
    },
    "nanochat": {},
    "olmo2": {},
    "olmo3": {**_SLIDES, "num_hidden_layers": 8},
    "olmoe": _EXPERTS,
    "phi": {},
    "phi3": {**_SLIDES},
    "phimoe": {**_SLIDES, **_EXPERTS},
    "qwen2": {**_SLIDES, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {
        **_SLIDES,
        **_EXPERTS,
        "use_sliding_window": True,
        "max_window_layers": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {**_SLIDES, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": {**_SLIDES, **_EXPERTS, "use_sliding_window": True},
    "seed_oss": {},
    "smollm3": {**_SLIDES, "use_sliding_window": True, "num_hidden_layers": 8},
    "stablelm": {},
    "starcoder2": {**_SLIDES},
    "step3p7": {
        "text_config": {
            "model_type": "step3p5",
            **_SIZES,
            **_EXPERTS,
            **_ALTERNATE,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 32,
        },
        "vision_config": _VISION,
    },
    "vaultgemma": {**_SLIDES},
}


def random_config(model_type: str, **changes: Any) -> Any:
    """transformers' config of the model called `model_type` in RANDOM_MODELS."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = RANDOM_MODELS.get(model_type, {})
    if "text_config" in own:
        own = {**own, "text_config": {**own["text_config"], **changes}}
        return CONFIG_MAPPING[model_type](**own)
    return CONFIG_MAPPING[model_type](**{**_SIZES, **own, **changes})


def recorded_model(model_type: str, device: str = "cpu", **changes: Any) -> tuple[Any, Any]:
    """A random model on the attention that recorders listen to, and a config like its own."""
    from transformers import AutoModelForCausalLM

    register()
    config = random_config(model_type, **changes)
    arguments = {"attn_implementation": RECORDED_ATTENTION, "experts_implementation": "batched_mm"}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), **arguments).eval(), config


def save_random_model(path: Path, model_type: str, *, seed: int = 0, dtype: str = "float32", **changes: Any) -> Any:
    """Write a random model with a tokenizer and return transformers' in float32, read from what was written.

    Weights are large enough that greedy outputs vary; norms differ from 1.
    """
    import transformers

    config = random_config(model_type, **changes)
    kind = "ImageTextToText" if "vision_config" in RANDOM_MODELS.get(model_type, {}) else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    torch.manual_seed(seed)
    model = auto.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(parameter + 0.3 * values)
            else:
                # Small embeddings: where they are the output too, larger ones would repeat the input.
                parameter.copy_(values * (0.03 if "embed" in name else 0.15))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    save_tiny_tokenizer(path)
    return auto.from_pretrained(path, dtype=torch.float32).eval()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [num_tokens, vocab_size] by one pass without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits
