"""Small random models of every architecture that is served, as transformers makes and saves them.

A row of ARCHITECTURES draws a config: two periods of the layer pattern at least, windows from 8 to 32, sizes, heads and
rotary embeddings at random. `save_random_model` writes the model with weights of which each matters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.random_experts import EXPERTS
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_tokenizer

FULL, SLIDING = "full_attention", "sliding_attention"


class Draw:
    """Choices of one seed."""

    def __init__(self, name: str, seed: int, window: int | None = None) -> None:
        """window: None for one at random."""
        self._random = random.Random(f"{name} {seed}")
        drawn = self._random.randint(8, 32)
        self.window = drawn if window is None else window
        self.head_dim = self.one_of(16, 32)
        self.num_kv_heads = self.one_of(1, 2, 4)
        self.num_heads = self.num_kv_heads * self.one_of(*((2, 4) if self.num_kv_heads < 4 else (1, 2)))

    def one_of(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def chance(self) -> bool:
        return self._random.random() < 0.5

    def number(self, low: float, high: float) -> float:
        return round(self._random.uniform(low, high), 3)

    def kinds(self, num_layers: int, *, last: str | None = None) -> list[str]:
        """At random, both there."""
        kinds = [self.one_of(FULL, SLIDING) for _ in range(num_layers)]
        kinds[0], kinds[-1] = SLIDING, last or FULL
        return kinds

    def sizes(self, num_layers: int, **others: Any) -> dict[str, Any]:
        """What nearly all configs have; the heads' share of hidden_size is head_dim."""
        return {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.num_heads * self.head_dim,
            "intermediate_size": self.one_of(48, 80, 96),
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": 512,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": self.chance(),
            "dtype": "float32",
            **others,
        }

    def rope(self, *kinds: str) -> dict[str, Any]:
        """Parameters of an embedding of one of `kinds`."""
        kind, theta = self.one_of(*kinds), self.one_of(1e3, 1e4, 5e5)
        parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
        if kind in ("linear", "dynamic"):
            parameters["factor"] = self.number(1.5, 8)
        elif kind == "llama3":
            low = self.number(1, 2)
            parameters |= {"factor": self.number(2, 16), "low_freq_factor": low, "high_freq_factor": low + 2.5}
            parameters["original_max_position_embeddings"] = self.one_of(32, 64, 128)
        elif kind == "yarn":
            parameters |= {"factor": self.number(2, 16), "original_max_position_embeddings": self.one_of(32, 64, 128)}
            parameters |= self.one_of(
                {},
                {"attention_factor": 1.25},
                {"mscale": 1.0, "mscale_all_dim": 0.5},
                {"beta_fast": 16.0, "beta_slow": 2.0},
            )
            if self.chance():
                parameters["truncate"] = self.chance()
        elif kind == "longrope":
            num_pairs = self.head_dim // 2
            parameters |= {
                name: [self.number(1, 4) for _ in range(num_pairs)] for name in ("short_factor", "long_factor")
            }
        return parameters


ANY_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
Drawn = Callable[[Draw], Any]


def _config(class_name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, f"{class_name}Config")(**settings)


def _gemma2(draw: Draw, class_name: str = "Gemma2") -> Any:
    return _config(
        class_name,
        **draw.sizes(4, hidden_size=64, head_dim=draw.head_dim),
        sliding_window=draw.window,
        rope_parameters=draw.rope(*ANY_ROPE),
        query_pre_attn_scalar=draw.one_of(16, 24),
        attn_logit_softcapping=draw.one_of(None, 2.0, 50.0),
        final_logit_softcapping=draw.one_of(None, 3.0, 30.0),
        attention_bias=draw.chance(),
        **draw.one_of({}, {"layer_types": draw.kinds(4)}),
    )


def _llama(draw: Draw) -> Any:
    return _config(
        "Llama",
        **draw.sizes(2, hidden_size=64, head_dim=draw.head_dim),
        rope_parameters=draw.rope(*ANY_ROPE),
        attention_bias=draw.chance(),
        mlp_bias=draw.chance(),
    )


def _mistral(draw: Draw) -> Any:
    return _config(
        "Mistral", **draw.sizes(2), sliding_window=draw.one_of(None, draw.window), rope_parameters=draw.rope(*ANY_ROPE)
    )


def _qwen2(draw: Draw) -> Any:
    return _config(
        "Qwen2",
        **draw.sizes(4),
        use_sliding_window=True,
        sliding_window=draw.window,
        max_window_layers=draw.one_of(0, 2),
        rope_parameters=draw.rope(*ANY_ROPE),
    )


