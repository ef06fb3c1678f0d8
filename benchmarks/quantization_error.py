"""KL divergence and top-1 agreement of quantised weights with float32, over the states of given texts.

python benchmarks/quantization_error.py --text docs/kv_cache.md --text docs/cpu.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
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


@click.command()
@click.option("--model", default="demo:gemma-3-270m", show_default=True)
@click.option(
    "--text", "paths", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True, required=True
)
@click.option("--quantization", "quantizations", multiple=True, default=("int8", "w8a8"), show_default=True)
@click.option(
    "--states", "states_per_text", type=click.IntRange(min=1), default=32, show_default=True, help="of a text"
)
@click.option("--max-model-len", type=click.IntRange(min=2), default=1024, show_default=True)
def main(
    model: str, paths: tuple[Path, ...], quantizations: tuple[str, ...], states_per_text: int, max_model_len: int
) -> None:
    texts = [path.read_text(encoding="utf-8") for path in paths]
    print("| quantization | states | KL, nats | same most likely token |")
    print("|---|---|---|---|")
    for one in measure_quantization(
        model,
        texts,
        quantizations,
        states_per_text=states_per_text,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=1 << 28,
    ):
        print(f"| {one.quantization} | {one.num_states} | {one.kl:.4f} | {one.agreement:.3f} |")


if __name__ == "__main__":
    main()
