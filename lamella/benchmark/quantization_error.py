"""How far quantised weights move the next token's distribution, over the states of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lamella.engine.engine import Engine
from lamella.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """kl: mean KL divergence from the float32 distribution, in nats; agreement: share of states whose most likely token
    is the same."""

    quantization: str
    num_states: int
    kl: float
    agreement: float


def measure_quantization(
    model: str, texts: Sequence[str], quantizations: Sequence[str], *, states_per_text: int = 16, **arguments: Any
) -> list[QuantizationError]:
    """Compare each of `quantizations` with float32 on `states_per_text` prefixes of each text."""
    expected = log_distributions(model, texts, "none", states_per_text, **arguments)
    found = []
    for quantization in quantizations:
        actual = log_distributions(model, texts, quantization, states_per_text, **arguments)
        kl = (expected.exp() * (expected - actual)).sum(1)
        agreement = (expected.argmax(1) == actual.argmax(1)).float()
        found.append(QuantizationError(quantization, len(kl), float(kl.mean()), float(agreement.mean())))
    return found


def log_distributions(
    model: str, texts: Sequence[str], quantization: str, states_per_text: int, **arguments: Any
) -> torch.Tensor:
    """Log-probabilities of all tokens after `states_per_text` prefixes of each text: float64 [states, vocab]."""
    states: list[torch.Tensor] = []
    with Engine(model=model, quantization=quantization, **arguments) as engine:
        network: Any = engine.inspect().runner.model
        compute = network.logits

        def record(hidden: torch.Tensor) -> Any:
            scores = compute(hidden)
            logits = scores if isinstance(scores, torch.Tensor) else scores.logits(torch.arange(len(hidden)))
            states.append(logits.double().log_softmax(1).float())
            return scores

        network.logits = record
        tokenizer = engine.get_tokenizer()
        for index, text in enumerate(texts):
            token_ids = tokenizer.encode(text)[: engine.max_model_len - 1]
            for state in range(1, states_per_text + 1):
                prefix = token_ids[: len(token_ids) * state // states_per_text]
                engine.add_request(f"{index}-{state}", {"prompt_token_ids": prefix}, SamplingParams(max_tokens=1))
                while engine.has_unfinished_requests():
                    engine.step()
    return torch.cat(states).double()
