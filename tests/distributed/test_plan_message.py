"""Plans come out of messages as they went in, and a message keeps nothing of the planner's arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lamella.distributed.plan_message import decode_plan, encode_plan
from lamella.errors import InvariantError
from lamella.kv_cache.page_transfers import PageCopies, PageMoves
from lamella.kv_cache.step_memory import GroupPlan, TableVersions
from lamella.model_executor.step_plan import SamplingBatch, ScoredTokens, StepPlan

NUM_REQUESTS, NUM_GROUPS = 3, 2


def drawn_plan(seed: int, **fields: Any) -> StepPlan:
    generator = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return generator.integers(-1, 2**40, size=shape)

    num_new = generator.integers(1, 6, size=NUM_REQUESTS)
    num_tokens = int(num_new.sum())
    groups = tuple(
        GroupPlan(
            numbers(NUM_REQUESTS, 4 + group),
            numbers(NUM_REQUESTS),
            numbers(NUM_REQUESTS),
            numbers(num_tokens),
            PageCopies(numbers(group), numbers(group)),  # of the first group none
        )
        for group in range(NUM_GROUPS)
    )
    sampling = SamplingBatch(*[np.zeros(1)] * 7, banned_token_ids={0: (3,)})
    return StepPlan(
        token_ids=numbers(num_tokens),
        positions=numbers(num_tokens),
        query_start=np.cumsum([0, *num_new]),
        seq_lens=numbers(NUM_REQUESTS),
        num_decodes=1,
        moves=(PageMoves(1, numbers(2), numbers(2)), PageMoves(0, numbers(1), numbers(1))),
        groups=groups,
        first_step_slot=77,
        num_sampled=np.array([1, 0, 1]),
        sampling=sampling,
        **fields,
    )


def arrays_of(value: Any, place: str = "plan") -> dict[str, Any]:
    """Every number and array of a plan by its place, without how tokens are sampled."""
    if dataclasses.is_dataclass(value):
        found: dict[str, Any] = {}
        for one in dataclasses.fields(value):
            if one.name not in ("sampling", "token_sources"):
                found |= arrays_of(getattr(value, one.name), f"{place}.{one.name}")
        return found
    if isinstance(value, tuple):
        return {
            key: each for index, one in enumerate(value) for key, each in arrays_of(one, f"{place}[{index}]").items()
        }
    return {place: value}


FIELDS = {
    "bare": {},
    "long texts": {"is_long_text": np.array([True, False, True])},
    "table versions": {"tables": TableVersions(np.arange(3), np.arange(6).reshape(2, 3))},
    "samples of the step before": {"token_sources": np.array([0, -1])},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_plan_comes_back_and_nothing_is_shared(name: str) -> None:
    plan = drawn_plan(len(name), **FIELDS[name])
    known = plan.token_ids + 5
    expected = {place: np.copy(value) for place, value in arrays_of(plan).items() if value is not None}
    expected["plan.token_ids"] = known.copy()
    message = encode_plan(plan, known)
    for value in arrays_of(plan).values():  # as the planner does, two steps later
        if isinstance(value, np.ndarray):
            value.fill(1)
    known.fill(1)
    found = {place: value for place, value in arrays_of(decode_plan(message)).items() if value is not None}
    assert found.keys() == expected.keys()
    for place, value in found.items():
        assert np.array_equal(value, expected[place]), place
        assert np.asarray(value).dtype == expected[place].dtype, place


def test_which_tokens_are_scored_and_sampled_comes_with_it() -> None:
    """Layers compute the tokens that something is wanted of."""
    scored = ScoredTokens(*[np.array([0, 2])] * 5)
    plan = drawn_plan(3, scored=scored)
    found = decode_plan(encode_plan(plan, plan.token_ids))
    assert found.output_tokens.tolist() == plan.output_tokens.tolist() != plan.sampled_tokens.tolist()


def test_adapters_and_cut_messages_are_told() -> None:
    plan = drawn_plan(4, adapter_ids=np.array([0, 1, 0]))
    with pytest.raises(InvariantError, match="has adapters"):
        encode_plan(plan, plan.token_ids)
    plan = drawn_plan(4)
    message = encode_plan(plan, plan.token_ids)
    with pytest.raises((InvariantError, ValueError)):
        decode_plan(message[:-8])
    with pytest.raises(InvariantError, match="says that it has"):
        decode_plan(message + bytes(8))
