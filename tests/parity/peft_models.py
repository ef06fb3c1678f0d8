"""What the fixture of PEFT's own results is about: models, adapters by their seeds, prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

FIXTURE = Path(__file__).parents[1] / "fixtures" / "peft_parity.json"
MODELS = ("gemma3", "llama", "qwen2 as a hybrid", "mistral")  # Gemma's by tiny_gemma, the others' by tiny_decoders
NUM_TOKENS_APART = 8  # of the vocabulary, every so many's log-probability is stored


def adapter_values(name: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of an adapter, float32 [*shape], by its name in the file."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 0.3


def prompt_of(index: int) -> list[int]:
    """The prompt of adapter `index`."""
    return [2] + [(7 * index + 11 * place) % 300 + 8 for place in range(20 + 5 * index)]
