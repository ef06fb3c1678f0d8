from __future__ import annotations

from lamella.engine.scheduling.speculation.shared_outputs import SharedOutputs
from lamella.engine.scheduling.speculation.suffix_automaton import SEPARATOR


def test_each_salt_has_its_own():
    shared = SharedOutputs(10)
    shared.add("a", [1, 2, 3])
    shared.add(None, [4, 5])
    assert shared.of("a").tokens == [1, 2, 3, SEPARATOR]
    assert shared.of(None).tokens == [4, 5, SEPARATOR]
    assert shared.of("b").tokens == []


def test_nothing_is_shared_unless_asked_for():
    shared = SharedOutputs(0)
    shared.add("a", [1, 2, 3])
    assert shared.of("a") is None


def test_memory_is_bounded_and_who_drafts_keeps_its_text():
    shared = SharedOutputs(2, most_tokens=12)
    shared.add("a", [1, 2])
    kept = shared.of("a")
    shared.add("a", [3])
    shared.add("a", [4])  # the third begins anew
    assert shared.of("a").tokens == [4, SEPARATOR]
    assert kept.tokens == [1, 2, SEPARATOR, 3, SEPARATOR]
    shared.add("b", [5] * 6)
    shared.of("a")
    shared.add("c", [6, 6])  # 2 + 7 + 3 tokens fit
    shared.add("c", [7])  # 2 more do not: "b" was used longest ago
    assert shared.of("b").tokens == []
    assert shared.of("a").tokens == [4, SEPARATOR]
    shared.add("c", [8] * 12)  # longer than all that may be kept
    assert shared.of("c").tokens == [6, 6, SEPARATOR, 7, SEPARATOR]
