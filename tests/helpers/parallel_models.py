"""Small models of four shapes that workers divide: with 1, 2 and 8 KV heads, and with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.random_models import FULL, SLIDING, random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma, save_tiny_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "sliding_window": 16,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {kind: {**_ROPE, "partial_rotary_factor": 0.5} for kind in (FULL, SLIDING)}


def _save(class_name: str, folder: Path, **fields: Any) -> None:
    import transformers

    config = getattr(transformers, f"{class_name}Config")(**{**_SIZES, **fields})
    random_model(config, seed=1).save_pretrained(folder)
    save_tiny_tokenizer(folder)


def _gemma(folder: Path) -> None:
    save_tiny_gemma(folder, num_key_value_heads=1)


def _llama(folder: Path) -> None:
    _save("Llama", folder, num_key_value_heads=8, head_dim=16, attention_bias=True, mlp_bias=True)


def _gpt_oss(folder: Path) -> None:
    _save(
        "GptOss",
        folder,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
        rope_parameters=_ROPE,
    )


def _mimo(folder: Path) -> None:
    _save(
        "MiMoV2Flash",
        folder,
        layer_types=[FULL, SLIDING, FULL],
        num_key_value_heads=1,
        head_dim=48,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        rope_parameters=_ROPES,
    )


SHAPES: dict[str, Callable[[Path], None]] = {"gemma": _gemma, "llama": _llama, "gpt_oss": _gpt_oss, "mimo": _mimo}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of several lengths, some of which begin alike."""

    token_ids: list[list[int]]

    @staticmethod
    def drawn(seed: int, lengths: tuple[int, ...]) -> Prompts:
        generator = np.random.default_rng(seed)
        drawn = [generator.integers(6, VOCAB_SIZE, size=length).tolist() for length in lengths]
        longest = max(drawn, key=len)
        return Prompts([*drawn, [*longest[: len(longest) // 2], *drawn[0]]])
