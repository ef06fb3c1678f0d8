"""No field of a config is passed over: where another value changes transformers' logits, ours change alike, or the
model is refused. Fields are drawn from all that a saved config has (tests/helpers/perturbed_configs.py).

`pytest -s` prints what was changed and what was refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.errors import ModelLoadError
from tests.helpers import transformers_models
from tests.helpers.perturbed_configs import Perturbed, perturbed
from tests.helpers.random_models import ARCHITECTURES, save_random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE

MOST_DIFFERENCE = 1e-4
MOST_REFUSED = 0.1
NUM_SLOW_NATIVE, NUM_SLOW_BACKEND = 7, 4
NATIVE = (*ARCHITECTURES, "gemma3_text")
# One of each mechanism; none of them has a native family.
BY_TRANSFORMERS = ("apertus", "beam", "cohere2_moe", "gemma3n_text", "glm4", "granitemoe_swa", "mellum", "minimax_m2")
# What is refused of all these, by a part of each reason.
REFUSED: dict[str, tuple[str, ...]] = {"gemma3_text": ("only causal models can generate",)}
REFUSED_BY_TRANSFORMERS: dict[str, tuple[str, ...]] = {}


class Outcomes(NamedTuple):
    equal: list[str]
    refused: list[str]
    wrong: list[str]

    def check(self, refused: Sequence[str] = ()) -> None:
        """refused: a part of the reason of each that is to be refused, in their order."""
        print(f"\n{len(self.equal)} equal, {len(self.refused)} refused, {len(self.wrong)} wrong")
        print(*(f"{kind}: {line}" for kind in self._fields for line in getattr(self, kind)), sep="\n")
        assert not self.wrong, "\n".join(self.wrong)
        assert len(self.refused) == len(refused), "\n".join(self.refused)
        assert all(told in line for told, line in zip(refused, self.refused, strict=True)), "\n".join(self.refused)


def outcome(case: Perturbed, model_impl: str) -> tuple[str, str]:
    """What came of it, equal, refused or wrong, and why."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=VOCAB_SIZE)
    settings: dict[str, Any] = {"max_model_len": 96, "kv_cache_memory_bytes": 2**21, "max_num_batched_tokens": 32}
    try:
        with LLM(str(case.folder), model_impl=model_impl, max_num_seqs=1, **settings) as llm:
            (output,) = llm.generate([case.tokens], params, use_tqdm=False)
    except ModelLoadError as error:
        return "refused", str(error).split(": ", 1)[-1]
    row = output.outputs[0].logprobs[0]
    difference = (torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)]) - case.expected).abs().max()
    return ("equal" if difference < MOST_DIFFERENCE else "wrong"), f"differs by {difference:.1e}"


def run(folder: Path, names: Iterable[str], count: int, model_impl: str) -> Outcomes:
    """What a native family refuses as a variant runs by the other way in with "auto", or that refuses it, too."""
    outcomes = Outcomes([], [], [])
    for name in names:
        used: set[str] = set()
        for seed in range(count):
            path = folder / f"{name}-{seed}"
            drawn = name in ARCHITECTURES and model_impl == "native"
            (save_random_model if drawn else transformers_models.save_random_model)(path, name, seed=seed)
            case = perturbed(path, name, seed, used)
            kind, why = outcome(case, model_impl)
            getattr(outcomes, kind).append(f"{name} ({model_impl}), {case.change}: {why}")
            if kind == "refused" and model_impl == "native":
                kind, why = outcome(case, "auto")
                print(f"{name} (auto), {case.change}: {kind}, {why}")
                if kind == "wrong":
                    outcomes.wrong.append(f"{name} (auto), {case.change}: {why}")
    return outcomes


def test_one_field_of_each_native_family(tmp_path: Path) -> None:
    run(tmp_path, NATIVE, 1, "native").check()


def test_one_field_of_models_that_transformers_runs(tmp_path: Path) -> None:
    run(tmp_path, BY_TRANSFORMERS[::4], 1, "transformers").check()


def test_few_are_refused() -> None:
    """By the tests below, which hold what is refused against the lists."""
    assert NUM_SLOW_NATIVE * len(NATIVE) >= 200
    for count, refused, names in (
        (NUM_SLOW_NATIVE, REFUSED, NATIVE),
        (NUM_SLOW_BACKEND, REFUSED_BY_TRANSFORMERS, BY_TRANSFORMERS),
    ):
        assert set(refused) <= set(names)
        assert sum(map(len, refused.values())) <= MOST_REFUSED * count * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_fields_of_a_native_family(name: str, tmp_path: Path) -> None:
    run(tmp_path, [name], NUM_SLOW_NATIVE, "native").check(REFUSED.get(name, ()))


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_fields_of_a_model_that_transformers_runs(name: str, tmp_path: Path) -> None:
    run(tmp_path, [name], NUM_SLOW_BACKEND, "transformers").check(REFUSED_BY_TRANSFORMERS.get(name, ()))


def test_a_field_that_is_ignored_would_be_found(tmp_path: Path) -> None:
    """The config as it was, beside what transformers gives for the changed one."""
    save_random_model(tmp_path / "llama", "llama", seed=0)
    case = perturbed(tmp_path / "llama", "llama", 0, {"num_hidden_layers"})
    assert outcome(case, "native")[0] == "equal"
    assert outcome(case._replace(folder=tmp_path / "llama"), "native")[0] == "wrong"
