"""Models with experts small enough to run in every test, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_tokenizer

WINDOW = 16  # of whatever layers slide or attend in chunks
_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
# Name -> transformers' model class, its config's, and what that has besides.
TINY_EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 6, "sliding_window": WINDOW}),
    "qwen2 with experts": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 with experts": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "head_dim": 32,
            "attention_bias": True,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 6, "head_dim": 32, "sliding_window": WINDOW, "num_experts_per_tok": 3},
    ),
    "llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "num_local_experts": 6,
            "head_dim": 32,
            "attention_chunk_size": WINDOW,
            "floor_scale": 10,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
        },
    ),
    "mimo-v2": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "head_dim": 48,
            "v_head_dim": 32,
            "num_key_value_heads": 1,
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "routed_scaling_factor": 1.5,
        },
    ),
}


def save_tiny_experts(path: Path, name: str, *, seed: int = 0, **config_overrides: Any) -> Any:
    """Write the model called `name` in TINY_EXPERTS, random, with a tokenizer, and return transformers' (eval mode).

    Weights are large enough that greedy outputs vary and tokens go to different experts; norms differ from 1, and
    biases and corrections from 0.
    """
    import transformers

    model_name, config_name, settings = TINY_EXPERTS[name]
    config = getattr(transformers, config_name)(**{**_SETTINGS, **settings, **config_overrides})
    model = getattr(transformers, model_name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    corrections = [(each, buffer) for each, buffer in model.named_buffers() if "correction" in each]
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *corrections]:
            values = torch.randn(tensor.shape, generator=generator)
            if tensor_name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * values)
            else:
                # Small embeddings: where they are the output too, larger ones would repeat the input.
                tensor.copy_(values * (0.03 if "embed_tokens" in tensor_name else 0.15))
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return model
