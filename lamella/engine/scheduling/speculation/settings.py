"""How drafts are made. Checked by `engine/speculative_config.py`, which makes this from what a caller gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """num_draft_tokens: the most drafts of a request in a step. At least 1.
    least_match_tokens: no draft is made from a match of fewer tokens.
    drafts_per_match_token: a match of m tokens gives at most so many times m drafts; None: no such limit.
    least_probability: a draft is not made where it and all before it are less likely to be accepted.
    num_shared_outputs: how many finished outputs later requests of the same salt draft from; 0: none.
    """

    num_draft_tokens: int
    least_match_tokens: int = 1
    drafts_per_match_token: float | None = 1.0
    least_probability: float = 0.1
    num_shared_outputs: int = 0
