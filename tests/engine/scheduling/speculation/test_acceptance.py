from __future__ import annotations

import pytest

from lamella.engine.scheduling.speculation.acceptance import NUM_CLASSES, AcceptanceRecord, class_of


def test_matches_are_counted_in_classes_of_twice_the_length():
    assert [class_of(length) for length in (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 1000)] == [
        0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5,
    ]  # fmt: skip
    assert class_of(10**9) == NUM_CLASSES - 1


def test_what_was_seen_outweighs_what_was_assumed():
    record = AcceptanceRecord(AcceptanceRecord())
    before = record.probability(0)
    for _ in range(40):
        record.note(1, is_right=True)
    assert record.probability(0) > 0.9 > before
    for _ in range(50):
        record.note(1, is_right=False)
    assert record.probability(0) < 0.2
    assert record.probability(3) == AcceptanceRecord().probability(3), "another class is not concerned"


def test_a_request_begins_with_what_others_saw_and_goes_its_own_way():
    everyone = AcceptanceRecord()
    first, second = AcceptanceRecord(everyone), AcceptanceRecord(everyone)
    for _ in range(30):
        first.note(5, is_right=False)
    assert second.probability(2) < AcceptanceRecord().probability(2)
    assert first.probability(2) < second.probability(2)
    for _ in range(20):
        second.note(5, is_right=True)
    assert second.probability(2) > 0.7
    assert first.probability(2) < 0.2


def test_the_chance_of_a_draft_is_that_of_all_before_it_too():
    record = AcceptanceRecord()
    chances = record.chances(7, 4, 0.0)
    of_four, of_eight = record.probability(2), record.probability(3)
    assert chances == pytest.approx([of_four, of_four * of_eight, of_four * of_eight**2, of_four * of_eight**3])
    assert record.chances(7, 4, of_four * of_eight**2) == chances[:3]
    assert record.chances(7, 0, 0.0) == []