def _qwen3(draw: Draw) -> Any:
    return _config(
        "Qwen3",
        **draw.sizes(4, hidden_size=64, head_dim=draw.head_dim),
        use_sliding_window=draw.chance(),
        sliding_window=draw.window,
        max_window_layers=draw.one_of(0, 2),
        rope_parameters=draw.rope(*ANY_ROPE),
        attention_bias=draw.chance(),
    )


def _ministral(draw: Draw) -> Any:
    return _config(
        "Ministral",
        **draw.sizes(4, hidden_size=64, head_dim=draw.head_dim),
        sliding_window=draw.window,
        rope_parameters=draw.rope(*ANY_ROPE),
        **draw.one_of({}, {"layer_types": draw.kinds(4)}),
    )


def _ministral3(draw: Draw) -> Any:
    rope = draw.rope("yarn")
    return _config(
        "Ministral3",
        **draw.sizes(2, hidden_size=64, head_dim=draw.head_dim),
        sliding_window=draw.one_of(None, draw.window),
        rope_parameters={**rope, "original_max_position_embeddings": 16, "llama_4_scaling_beta": draw.number(0.1, 0.6)},
    )


def _phi3(draw: Draw) -> Any:
    rope = draw.rope("default", "longrope")
    if rope["rope_type"] == "default":
        rope["partial_rotary_factor"] = draw.one_of(0.5, 0.75, 1.0)
    settings = draw.sizes(2, sliding_window=draw.one_of(None, draw.window))
    return _config("Phi3", **settings, original_max_position_embeddings=256, rope_parameters=rope)


def _olmo2(draw: Draw) -> Any:
    return _config("Olmo2", **draw.sizes(2), rope_parameters=draw.rope(*ANY_ROPE), attention_bias=draw.chance())


def _olmo3(draw: Draw) -> Any:
    return _config(
        "Olmo3",
        **draw.sizes(8),
        sliding_window=draw.window,
        rope_parameters={FULL: draw.rope("default", "linear", "llama3"), SLIDING: draw.rope("default", "linear")},
        attention_bias=draw.chance(),
        **draw.one_of({}, {"layer_types": draw.kinds(8)}),
    )


def _cohere2(draw: Draw) -> Any:
    return _config(
        "Cohere2",
        **draw.sizes(8),
        sliding_window=draw.window,
        rope_parameters=draw.rope(*ANY_ROPE),
        attention_bias=draw.chance(),
        logit_scale=draw.number(0.1, 2),
        layer_norm_eps=draw.one_of(1e-5, 1e-2),
        **draw.one_of({}, {"layer_types": draw.kinds(8)}),
    )


def _exaone4(draw: Draw) -> Any:
    return _config(
        "Exaone4",
        **draw.sizes(8),
        rope_parameters=draw.rope(*ANY_ROPE),
        **draw.one_of(
            {"sliding_window": draw.window},
            {"sliding_window": draw.window, "sliding_window_pattern": 2},
            {"sliding_window": None, "layer_types": [FULL] * 8},
        ),
    )


def _smollm3(draw: Draw) -> Any:
    return _config(
        "SmolLM3",
        **draw.sizes(8),
        use_sliding_window=draw.chance(),
        sliding_window=draw.window,
        rope_parameters=draw.rope(*ANY_ROPE),
        attention_bias=draw.chance(),
        mlp_bias=draw.chance(),
        **draw.one_of({}, {"no_rope_layers": [draw.one_of(0, 1) for _ in range(8)]}, {"no_rope_layer_interval": 2}),
    )


def _granite_multipliers(draw: Draw) -> dict[str, Any]:
    return {
        "embedding_multiplier": draw.number(1, 12),
        "logits_scaling": draw.number(0.5, 4),
        "residual_multiplier": draw.number(0.2, 1.5),
        "attention_multiplier": draw.number(0.1, 0.5),
        "attention_bias": draw.chance(),
        "mlp_bias": draw.chance(),
        "rms_norm_eps": draw.one_of(1e-6, 1e-3),
    }


def _granite(draw: Draw) -> Any:
    return _config("Granite", **draw.sizes(2), rope_parameters=draw.rope(*ANY_ROPE), **_granite_multipliers(draw))


def _granite_moe(draw: Draw) -> Any:
    name, shared = draw.one_of(("GraniteMoe", {}), ("GraniteMoeShared", {"shared_intermediate_size": 40}))
    return _config(
        name,
        **draw.sizes(2),
        **shared,
        num_local_experts=draw.one_of(4, 6),
        num_experts_per_tok=draw.one_of(1, 2, 3),
        rope_parameters=draw.rope(*ANY_ROPE),
        **{key: value for key, value in _granite_multipliers(draw).items() if key != "mlp_bias"},
    )


