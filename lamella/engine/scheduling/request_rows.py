"""The running batch as arrays: one row per request, so that a step is array arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.prompt_scores import PromptScores, plan_scores
from lamella.engine.scheduling.request import NO_ADAPTER, NO_ROW, Request
from lamella.engine.scheduling.row_rules import RowRules, SampleEdits, row_rules
from lamella.errors import RequestError
from lamella.model_executor.step_plan import SamplingBatch, ScoredTokens, TokenLogprobs


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
    sampling: Callable[..., SamplingBatch]  # takes draw_index, and the fields of SampleEdits


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
        self.adapter_ids = np.full(num_rows, NO_ADAPTER, dtype=np.int64)
        # Views of the same memory whose items are plain ints: several times faster to read one by one than an array's.
        self.num_tokens_at, self.num_computed_at = self.num_tokens.data, self.num_computed.data
        self.num_prompt_tokens_at, self.due_at = self.num_prompt_tokens.data, self.due.data
        self.clear()

    def clear(self) -> None:
        """Empty all rows, whatever state an exception left behind. The requests themselves are not touched."""
        self.requests: list[Request | None] = [None] * self._num_rows
        # Of the rows whose requests change their logits beyond min_tokens.
        self._rules: dict[int, RowRules] = {}
        self._num_reading = 0  # how many of them read tokens
        self._prompt_scores: dict[int, PromptScores] = {}  # of the rows whose prompts are scored
        # Token id -> how many rows' requests it ends. Sampled tokens are searched for these ids.
        self._end_token_counts: Counter[int] = Counter()
        self.end_token_ids = np.zeros(0, dtype=np.int64)
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self.adapter_ids[:] = NO_ADAPTER
        self._num_adapted = 0  # rows whose requests have an adapter
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
    def reads_tokens(self) -> bool:
        """Whether some draw depends on the tokens drawn before it, so that the host must know these to plan it."""
        return self._num_reading > 0

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
        rules = row_rules(request)
        self._count_end_tokens(request, +1)
        if rules is not None:
            self._rules[row] = rules
            self._num_reading += rules.reads_tokens
        if request.prompt_scores is not None and not request.prompt_scores.is_complete:
            self._prompt_scores[row] = request.prompt_scores
        self.adapter_ids[row] = request.adapter_id
        self._num_adapted += request.adapter_id != NO_ADAPTER
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
        rules = self._rules.pop(row, None)
        if rules is not None:
            self._num_reading -= rules.reads_tokens
        self._prompt_scores.pop(row, None)
        self._count_end_tokens(request, -1)
        self.adapter_ids[row] = NO_ADAPTER
        self._num_adapted -= request.adapter_id != NO_ADAPTER
        return request

    def adapter_ids_of(self, rows: np.ndarray) -> np.ndarray | None:
        """int64 [R], the adapters of `rows`; None: none of them has one."""
        if not self._num_adapted:
            return None
        ids = self.adapter_ids[rows]
        return ids if ids.any() else None

    def num_adapters_with(self, adapter_id: int) -> int:
        """How many different adapters there are in rows if a request with this one is, too."""
        return len({*self.adapter_ids.tolist(), adapter_id} - {NO_ADAPTER})

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
        arrays and empty entries: they must not be written.

        num_tokens: int64 [S], how many tokens of the row come before that draw, the first ones of `tokens[row]`; None:
        those known now."""
        sampled = self._of(rows)
        num_before = self.num_tokens[rows] if num_tokens is None else num_tokens
        draw_index = num_before - sampled.num_prompt_tokens
        banned: dict[int, tuple[int, ...]] = {}
        if sampled.has_min_tokens:
            for index in (draw_index < self.min_tokens[rows]).nonzero()[0].tolist():
                banned[index] = sampled.requests[index].banned_before_min_tokens
        if not self._rules:
            return sampled.sampling(draw_index=draw_index, banned_token_ids=banned)
        edits = SampleEdits(banned)
        for index, row in enumerate(rows.tolist()):
            rules = self._rules.get(row)
            if rules is not None:
                rules.add_to(edits, index, self.tokens[row, : num_before[index]], int(self.num_tokens[row]))
        return sampled.sampling(
            draw_index=draw_index,
            banned_token_ids=edits.banned_token_ids,
            penalties=edits.penalties,
            biases=edits.biases,
            masks=edits.masks,
            processors=edits.processors,
        )

    def scored_tokens(self, rows: np.ndarray, query_start: np.ndarray, num_computed: np.ndarray) -> ScoredTokens | None:
        """Which known tokens a step of these rows (int64 [R]) scores; None: none. The arrays are StepPlan's and, int64
        [R], how many tokens are computed before."""
        if not self._prompt_scores:
            return None
        return plan_scores(self._prompt_scores, rows, query_start, num_computed, self.tokens)

    def take_in_scores(self, scored: ScoredTokens, found: Sequence[TokenLogprobs]) -> None:
        """Keep what a step found of the tokens that it scored."""
        for row, position, one in zip(scored.rows.tolist(), scored.positions.tolist(), found, strict=True):
            scores = self._prompt_scores.get(row)
            if scores is not None:
                scores.found[position] = one
                if scores.is_complete:
                    del self._prompt_scores[row]

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
                    # Of the steps in which no row changes its logits. Making none for each is cheaper.
                    penalties={},
                    biases={},
                    masks={},
                    processors={},
                ),
            )
        return self._sampled
