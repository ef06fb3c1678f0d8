"""Types and ranges of what callers give: refusals name the argument, the value and what would do."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.errors import LamellaError

# Counts of tokens and the like are kept as int32 or int64 further down. No model has any use for larger ones.
MOST_TOKENS = 2**31 - 1
MOST_DRAFT_TOKENS = 256  # of one request in one step
MOST_SEED = 2**64 - 1
_MOST_SHOWN = 120


def shown(value: object) -> str:
    """The value as an error writes it: never longer than a line or two, whatever it is."""
    try:
        text = repr(value)
    # Python refuses to write integers of more than 4,300 digits, and a type's repr may raise anything.
    except Exception:
        if isinstance(value, int):
            return f"<an integer of {value.bit_length()} bits>"
        return f"<a {type(value).__name__} that cannot be written>"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 30]}...{text[-20:]}"


@dataclass(frozen=True, slots=True)
class WholeRange:
    """The whole numbers from least to most. means: what to give, where the two numbers alone do not say it."""

    least: int
    most: int
    means: str = ""

    def check(self, name: str, value: Any, error: type[LamellaError]) -> int:
        """The value as an int (numpy's integers too; truth values are no numbers), or `error`."""
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
            raise error(f"{name}={shown(value)} is a {type(value).__name__}; give an integer: {self}")
        whole = int(value)
        if not self.least <= whole <= self.most:
            raise error(f"{name}={shown(whole)} is out of range; give {self}")
        return whole

    def __str__(self) -> str:
        return self.means or f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class RealRange:
    """The numbers from least to most. leaves_out_least: least itself is refused."""

    least: float
    most: float
    means: str = ""
    leaves_out_least: bool = False

    def check(self, name: str, value: Any, error: type[LamellaError]) -> float:
        """The value as a float, or `error`: also for not-a-number and for what no float can hold."""
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
            raise error(f"{name}={shown(value)} is a {type(value).__name__}; give a number: {self}")
        try:
            real = float(value)
        except OverflowError:
            real = math.inf
        is_above = self.least < real if self.leaves_out_least else self.least <= real
        if not (is_above and real <= self.most):
            raise error(f"{name}={shown(value)} is out of range; give {self}")
        return real

    def __str__(self) -> str:
        return (
            self.means
            or f"{'more than' if self.leaves_out_least else 'at least'} {self.least:g}, at most {self.most:g}"
        )


FRACTION = RealRange(0.0, 1.0, "a fraction, which must lie in (0, 1]", leaves_out_least=True)


def truth_value(name: str, value: Any, error: type[LamellaError]) -> bool:
    """True or False (numpy's too): a string such as "no" is true to Python, and so is refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(f"{name}={shown(value)} is not a truth value; give True or False")
    return bool(value)


def path_text(name: str, value: Any, error: type[LamellaError]) -> str:
    """A path as a string: given as one, or as a pathlib.Path."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise error(f"{name}={shown(value)} is a {type(value).__name__}; give a path, as a string or a pathlib.Path")
    if not text or "\0" in text:
        raise error(f"{name}={shown(text)} can be no path; give one that is not empty and holds no null character")
    return text


def nearest_name(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'max_tokens'?`, or nothing where no known name is like the given one."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
