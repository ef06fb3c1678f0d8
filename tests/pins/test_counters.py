"""Every decision of scheduler and cache shows in a counter sooner or later: none has changed."""

from __future__ import annotations

import pytest

from tests.pins import counters, stored


@pytest.mark.parametrize(("trace", "layout", "policy"), counters.CASES)
def test_counters_are_the_pinned_ones(trace: str, layout: str, policy: str) -> None:
    name = counters.case_name(trace, layout, policy)
    stored.require_equal(
        "counters", {name: stored.load("counters")[name]}, {name: counters.count(trace, layout, policy)}
    )


def test_the_file_has_these_cases_and_they_differ() -> None:
    pinned = stored.load("counters")
    assert list(pinned) == [counters.case_name(*case) for case in counters.CASES]
    assert len({str(values["scheduler"]) for values in pinned.values()}) == len(pinned) == 12
    for part, name in (
        ("scheduler", "num_preemptions"), ("scheduler", "num_cached_tokens"), ("cache", "num_slab_moves"),
        ("cache", "num_evicted_resume_points"), ("cache", "num_evicted_spare_pages"), ("cache", "num_tombstones"),
        ("cache", "num_dead_full_pages"),
    ):  # fmt: skip
        assert any(values[part][name] for values in pinned.values()), f"no case has any {name}"


def test_a_difference_names_the_counter_and_both_values() -> None:
    found = stored.load("counters")
    name = next(iter(found))
    found[name]["scheduler"]["num_steps"] += 1
    del found[name]["cache"]["num_tombstones"]
    with pytest.raises(AssertionError) as caught:
        stored.require_equal("counters", stored.load("counters"), found)
    pinned = stored.load("counters")[name]
    steps = pinned["scheduler"]["num_steps"]
    assert f"{name} / scheduler / num_steps: pinned {steps}, now {steps + 1}" in str(caught.value)
    tombstones = pinned["cache"]["num_tombstones"]
    assert f"{name} / cache / num_tombstones: pinned {tombstones}, now nothing" in str(caught.value)
    assert "2 of" in str(caught.value)
    assert "python -m tests.pins.make counters" in str(caught.value)
