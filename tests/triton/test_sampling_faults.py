"""Faults planted in the device sampler, one at a time: each must show in a check that the sampler as it is passes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import lamella.model_executor.sampling.device as package
from lamella.model_executor.sampling.device import device_sampler as sampler_module
from tests.helpers.sampling import make_batch, random_logits
from tests.helpers.sampling_oracle import distribution

SOURCE = Path(package.__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = {"temperature": 0.0}
UNIFORM_ROW = 5


def check_draws(module: ModuleType, row: torch.Tensor, block_columns: int = 32, **filters: float) -> None:
    expected = distribution(row.double().numpy(), **filters)
    numbers = expected.telling_numbers()
    parameters = module.row_parameters(make_batch(*[filters] * len(numbers)), len(row))
    parameters[UNIFORM_ROW] = numbers
    logits = row.repeat(len(numbers), 1).to(DEVICE)
    tokens = module.DeviceSampler(block_columns).choose(logits, parameters)[0].tolist()
    assert tokens == [expected.pick(number) for number in numbers]


def unfiltered(module: ModuleType) -> None:
    check_draws(module, random_logits(1, 60, seed=0)[0], temperature=0.6)


def few_of_many(module: ModuleType) -> None:
    check_draws(module, random_logits(1, 60, seed=1)[0], 64, top_k=2, temperature=1.7)


def one_per_block(module: ModuleType) -> None:
    row = random_logits(1, 90, seed=1)[0].clamp(max=0.0)
    row[[7, 40, 80]] = torch.tensor([3.0, 2.0, 2.5])
    check_draws(module, row, top_k=3)


def more_than_blocks(module: ModuleType) -> None:
    check_draws(module, random_logits(1, 60, seed=2)[0] - 3.0, 64, top_k=7)


def wide(module: ModuleType) -> None:
    """More than a block's worth of tokens are in question at first."""
    check_draws(module, random_logits(1, 90, seed=2)[0] / 3, top_k=50, top_p=0.9)


def equals_cut_by_count(module: ModuleType) -> None:
    """Four are largest, in two blocks; three of them are kept."""
    row = random_logits(1, 60, seed=3)[0].clamp(max=0.0)
    row[[7, 20, 50, 51]] = 1.5
    check_draws(module, row, top_k=3)


def equals_cut_by_mass(module: ModuleType) -> None:
    check_draws(module, torch.zeros(70), top_p=0.507)


def most_of_the_mass(module: ModuleType) -> None:
    check_draws(module, random_logits(1, 60, seed=4)[0], 64, top_p=0.97)


def share_of_the_few(module: ModuleType) -> None:
    """Of ten equals three are kept, and of these two: two thirds."""
    row = torch.full((60,), -5.0)
    row[20:30] = 0.0
    check_draws(module, row, 64, top_k=3, top_p=0.6)


def least_share(module: ModuleType) -> None:
    check_draws(module, random_logits(1, 60, seed=5)[0], 64, min_p=0.03, temperature=2.0)


def greedy_equals(module: ModuleType) -> None:
    """Equal within a block and across blocks, zeros of either sign."""
    rows = torch.full((3, 90), -1.0)
    rows[0, [40, 45]] = 2.0
    rows[1, [40, 70]] = 2.0
    rows[2, [33, 50]] = torch.tensor([-0.0, 0.0])
    sample = module.DeviceSampler(32)(rows.to(DEVICE), make_batch(GREEDY, GREEDY, GREEDY))
    assert sample.result().token_ids.tolist() == [40, 40, 33]


def below_zero(module: ModuleType) -> None:
    rows = random_logits(2, 90, seed=6) - 40.0
    sample = module.DeviceSampler(32)(rows.to(DEVICE), make_batch(GREEDY, GREEDY))
    assert sample.result().token_ids.tolist() == rows.argmax(1).tolist()


def unusable(module: ModuleType) -> None:
    """NaN with the sign bit."""
    values = np.zeros((1, 40), dtype=np.uint32)
    values[0, 5] = 0xFFC00000
    sample = module.DeviceSampler(32)(torch.from_numpy(values.view(np.float32)).to(DEVICE), make_batch(GREEDY))
    assert sample.result().unusable.keys() == {0}


def logprobs(module: ModuleType) -> None:
    """Equals at the cut, in two blocks; a banned token still counts."""
    row = random_logits(1, 64, seed=7)[0].clamp(max=0.0)
    row[[7, 20, 50, 51]] = 1.5
    row[60] = 2.0
    batch = make_batch(dict(GREEDY, num_logprobs=4), {"num_logprobs": 3, "top_k": 2}, banned={0: (60,)})
    result = module.DeviceSampler(32)(row.repeat(2, 1).to(DEVICE), batch).result()
    first, second = result.logprobs[0], result.logprobs[1]
    log_probabilities = row.double().log_softmax(0)
    assert first.top_ids.tolist() == [60, 7, 20, 50]
    assert second.top_ids.tolist() == [60, 7, 20]
    assert (first.token_id, first.rank) == (7, 2)
    assert first.logprob == pytest.approx(float(log_probabilities[7]), abs=1e-6)
    np.testing.assert_allclose(first.top_logprobs, log_probabilities[first.top_ids].numpy(), rtol=1e-5)


@dataclass(frozen=True, slots=True)
class Fault:
    file: str
    old: str
    new: str
    shows_in: Callable[[ModuleType], None]


