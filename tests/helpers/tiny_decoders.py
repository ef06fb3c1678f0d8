"""Models of Llama's shape small enough to run in every test, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_tokenizer

_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
# Name -> transformers' model class, and what its config has besides.
TINY_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "llama with scaled positions": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2 as a hybrid": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}),
}


def save_tiny_decoder(path: Path, name: str, *, seed: int = 0, **config_overrides: Any) -> Any:
    """Write the model called `name` in TINY_DECODERS, random, with a tokenizer, and return transformers' (eval mode).

    Weights are large enough that greedy outputs vary; norms differ from 1 and biases from 0.
    """
    import transformers

    class_name, settings = TINY_DECODERS[name]
    config = getattr(transformers, f"{class_name}Config")(**{**_SETTINGS, **settings, **config_overrides})
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * values)
            else:
                # Small embeddings: where they are the output too, larger ones would repeat the input.
                parameter.copy_(values * (0.03 if "embed_tokens" in parameter_name else 0.15))
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return model


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """One full forward pass for each token: no cache that could be wrong."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
