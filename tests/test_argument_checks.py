"""Types and ranges of arguments, and how errors write what was given."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lamella.argument_checks import FRACTION, RealRange, WholeRange, nearest_name, path_text, shown, truth_value
from lamella.errors import ConfigError

HUGE = 10**5000  # more digits than Python writes
ABOVE, BELOW = pytest.param(HUGE, id="above"), pytest.param(-HUGE, id="below")


class Unwritable:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_whole_numbers_become_ints(value):
    checked = WholeRange(1, 3).check("count", value, ConfigError)
    assert (checked, type(checked)) == (3, int)


@pytest.mark.parametrize(
    "value", [0, 4, -(2**63), 2**64, ABOVE, BELOW, 2.0, "2", None, True, np.True_, float("nan"), [2], np.array([1, 2])]
)
def test_other_whole_numbers_are_refused_by_name_value_and_range(value):
    with pytest.raises(ConfigError, match=r"^count=.*a whole number from 1 to 3$") as refusal:
        WholeRange(1, 3).check("count", value, ConfigError)
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2)])
def test_numbers_become_floats(value):
    checked = FRACTION.check("share", value, ConfigError)
    assert (checked, type(checked)) == (0.5, float)


@pytest.mark.parametrize(
    "value", [0, -1e-9, 1.01, 10**400, -(10**400), ABOVE, float("nan"), float("inf"), "0.5", None, True, np.True_, 1j]
)
def test_other_numbers_are_refused_by_name_value_and_range(value):
    with pytest.raises(ConfigError, match=r"^share=.*\(0, 1\]$") as refusal:
        FRACTION.check("share", value, ConfigError)
    assert len(str(refusal.value)) < 250


def test_ranges_say_themselves():
    assert str(RealRange(0.5, 2.0)) == "at least 0.5, at most 2"
    assert str(RealRange(0.0, 2.0, leaves_out_least=True)) == "more than 0, at most 2"
    assert RealRange(0.5, 2.0).check("x", 0.5, ConfigError) == 0.5


def test_truth_values():
    assert [truth_value("flag", value, ConfigError) for value in (True, np.False_)] == [True, False]
    assert type(truth_value("flag", np.True_, ConfigError)) is bool
    for value in ("no", 0, 1, None, [], np.array([True])):
        with pytest.raises(ConfigError, match=r"^flag=.*give True or False"):
            truth_value("flag", value, ConfigError)


def test_paths():
    assert [path_text("folder", value, ConfigError) for value in ("a/b", Path("a/b"))] == ["a/b", "a/b"]
    for value in ("", "a\0b", b"a", 3, None, ["a"], True):
        with pytest.raises(ConfigError, match=r"^folder="):
            path_text("folder", value, ConfigError)


def test_values_are_written_short_and_never_fail():
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown(HUGE) == f"<an integer of {HUGE.bit_length()} bits>"
    assert shown([HUGE]) == "<a list that cannot be written>"
    assert shown(Unwritable()) == "<a Unwritable that cannot be written>"
    long = shown("x" * 10_000 + "end")
    assert len(long) < 130
    assert long.endswith("end'")


def test_the_nearest_name_is_suggested():
    assert nearest_name("max_token", ["min_tokens", "max_tokens"]) == "; did you mean 'max_tokens'?"
    assert nearest_name("zzz", ["min_tokens", "max_tokens"]) == ""
