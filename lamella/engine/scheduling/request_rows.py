"""The running batch as arrays: one row per request, so that a step is array arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request import NO_ROW, Request
from lamella.engine.scheduling.token_penalties import penalised_prompt_ids, token_penalties
from lamella.errors import RequestError
from lamella.model_executor.step_plan import SamplingBatch


class RunningTokens(NamedTuple):
    """Totals of the requests that run now. num_in: prompt tokens that are computed or were cached. num_out: generated
    tokens."""

    num_in: int
    num_out: int


class _SampledRows(NamedTuple):
    key: bytes  # the array of rows, as bytes
    requests: list[Request]
    num_prompt_tokens: np.ndarray  # int64 [S]
    has_min_tokens: bool
    sampling: Callable[..., SamplingBatch]  # takes draw_index, banned_token_ids and penalties


_SETTINGS = {
    "temperature": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "min_tokens": np.int64,
    "logprobs": np.int64,
    "presence_penalty": np.float64,
    "frequency_penalty": np.float64,
    "repetition_penalty": np.float64,
}


def require_fitting(request: Request) -> None:
    """Raise RequestError where a value of the request does not fit into a row's arrays. So it is refused before
    anything has changed, and does not fail a step that other requests are in."""
    values = {name: getattr(request.params, name) for name in _SETTINGS}
    values["logprobs"] = -1 if values["logprobs"] is None else values["logprobs"]
    numbers = [(name, value, _SETTINGS[name]) for name, value in values.items()]
    numbers += [("seed", request.seed, np.uint64), ("max_tokens", request.max_total_tokens, np.int64)]
    numbers += [("stop_token_ids", one, np.int64) for one in request.eos_token_ids | request.stop_token_ids]
    for name, value, dtype in numbers:
        try:
            np.array([value], dtype=dtype)
        except (OverflowError, TypeError, ValueError) as error:
            kind = "64-bit number" if dtype is np.float64 else "64-bit integer"
            raise RequestError(f"{name} is a value that fits no {kind} ({error}); give a smaller one") from error


class RequestRows:
    """Token ids, positions and sampling settings of up to `num_rows` running requests.

    num_tokens: tokens known (prompt and sampled); num_computed: tokens whose KV is in the cache;
    due: the position at which the block manager must be asked for room.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self._num_rows = num_rows
        self.tokens = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.max_total_tokens = np.zeros(num_rows, dtype=np.int64)
        self.due = np.zeros(num_rows, dtype=np.int64)
        self.temperature = np.zeros(num_rows)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows)
        self.min_p = np.zeros(num_rows)
        self.seeds = np.zeros(num_rows, dtype=np.uint64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)
        # Views of the same memory whose items are plain ints: several times faster to read one by one than an array's.
        self.num_tokens_at, self.num_computed_at = self.num_tokens.data, self.num_computed.data
        self.num_prompt_tokens_at, self.due_at = self.num_prompt_tokens.data, self.due.data
        self.clear()

    def clear(self) -> None:
        """Empty all rows, whatever state an exception left behind. The requests themselves are not touched."""
        self.requests: list[Request | None] = [None] * self._num_rows
        # Row -> the tokens of its prompt that penalties apply to, for rows whose requests have penalties.
        self._penalised_prompts: dict[int, np.ndarray] = {}
        # Token id -> how many rows' requests it ends. Sampled tokens are searched for these ids.
        self._end_token_counts: Counter[int] = Counter()
        self.end_token_ids = np.zeros(0, dtype=np.int64)
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        # What the last step used and what depends only on which requests are in which rows; None once one came or went.
        self._sampled: _SampledRows | None = None

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def next_free_row(self) -> int:
        return self._free_rows[-1]

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def running_tokens(self) -> RunningTokens:
        rows = [row for row, request in enumerate(self.requests) if request is not None]
        num_prompt = self.num_prompt_tokens[rows]
        num_in = np.minimum(self.num_computed[rows], num_prompt).sum()
        return RunningTokens(int(num_in), int((self.num_tokens[rows] - num_prompt).sum()))

    @property
    def has_penalties(self) -> bool:
        """Whether some draw depends on the tokens drawn before it, so that the host must know these to plan it."""
        return bool(self._penalised_prompts)

    def put(self, request: Request, num_computed: int) -> int:
        """Move a request into a free row and return the row; its tokens live there until `take`. If its settings do not
        fit (see `require_fitting`), this raises before any row has changed hands."""
        row, params = self.next_free_row, request.params
        self.tokens[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_computed[row] = num_computed
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.max_total_tokens[row] = request.max_total_tokens
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = request.seed
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        penalised = None
        if params.has_penalties:
            penalised = penalised_prompt_ids(params, request.token_ids[: request.num_prompt_tokens])
        self._count_end_tokens(request, +1)
        if penalised is not None:
            self._penalised_prompts[row] = penalised
        self._sampled = None
        self._free_rows.pop()
        self.requests[row] = request
        request.row = row
        return row

    def take(self, row: int) -> Request:
        """Move a request out of its row, with its tokens."""
        request = self.request(row)
        request.token_ids = self.tokens[row, : self.num_tokens[row]].copy()
        request.row = NO_ROW
        self.requests[row] = None
        self._sampled = None
        self._free_rows.append(row)
        self._penalised_prompts.pop(row, None)
        self._count_end_tokens(request, -1)
        return request

    def _count_end_tokens(self, request: Request, change: int) -> None:
        num_known = len(self._end_token_counts)
        for token_id in request.eos_token_ids | request.stop_token_ids:
            self._end_token_counts[token_id] += change
            if not self._end_token_counts[token_id]:
                del self._end_token_counts[token_id]
        if len(self._end_token_counts) != num_known:
            self.end_token_ids = np.array(list(self._end_token_counts), dtype=np.int64)

    def requests_in(self, rows: np.ndarray) -> list[Request]:
        """The requests in `rows` (int64 [S], none empty). The list is shared: not to be changed."""
        return self._of(rows).requests

    def sampling_batch(self, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> SamplingBatch:
        """How to sample a token for each of `rows` (int64 [S], those of a row next to each other). Steps share its
        arrays: they must not be written.

        num_tokens: int64 [S], how many tokens of the row come before that draw, the first ones of `tokens[row]`; None:
        those known now."""
        sampled = self._of(rows)
        num_before = self.num_tokens[rows] if num_tokens is None else num_tokens
        draw_index = num_before - sampled.num_prompt_tokens
        banned = {}
        if sampled.has_min_tokens:
            for index in (draw_index < self.min_tokens[rows]).nonzero()[0].tolist():
                banned[index] = sampled.requests[index].banned_before_min_tokens
        penalties = {}
        if self._penalised_prompts:
            for index, (row, request) in enumerate(zip(rows.tolist(), sampled.requests, strict=True)):
                prompt_ids = self._penalised_prompts.get(row)
                if prompt_ids is not None:
                    output_ids = self.tokens[row, request.num_prompt_tokens : num_before[index]]
                    penalties[index] = token_penalties(request.params, prompt_ids, output_ids)
        return sampled.sampling(draw_index=draw_index, banned_token_ids=banned, penalties=penalties)

    def _of(self, rows: np.ndarray) -> _SampledRows:
        key = rows.tobytes()
        if self._sampled is None or self._sampled.key != key:
            self._sampled = _SampledRows(
                key=key,
                requests=[self.request(row) for row in rows.tolist()],
                num_prompt_tokens=self.num_prompt_tokens[rows],
                has_min_tokens=bool(self.min_tokens[rows].any()),
                sampling=partial(
                    SamplingBatch,
                    temperature=self.temperature[rows],
                    top_k=self.top_k[rows],
                    top_p=self.top_p[rows],
                    min_p=self.min_p[rows],
                    seeds=self.seeds[rows],
                    num_logprobs=self.num_logprobs[rows],
                ),
            )
        return self._sampled
