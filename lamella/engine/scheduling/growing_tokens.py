"""A sample's tokens for functions of the caller's: looked at as they are, without a copy of all of them each step.

kept for the sample    t0 t1 t2 t3 t4 ...       only ever appended to
given to a function    └─ the first n ─┘ + the drafts that it is asked behind, if any
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, overload

import numpy as np


class TokenIds(Sequence[int]):
    """The first `num_kept` of `kept`, to which tokens may only be appended, and `drafts` behind them. Like a tuple of
    ints: read alone, equal to tuples and lists of the same numbers, hashable, and its slices and sums are tuples. It
    stays what it is while the sample goes on."""

    __slots__ = ("_drafts", "_kept", "_num_kept")

    def __init__(self, kept: list[int], num_kept: int, drafts: tuple[int, ...] = ()) -> None:
        self._kept, self._num_kept, self._drafts = kept, num_kept, drafts

    def __len__(self) -> int:
        return self._num_kept + len(self._drafts)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step > 0 and stop <= self._num_kept:
                return tuple(self._kept[start:stop:step])
            return tuple(self)[place]
        place = range(len(self))[place]
        return self._kept[place] if place < self._num_kept else self._drafts[place - self._num_kept]

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._kept, self._num_kept), self._drafts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (TokenIds, tuple, list)):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[tuple[int, ...]], tuple[tuple[int, ...]]]:
        return tuple, (tuple(self),)


class GrowingTokens:
    """The tokens of one sample's output so far. What a function was given, it may keep: nothing in it changes."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    def view(self, token_ids: np.ndarray, num_known: int) -> TokenIds:
        """token_ids: int32 [n]. num_known: how many of them stay what they are; those behind are drafts. Takes as long
        as there are tokens since the last call."""
        num_known = min(num_known, len(token_ids))
        self._kept.extend(token_ids[len(self._kept) : num_known].tolist())
        return TokenIds(self._kept, num_known, tuple(token_ids[num_known:].tolist()))
