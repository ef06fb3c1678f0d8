"""What a step's samples mean for the requests that get them."""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.model_executor.step_plan import StepResult

logger = logging.getLogger(__name__)


class NewToken(NamedTuple):
    """One token that a step gave a request. is_last: the step gave it no more. Then the request's finish_reason says
    whether it was its last one."""

    request: Request
    token_id: int
    is_last: bool = True


class NewTokens(NamedTuple):
    """All tokens of a step, as columns, those of a request in their order; `each` goes through them one by one. ended:
    the requests that got their last token. failed: those that got none, or no more, and ended with an error."""

    requests: list[Request]
    token_ids: list[int]
    ended: list[Request]
    failed: list[Request]

    def each(self) -> Iterator[NewToken]:
        behind = itertools.islice(self.requests, 1, None)
        is_last = map(operator.is_not, self.requests, itertools.chain(behind, [None]))
        return map(NewToken, self.requests, self.token_ids, is_last)


def append_tokens(
    rows: RequestRows, sampled_rows: np.ndarray, result: StepResult, offsets: np.ndarray | None = None
) -> NewTokens:
    """Give each row (int64 [S]) its token. Only requests to which more happens are handled one by one: a first token,
    log-probabilities, an end. Requests for which no token could be chosen end with an error.

    offsets: int64 [S], how many tokens before this one the step gives its row, which follow each other. None: it gives
    each row one. No token comes behind one that ends its request."""
    failed = []
    if result.unusable:
        failed = [_fail(rows, int(sampled_rows[index]), problem) for index, problem in result.unusable.items()]
        usable = np.delete(np.arange(len(sampled_rows)), list(result.unusable))
        sampled_rows, result = sampled_rows[usable], result.part(usable)
        offsets = None if offsets is None else offsets[usable]
    token_ids = result.token_ids
    num_tokens = rows.num_tokens[sampled_rows]
    if offsets is not None:
        num_tokens += offsets
    rows.tokens[sampled_rows, num_tokens] = token_ids
    requests = rows.requests_in(sampled_rows)
    ids = token_ids.tolist()
    for index, logprobs in result.logprobs.items():
        requests[index].output_logprobs.append(logprobs)
    for index in (num_tokens == rows.num_prompt_tokens[sampled_rows]).nonzero()[0].tolist():
        requests[index].first_token_time = time.monotonic()
    num_tokens += 1
    rows.num_tokens[sampled_rows] = num_tokens  # of several in a row the last one counts
    at_limit = num_tokens >= rows.max_total_tokens[sampled_rows]
    may_end = at_limit | np.isin(token_ids, rows.end_token_ids) if len(rows.end_token_ids) else at_limit
    ended = []
    for index in may_end.nonzero()[0].tolist():
        _end_if_due(requests[index], ids[index], at_limit=bool(at_limit[index]))
        if requests[index].is_finished:
            ended.append(requests[index])
    return NewTokens(requests, ids, ended, failed)


def _fail(rows: RequestRows, row: int, problem: str) -> Request:
    request = rows.request(row)
    if request.grammar is not None and request.grammar.problem is not None:
        problem = request.grammar.problem
    logger.warning("request %s ends with an error: %s", request.request_id, problem)
    request.finish_reason, request.stop_reason = "error", problem
    return request


def _end_if_due(request: Request, token_id: int, *, at_limit: bool) -> None:
    if token_id in request.stop_token_ids:
        request.finish_reason, request.stop_reason = "stop", token_id
    elif token_id in request.eos_token_ids:
        request.finish_reason = "stop"
    elif at_limit:
        request.finish_reason = "length"