def _granite_swa(draw: Draw) -> Any:
    return _config(
        "GraniteSWA",
        **draw.sizes(8),
        sliding_window=draw.window,
        rope_parameters=draw.rope("default", "linear", "llama3"),
        layer_rope_theta=draw.one_of(None, [draw.one_of(0, 1e3, 1e4) for _ in range(8)]),
        **_granite_multipliers(draw),
    )


def _starcoder2(draw: Draw) -> Any:
    return _config(
        "Starcoder2",
        **draw.sizes(2),
        sliding_window=draw.one_of(None, draw.window),
        rope_parameters=draw.rope(*ANY_ROPE),
        use_bias=draw.chance(),
        norm_epsilon=draw.one_of(1e-5, 1e-2),
    )


def _cwm(draw: Draw) -> Any:
    return _config(
        "Cwm",
        **draw.sizes(8, hidden_size=64, head_dim=draw.head_dim),
        sliding_window=draw.window,
        rope_parameters=draw.rope("llama3"),
        mlp_bias=draw.chance(),
        **draw.one_of({}, {"layer_types": draw.kinds(8)}),
    )


def _gemma4(draw: Draw) -> Any:
    kinds = draw.kinds(6)
    # Both kinds are among the first four, as the last ones may read them.
    kinds[:4] = [SLIDING, FULL, draw.one_of(SLIDING, FULL), SLIDING]
    num_kv_heads = draw.one_of(1, 2)
    # transformers cannot run layers that share K and V without inputs of their own.
    shares = draw.one_of(
        {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": draw.one_of(0, 16)},
        {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    )
    return _config(
        "Gemma4Text",
        **draw.sizes(6, hidden_size=64, num_attention_heads=4, num_key_value_heads=num_kv_heads, layer_types=kinds),
        head_dim=draw.head_dim,
        global_head_dim=draw.one_of(16, 32, 48),
        attention_k_eq_v=draw.chance(),
        num_global_key_value_heads=draw.one_of(None, 1, 2),
        sliding_window=draw.window,
        **shares,
        use_double_wide_mlp=draw.chance(),
        **draw.one_of(
            {},
            {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3, "moe_intermediate_size": 48},
        ),
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=draw.one_of(None, 3.0),
        rope_parameters={
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 1e4,
                "partial_rotary_factor": draw.one_of(0.25, 0.5, 1.0),
            },
            SLIDING: draw.rope("default", "linear"),
        },
    )


ARCHITECTURES: dict[str, Drawn] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "gemma2": _gemma2,
    "vaultgemma": lambda draw: _gemma2(draw, "VaultGemma"),
    "qwen3": _qwen3,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "smollm3": _smollm3,
    "granite": _granite,
    "granite_swa": _granite_swa,
    "granitemoe": _granite_moe,
    "starcoder2": _starcoder2,
    "cwm": _cwm,
    "gemma4": _gemma4,
    **EXPERTS,
}


def draw_config(name: str, seed: int, window: int | None = None) -> Any:
    return ARCHITECTURES[name](Draw(name, seed, window))


def random_model(config: Any, *, seed: int = 0) -> Any:
    """transformers' model of `config`, float32, in which every parameter matters: norms differ from what they begin
    with, biases and sinks from 0."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(seed)
    scalars = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith(("layer_scalar", "correction_bias"))
    ]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *scalars]:
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                # Norms begin with ones, or zeros where 1 is added to them; biases with zeros; sinks with anything.
                base = parameter.clone() if "norm" in name or "scalar" in name else torch.zeros_like(parameter)
                # Without a smaller scale, normed queries and keys would make every softmax choose one key.
                base = base * 0.4 if "q_norm" in name and config.model_type.startswith("gemma4") else base
                parameter.copy_(base + values * (0.7 if "sink" in name else 0.25))
            else:
                # Small embeddings: where they are the output too, larger ones would repeat the input.
                # The others keep the size of what goes through, or many layers would multiply rounding.
                parameter.copy_(values * (0.03 if "embed_tokens" in name else 1.1 * parameter.shape[-1] ** -0.5))
    return model


def save_random_model(path: Path, name: str, seed: int, window: int | None = None) -> Any:
    """Write the model that `seed` draws of the architecture, with a tokenizer, and return transformers' own."""
    model = random_model(draw_config(name, seed, window), seed=seed)
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return model


def window_tokens(config: Any) -> int:
    """The config's window or chunk; of one without, a length to take its place in tests."""
    for key in ("attention_chunk_size", "sliding_window", "sliding_window_size"):
        if getattr(config, key, None):
            return int(getattr(config, key))
    return 16
