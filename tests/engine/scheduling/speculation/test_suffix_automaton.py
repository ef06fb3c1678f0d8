"""The automaton against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from lamella.engine.scheduling.speculation.suffix_automaton import SEPARATOR, Cursor, Match, SuffixAutomaton


def longest_earlier(text, within, *, is_itself):
    """The longest end of `text` that ends in `within` anywhere, or, where that is the text itself, anywhere before its
    end; and all positions behind such places."""
    for length in range(len(text) - is_itself, 0, -1):
        end = text[len(text) - length :]
        stops = range(length, len(within) + 1 - is_itself)
        places = [stop for stop in stops if within[stop - length : stop] == end]
        if places:
            return length, places
    return 0, [0]


def texts(seed):
    draw = random.Random(seed)
    alphabet = draw.choice([1, 2, 3, 8])
    base = [draw.randrange(alphabet) for _ in range(30)]
    repeated = [*base, *base[draw.randrange(20) :], *[draw.randrange(alphabet) for _ in range(8)], *base[:15]]
    return draw, draw.choice([base, repeated])


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_end_that_occurred_before_is_found_at_every_length(seed):
    draw, text = texts(seed)
    automaton, given = SuffixAutomaton(), 0
    while given < len(text):
        step = draw.randint(1, 3)
        automaton.extend(text[given : given + step])
        given = min(len(text), given + step)
        length, places = longest_earlier(text[:given], text[:given], is_itself=True)
        match = automaton.match()
        assert match.num_tokens == length
        assert match.end in places
        assert automaton.tokens == text[:given]


@pytest.mark.parametrize("seed", range(40))
def test_a_cursor_finds_the_longest_end_in_another_text_that_grows(seed):
    draw, other = texts(seed)
    _, text = texts(seed + 1000)
    automaton = SuffixAutomaton()
    cursor, given, known = Cursor(automaton), 0, 0
    while given < len(text):
        if draw.random() < 0.5:
            more = draw.randint(1, 9)
            automaton.extend(other[known : known + more])
            known = min(len(other), known + more)
        cursor.extend(text[given : given + 1])
        given += 1
        match = cursor.match()
        # What the other text has gained may continue a match, but what it lacked when a token came is not looked for
        # again: so the match may be shorter than the longest, and it must be one.
        assert text[given - match.num_tokens : given] == other[match.end - match.num_tokens : match.end]
        assert match.end <= known
    fresh = Cursor(automaton)
    fresh.extend(text)
    length, places = longest_earlier(text, other[:known], is_itself=False)
    assert fresh.match().num_tokens == length
    assert fresh.match().end in places


def test_the_latest_place_from_which_something_follows_is_taken():
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2])
    match = automaton.match()
    assert (match.num_tokens, automaton.behind(match, 3)) == (2, [9, 1, 2])


def test_a_period_goes_on():
    automaton = SuffixAutomaton()
    automaton.extend([5, 1, 2, 3, 1, 2, 3])
    assert automaton.match() == Match(3, 4)
    assert automaton.behind(automaton.match(), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_nothing_is_found_behind_what_never_occurred():
    automaton = SuffixAutomaton()
    assert automaton.match() == Match(0, 0)
    automaton.extend([1, 2, 3])
    assert automaton.match() == Match(0, 0)
    cursor = Cursor(automaton)
    cursor.extend([4])
    assert cursor.match() == Match(0, 0)


def test_no_text_goes_on_in_the_next():
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, SEPARATOR, 1, 9, SEPARATOR])
    cursor = Cursor(automaton)
    cursor.extend([1, 2])
    assert cursor.behind(cursor.match(), 5) == [3]


@pytest.mark.parametrize("kind", ["random", "one token", "repeated"])
def test_states_and_transitions_stay_linear(kind):
    """What makes it amortised constant time: at most two states and three transitions a token."""
    draw, num_tokens = random.Random(3), 3000
    text = {
        "random": [draw.randrange(4) for _ in range(num_tokens)],
        "one token": [7] * num_tokens,
        "repeated": [draw.randrange(50) for _ in range(100)] * (num_tokens // 100),
    }[kind]
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton._next) <= 2 * num_tokens
    assert sum(map(len, automaton._next)) <= 3 * num_tokens
