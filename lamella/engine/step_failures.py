"""What follows from steps that fail: how large the next may be, which requests run alone, which are to blame.

A step that fails is undone and done again. Whether it is the same failure is judged by its *suspects*, the requests
that were in it: as long as one of them is no further than it was, a second failure is the same one.

    calm ──failure──▶ watching ──a second one──▶ probing: half of the suspects run alone, then the others
      ▲                  │                          │
      └──all got on──────┴──────none is left────────┘   a half that fails is halved; a request that fails
                                                        alone, twice, is to blame and ends

Memory that ran out is nobody's fault as long as the step can be smaller: it is halved each time, and grows again after
steps that succeed.

Each failure either makes the next step smaller, or halves the suspects, or ends a request, and whoever passes a
probation is further than it was. So there is no engine that fails for ever.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from lamella.errors import StepFailedError

# How often a request fails alone before it is to blame.
MOST_TRIES_ALONE = 2
# So many requests fail alone, one after another and with no step between that succeeds, before the fault is nobody's:
# then all that were in the step end.
MOST_ALONE_IN_A_ROW = 32
# Steps that succeed before a smaller step may be twice as large again, at first and at most.
FEWEST_GOOD_STEPS, MOST_GOOD_STEPS = 8, 512
# What native allocators say in a RuntimeError: torch's of a CPU, C++'s, cuBLAS'.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")


class Position(NamedTuple):
    """How far a sample is: tokens that are computed, of prompt and output, and tokens of its output."""

    num_computed: int
    num_output: int


ENDED = Position(-1, -1)
Positions = tuple[Position, ...]  # of each of a request's samples


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is memory that ran out, of the host or of a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def forget_frames(error: BaseException) -> None:
    """Let go of what the functions that an exception went through had in their variables, such as a failed step's
    tensors: the error may be kept for long. Where it came from can still be printed."""
    one: BaseException | None = error
    seen: list[BaseException] = []
    while one is not None and not any(one is other for other in seen):
        seen.append(one)
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__


@dataclass(frozen=True, slots=True)
class StepFailures:
    """A value: what failed, and what follows from it.

    most_tokens: of the next steps; None: as many as ever.
    watched: suspects that have got no further yet -> how far they were when the step failed.
    groups: the suspects that must still run alone, the group whose turn it is last. Empty: all run.
    guilty: requests that are to end, and with what error.
    suspects_all: a probation has found nobody, so the next has all requests as suspects.
    """

    most_tokens: int | None = None
    watched: Mapping[str, Positions] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    guilty: Mapping[str, StepFailedError] = field(default_factory=dict)
    suspects_all: bool = False
    num_in_a_row: int = 0  # failures since all suspects last got on
    num_tries_alone: int = 0  # failures of the request that runs alone, at one place
    failed_alone_at: Positions = ()  # that place: the furthest at which it has failed
    num_alone_in_a_row: int = 0  # requests that failed alone, no step having succeeded in between
    num_failed_tokens: int = 1  # of the step whose suspects run alone
    has_blamed: bool = False  # this probation has ended a request
    has_grown: bool = False  # since the steps were last made smaller they were made larger
    num_good_steps: int = 0  # since the size of steps was last changed
    num_good_wanted: int = FEWEST_GOOD_STEPS  # before it is doubled

    @property
    def only(self) -> frozenset[str] | None:
        """The requests that may run; None: all."""
        return frozenset(self.groups[-1]) if self.groups else None

    @property
    def is_watching(self) -> bool:
        """Whether suspects have still to get on."""
        return bool(self.watched)

    def after_failure(
        self, error: Exception, suspects: Mapping[str, Positions], *, num_step_tokens: int, max_num_tokens: int
    ) -> StepFailures:
        """num_step_tokens: that the failed step was to compute, as far as is known; max_num_tokens: that any step may
        compute."""
        noted = replace(self, num_in_a_row=self.num_in_a_row + 1)
        most = self.most_tokens or max_num_tokens
        if is_out_of_memory(error) and most > 1:
            # The step of a single token cannot be smaller, but the one that failed may have been larger than is known.
            smaller = min(most, num_step_tokens) // 2 if num_step_tokens > 1 else most // 8
            return noted._with_smaller_steps(smaller, watched={**self.watched, **suspects})
        if self.groups:
            return noted._after_failure_alone(error, suspects)
        if self.watched.keys().isdisjoint(suspects):
            return replace(noted, watched={**self.watched, **suspects})
        return replace(
            noted,
            watched=dict(suspects),
            groups=_halves(tuple(suspects)),
            num_tries_alone=0,
            num_failed_tokens=num_step_tokens,
            has_blamed=False,
        )

    def after_step(self, positions_of: Callable[[str], Positions | None], *, max_num_tokens: int) -> StepFailures:
        """A step succeeded, or there was none to do. positions_of: of a request; None where it has ended."""
        watched = {
            request_id: before
            for request_id, before in self.watched.items()
            if not _has_got_on(before, positions_of(request_id), needs_tokens=bool(self.groups))
        }
        groups = tuple(left for group in self.groups if (left := tuple(one for one in group if one in watched)))
        noted = replace(self, watched=watched, groups=groups, num_alone_in_a_row=0)
        if groups or (watched and not self.groups):
            return noted
        noted = replace(noted, watched={}, num_in_a_row=0)
        if self.groups and not self.has_blamed:
            return replace(noted._with_smaller_steps(self.num_failed_tokens // 2, watched={}), suspects_all=True)
        return noted._with_good_step(max_num_tokens)

    def without_guilty(self) -> StepFailures:
        """They have ended."""
        return replace(self, guilty={}) if self.guilty else self

    def _after_failure_alone(self, error: Exception, suspects: Mapping[str, Positions]) -> StepFailures:
        *others, group = self.groups
        if len(group) > 1:
            return replace(self, groups=(*others, *_halves(group)), num_tries_alone=0)
        place = suspects.get(group[0], ())
        is_elsewhere = self.num_tries_alone > 0 and _has_got_on(self.failed_alone_at, place, needs_tokens=False)
        num_tries = 1 if is_elsewhere else self.num_tries_alone + 1
        if num_tries < MOST_TRIES_ALONE:
            at = place if num_tries == 1 else self.failed_alone_at
            return replace(self, num_tries_alone=num_tries, failed_alone_at=at)
        blamed, num_alone = dict.fromkeys(group, "and when it ran alone"), self.num_alone_in_a_row + 1
        if num_alone >= MOST_ALONE_IN_A_ROW:
            reason = f"and so did those of {num_alone} requests that ran alone, one after another"
            blamed |= dict.fromkeys((one for other in others for one in other), reason)
            others = []
        guilty = {request_id: self._error(request_id, how, error) for request_id, how in blamed.items()}
        return replace(
            self,
            groups=tuple(others),
            guilty={**self.guilty, **guilty},
            watched={request_id: before for request_id, before in self.watched.items() if request_id not in guilty},
            num_tries_alone=0,
            num_alone_in_a_row=num_alone,
            has_blamed=True,
            suspects_all=False,
        )

    def _error(self, request_id: str, how: str, error: Exception) -> StepFailedError:
        failure = StepFailedError(
            f"request {request_id!r} has ended: steps with it failed, {how}, {self.num_in_a_row} times in a row, the "
            f"last time with {type(error).__name__}: {error}; other requests go on"
        )
        failure.__cause__ = error
        return failure

    def _with_smaller_steps(self, most_tokens: int, *, watched: Mapping[str, Positions]) -> StepFailures:
        wanted = min(2 * self.num_good_wanted, MOST_GOOD_STEPS) if self.has_grown else self.num_good_wanted
        return replace(
            self,
            most_tokens=max(1, most_tokens),
            watched=watched,
            has_grown=False,
            num_good_steps=0,
            num_good_wanted=wanted,
        )

    def _with_good_step(self, max_num_tokens: int) -> StepFailures:
        num_good = self.num_good_steps + 1
        if self.most_tokens is None:
            is_forgotten = num_good >= MOST_GOOD_STEPS or not self.has_grown
            return CALM if is_forgotten and not self.guilty else replace(self, num_good_steps=num_good)
        if num_good < self.num_good_wanted:
            return replace(self, num_good_steps=num_good)
        larger = 2 * self.most_tokens
        return replace(self, most_tokens=larger if larger < max_num_tokens else None, has_grown=True, num_good_steps=0)


CALM = StepFailures()


def _halves(group: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The second half and the first; of one that cannot be halved, itself."""
    middle = (len(group) + 1) // 2
    return tuple(half for half in (group[middle:], group[:middle]) if half)


def _has_got_on(before: Positions, now: Positions | None, *, needs_tokens: bool) -> bool:
    """Whether each sample is further than before, or has ended. needs_tokens: further are only those that have got a
    token: how a prompt is cut into chunks may differ when it is computed again."""
    if now is None:
        return True
    if len(before) != len(now):
        return False
    for earlier, position in zip(before, now, strict=True):
        is_further = position.num_output > earlier.num_output or (
            not needs_tokens and position.num_computed > earlier.num_computed
        )
        if position != ENDED and not is_further:
            return False
    return True
