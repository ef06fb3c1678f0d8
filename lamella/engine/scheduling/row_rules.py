"""What one row asks of the logits of its samples: penalties, its request's TokenRules, and functions of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lamella.engine.scheduling.growing_tokens import GrowingTokens
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.token_penalties import penalised_prompt_ids, token_penalties
from lamella.model_executor.step_plan import RowProcessors, TokenBiases, TokenPenalties


@dataclass(frozen=True, slots=True)
class SampleEdits:
    """The edits of a step's samples, by their index: the fields of SamplingBatch of the same names."""

    banned_token_ids: dict[int, tuple[int, ...]]
    penalties: dict[int, TokenPenalties] = field(default_factory=dict)
    biases: dict[int, TokenBiases] = field(default_factory=dict)
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    processors: dict[int, RowProcessors] = field(default_factory=dict)


class RowRules:
    """Made when a request that asks for any gets a row; it holds nothing that its tokens do not tell, so a request that
    was preempted goes on with new ones.

    reads_tokens: whether a sample's edits depend on which tokens came before it, so that the host must know these.
    """

    def __init__(self, request: Request) -> None:
        params, rules = request.params, request.rules
        self._request = request
        self._num_prompt_tokens = request.num_prompt_tokens
        prompt_ids = request.token_ids[: request.num_prompt_tokens]
        self._penalised_prompt = penalised_prompt_ids(params, prompt_ids) if params.has_penalties else None
        self._prompt = tuple(prompt_ids.tolist()) if request.logits_functions else ()
        self._output = GrowingTokens()
        self.reads_tokens = bool(
            params.has_penalties
            or request.logits_functions
            or request.grammar is not None
            or (rules is not None and rules.reads_tokens)
        )

    def add_to(self, edits: SampleEdits, index: int, token_ids: np.ndarray, num_known: int) -> None:
        """Enter the edits of sample `index`, before which these tokens (int32 [n]) come: prompt and output. Where
        nothing reads tokens only their number counts. num_known: how many of them are known; those behind are drafts.
        """
        request = self._request
        num_prompt, rules = self._num_prompt_tokens, request.rules
        if self._penalised_prompt is not None:
            edits.penalties[index] = token_penalties(request.params, self._penalised_prompt, token_ids[num_prompt:])
        if request.logits_functions:
            output = self._output.view(token_ids[num_prompt:], num_known - num_prompt)
            edits.processors[index] = RowProcessors(request.logits_functions, self._prompt, output)
        if request.grammar is not None:
            edits.masks[index] = request.grammar.mask(token_ids[num_prompt:])
        if rules is None:
            return
        banned = rules.banned_next(token_ids, num_prompt)
        if banned:
            edits.banned_token_ids[index] = (*edits.banned_token_ids.get(index, ()), *banned)
        if rules.biases is not None:
            edits.biases[index] = rules.biases
        if rules.allowed is not None:
            mask = edits.masks.get(index)
            edits.masks[index] = rules.allowed if mask is None else rules.allowed & mask


def row_rules(request: Request) -> RowRules | None:
    """None: the request asks for nothing of the kind."""
    asks = request.rules is not None or request.grammar is not None or request.logits_functions
    return RowRules(request) if asks or request.params.has_penalties else None
