"""Stop strings in a growing text, against looking for each of them everywhere."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.model_executor.text.stop_strings import Match, StopMatcher, StopStrings

LETTERS = st.text(alphabet="ab", max_size=5)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=7), min_size=1, max_size=8, unique=True)


def matches(text: str, num_old: int, stops: list[str]) -> Match | None:
    """The first of those that end in text[num_old:]."""
    found = [
        (position, order, stop)
        for order, stop in enumerate(stops)
        for position in range(len(text))
        if text.startswith(stop, position) and position + len(stop) > num_old
    ]
    return Match(min(found)[0], min(found)[2]) if found else None


def held_back(text: str, stops: list[str]) -> int:
    lengths = range(len(text), 0, -1)
    return next((n for n in lengths if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)), 0)


@settings(max_examples=400, deadline=None)
@given(STOPS, st.lists(st.tuples(LETTERS, st.booleans()), max_size=12))
def test_equals_looking_for_all_everywhere(stops, pieces):
    matcher = StopMatcher(StopStrings(stops))
    text = ""
    for piece, asks in pieces:
        assert matcher.feed(piece) == matches(text + piece, len(text), stops)
        text += piece
        if asks:
            assert matcher.num_held_back() == held_back(text, stops)
    assert matcher.num_held_back() == held_back(text, stops)


@settings(max_examples=400, deadline=None)
@given(STOPS, st.lists(st.tuples(st.sampled_from(["add", "add", "mark", "rewind", "release"]), LETTERS), max_size=20))
def test_text_that_is_taken_back_leaves_no_trace(stops, steps):
    matcher = StopMatcher(StopStrings(stops))
    text, marked = "", None
    for what, piece in steps:
        if what == "mark":
            matcher.release()
            matcher.mark()
            marked = text
        elif what == "rewind" and marked is not None:
            matcher.rewind()
            text, marked = marked, None
        elif what == "release":
            matcher.release()
            marked = None
        assert matcher.feed(piece) == matches(text + piece, len(text), stops)
        text += piece
        assert matcher.num_held_back() == held_back(text, stops)
        if marked is None:
            assert matcher.num_tentative() == held_back(text, stops)
        else:  # what was certain when the mark was made, and nothing after it
            assert matcher.num_tentative() == len(text) - len(marked) + held_back(marked, stops)


def test_old_text_is_forgotten():
    matcher = StopMatcher(StopStrings(["abc", "b" * 40]))
    for _ in range(1000):
        assert matcher.feed("xyzab") is None
        assert matcher.num_held_back() == 2
    assert len(matcher._recent) < 200
    assert len(matcher._starts) <= 2
    assert len(matcher._to_check) < 10
    assert matcher.feed("c") == Match(4998, "abc")