FAULTS = {
    "negative logits upside down": Fault(
        "row_order", "((bits >> 31) & WITHOUT_SIGN)", "((bits >> 31) & 0)", below_zero
    ),
    "-0 below 0": Fault("row_order", "values = tl.where(values == 0.0, 0.0, values)", "values = values", greedy_equals),
    "NaN has its bits' place": Fault(
        "row_order", "tl.where(values != values, NAN_KEY, keys)", "tl.where(values != values, keys, keys)", unusable
    ),
    "blocks whose maximum is the bound are passed over": Fault(
        "row_order",
        "if tl.load(row_maxima + block) >= low_key:",
        "if tl.load(row_maxima + block) > low_key:",
        one_per_block,
    ),
    "one group too high": Fault(
        "row_order", "tl.where(reached, high, highest + 1)", "tl.where(reached, high, highest)", more_than_blocks
    ),
    "gathered keys overwrite each other": Fault(
        "row_order", "places = num_found + tl.cumsum", "places = tl.cumsum", wide
    ),
    "what comes before the gathered is not counted": Fault(
        "row_order", "count = num_before + tl.sum", "count = tl.sum", wide
    ),
    "what comes before the gathered does not weigh": Fault(
        "row_order", "mass = mass_before + tl.sum", "mass = tl.sum", wide
    ),
    "the bound from the maxima is one too high": Fault("row_order", ">= k\n", ">= k - 1\n", one_per_block),
    "the next of equals": Fault("row_order", "(places == n)", "(places == n + 1)", equals_cut_by_mass),
    "places begin anew in each block": Fault(
        "row_order", "before += tl.sum(is_member, 0)", "before += 0", equals_cut_by_mass
    ),
    "highest id of a block's equals": Fault(
        "choose",
        "tl.min(tl.where(keys == largest, columns, NO_INDEX), 0)",
        "tl.max(tl.where(keys == largest, columns, -1), 0)",
        greedy_equals,
    ),
    "last of equal blocks": Fault(
        "choose",
        "token = tl.min(tl.where(block_maxima == best_key, ids, NO_INDEX), 0)",
        "token = tl.max(tl.where(block_maxima == best_key, ids, -1), 0)",
        greedy_equals,
    ),
    "blocks weigh by their own maxima": Fault(
        "choose", "masses = masses * tl.exp(below_best / temperature)", "masses = masses", unfiltered
    ),
    "blocks weigh as at temperature 1": Fault(
        "choose", "tl.exp(below_best / temperature)", "tl.exp(below_best)", unfiltered
    ),
    "the block's own mass counts as before it": Fault("choose", "blocks == block - 1", "blocks == block", unfiltered),
    "min_p without temperature": Fault("choose", "widest + temperature * log_min_p", "widest + log_min_p", least_share),
    "filtered rows at temperature 1": Fault(
        "choose",
        "    inverse_temperature = (1.0 / temperature).to(tl.float32)\n    widest",
        "    inverse_temperature = (temperature / temperature).to(tl.float32)\n    widest",
        few_of_many,
    ),
    "all that equal the k-th are kept": Fault(
        "choose", "kept_count = top_k\n", "kept_count = num_low\n        top_k = num_low\n", equals_cut_by_count
    ),
    "one more than top_k weighs": Fault("choose", "(top_k - num_high)", "(top_k + 1 - num_high)", more_than_blocks),
    "top_p of more than top_k left": Fault(
        "choose", "enough = top_p * kept_mass", "enough = top_p * mass_low", share_of_the_few
    ),
    "fewest tokens below top_p": Fault("choose", "tl.ceil((enough", "tl.floor((enough", equals_cut_by_mass),
    "what is dropped is taken for one token": Fault("choose", "kept_mass / vocab_size", "kept_mass", most_of_the_mass),
    "mass of the token that crosses is lost": Fault(
        "choose",
        "kept_mass = mass_high + weight * (kept_count - num_high).to(tl.float64)",
        "kept_mass = mass_high + weight * (kept_count - num_high - 1).to(tl.float64)",
        most_of_the_mass,
    ),
    "rank counts equals": Fault(
        "logprobs", "order_key(logit).to(tl.int64) + 1", "order_key(logit).to(tl.int64)", logprobs
    ),
    "one of the top too few": Fault("logprobs", "<= num_equal)", "< num_equal)", logprobs),
    "each block's equals are among the top": Fault(
        "logprobs", "num_equal -= tl.sum(is_equal, 0)", "num_equal -= 0", logprobs
    ),
    "log of the sum without its base": Fault(
        "logprobs", "tl.log(total) + best.to(tl.float64)", "tl.log(total)", logprobs
    ),
    "bans stay in the log-probabilities": Fault("device_sampler", "edits.undo(logits, saved)", "pass", logprobs),
}
# Near relatives of others: the default run leaves them out.
SLOW = {
    "one group too high",
    "gathered keys overwrite each other",
    "what comes before the gathered does not weigh",
    "places begin anew in each block",
    "last of equal blocks",
    "blocks weigh as at temperature 1",
    "filtered rows at temperature 1",
    "one more than top_k weighs",
    "what is dropped is taken for one token",
    "mass of the token that crosses is lost",
    "each block's equals are among the top",
    "bans stay in the log-probabilities",
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW or index % 2 else name
    for index, name in enumerate(FAULTS)
]
CHECKS = {fault.shows_in.__name__: fault.shows_in for fault in FAULTS.values()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_sampler_as_it_is_passes(check: Callable[[ModuleType], None]) -> None:
    check(sampler_module)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the package under another name, with one line changed."""
    fault = FAULTS[name]
    copied = f"faulty_sampling_{list(FAULTS).index(name)}"
    (tmp_path / copied).mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text(encoding="utf-8").replace("lamella.model_executor.sampling.device", copied)
        if path.stem == fault.file:
            assert fault.old in text
            text = text.replace(fault.old, fault.new)
        (tmp_path / copied / path.name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module(f"{copied}.device_sampler")
        with pytest.raises(AssertionError):
            fault.shows_in(module)
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == copied]:
            del sys.modules[loaded]
