"""The part of a request's sampling parameters that scheduling reads; all of them are in `lamella.SamplingParams`."""

from __future__ import annotations

from typing import Protocol


class SamplingSettings(Protocol):
    """Settings of one request, checked by whoever made them. They do not change."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def min_p(self) -> float: ...

    @property
    def min_tokens(self) -> int: ...

    @property
    def logprobs(self) -> int | None: ...

    @property
    def presence_penalty(self) -> float: ...

    @property
    def frequency_penalty(self) -> float: ...

    @property
    def repetition_penalty(self) -> float: ...

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        ...
