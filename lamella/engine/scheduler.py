"""Who runs in the next step, with how many tokens: continuous batching.

    waiting ──admit──▶ running (a row) ──finish──▶ done
       ▲                  │
       └────preempt───────┘   what was computed stays in the prefix cache, so a resume is cheap

The oldest running request is never preempted for another, so there is always progress.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lamella.engine.admission import Admission, most_replay_tokens
from lamella.engine.gathered_tables import GatheredTables
from lamella.engine.preemption import choose_victim, has_pending_blocks
from lamella.engine.request import Request
from lamella.engine.request_rows import RequestRows
from lamella.engine.step_builder import build_step_plan
from lamella.engine.waiting_queue import WaitingQueue
from lamella.errors import InvariantError
from lamella.kv_cache.block_manager import HybridBlockManager
from lamella.kv_cache.counters import HitCounters
from lamella.kv_cache.prefix_tree import PrefixMatch
from lamella.kv_cache.spec import ceil_div
from lamella.model_executor.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class NewToken(NamedTuple):
    """One token that a step gave a request. The request's finish_reason says whether it was the last."""

    request: Request
    token_id: int


class NewTokens(NamedTuple):
    """All tokens of a step, as columns; `each` goes through them one by one. ended: the requests that got their
    last token."""

    requests: list[Request]
    token_ids: list[int]
    ended: list[Request]

    def each(self) -> Iterator[NewToken]:
        return map(NewToken, self.requests, self.token_ids)


class SchedulerCounters(NamedTuple):
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    hits: HitCounters


class Scheduler:
    """chunk_tokens: the largest prefill chunk that the KV memory was sized for.
    scheduling_policy: the order of the waiting queue, see WaitingQueue.
    """

    def __init__(
        self,
        manager: HybridBlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunk_tokens: int,
        scheduling_policy: str = "fcfs",
    ) -> None:
        self.manager = manager
        self.queue = WaitingQueue(manager, scheduling_policy)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_tokens = min(chunk_tokens, max_num_batched_tokens)
        manager.max_replay_tokens = min(self.chunk_tokens, most_replay_tokens(manager))
        self.rows = RequestRows(max_num_seqs, max_model_len)
        self._admission = Admission(manager, self.rows, leaves_growth=scheduling_policy == "prefix")
        self.running: list[int] = []  # rows, oldest request first
        self._tables = GatheredTables(manager)
        self._scheduled = np.zeros(0, dtype=np.int64)
        self._num_new = np.zeros(0, dtype=np.int64)
        self._one_each = np.ones(max_num_seqs, dtype=np.int64)
        self._admitted: set[int] = set()  # rows that the step in preparation admits
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generated_tokens = 0
        self._num_steps = self._num_preemptions = 0
        self._num_admitted = 0  # first admissions; resumes do not count
        self._hits = HitCounters()

    # The outside

    def add(self, request: Request) -> None:
        self.queue.add(request, self._num_steps)

    @property
    def has_requests(self) -> bool:
        return bool(self.queue or self.running)

    @property
    def scheduled_rows(self) -> np.ndarray:
        """Rows of the last planned step, int64 [num_requests], in the plan's order. Not to be written."""
        return self._scheduled

    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(
            self._num_prompt_tokens,
            self._num_cached_tokens,
            self._num_generated_tokens,
            self._num_steps,
            self._num_preemptions,
            self._hits,
        )

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request wherever it is. Its pages become cache or are freed. Not during a step."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.row >= 0:
            self._leave_row(request.row)
        else:
            self.queue.discard(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step and reserve its memory; None when nothing can run."""
        self._admitted.clear()
        num_preemptions = self._num_preemptions
        self._scheduled = decodes = self._grow_decodes()
        self._num_new = self._one_each[: len(decodes)]
        if self.queue or len(decodes) < len(self.running):
            num_new = dict.fromkeys(decodes.tolist(), 1)
            budget = min(self.max_num_batched_tokens - len(num_new), self._admission.prefill_tokens())
            budget = self._continue_prefills(num_new, budget)
            if self._num_preemptions == num_preemptions:
                self._admit(num_new, budget)
            # Memory for a later row may have come from one that was planned before.
            planned = [row for row in self.running if row in num_new]
            planned.sort(key=lambda row: num_new[row] > 1)
            self._scheduled = np.array(planned, dtype=np.int64)
            self._num_new = np.array([num_new[row] for row in planned], dtype=np.int64)
        if not len(self._scheduled):
            return None
        return build_step_plan(self.rows, self.manager, self._tables, self._scheduled, self._num_new)

    def update(self, result: StepResult) -> NewTokens:
        """Take in what the step computed: positions, finished blocks, sampled tokens, finishes."""
        rows, manager = self.rows, self.manager
        manager.end_step()
        scheduled = self._scheduled
        computed = rows.num_computed[scheduled] + self._num_new
        rows.num_computed[scheduled] = computed
        self._num_steps += 1
        ends_prompt = computed == rows.num_prompt_tokens[scheduled]
        to_commit = computed // manager.page_tokens > manager.num_settled[scheduled]
        to_commit |= ends_prompt
        events = scheduled[to_commit], computed[to_commit], ends_prompt[to_commit]
        for row, num_computed, ends in zip(*(event.tolist() for event in events), strict=True):
            manager.commit(row, rows.tokens[row], num_computed, ends_prompt=ends)
        is_chunk = self._num_new > 1
        for row, num_computed in zip(scheduled[is_chunk].tolist(), computed[is_chunk].tolist(), strict=True):
            # But for a block more, for who is preempted now may be resumed inside its last block.
            manager.slide(row, max(0, num_computed - manager.page_tokens))
        sampled = computed == rows.num_tokens[scheduled]
        # Let that go as well at the first decode.
        rows.due[scheduled[sampled & is_chunk]] = 0
        new_tokens = self._append(scheduled[sampled], result)
        for request in new_tokens.ended:
            self._leave_row(request.row)
        return new_tokens

    def roll_back(self) -> None:
        """The planned step failed: its requests go back to waiting with what earlier steps computed.

        If the step was to move pages, nobody knows which of them arrived: then all KV is forgotten, and every
        running request starts anew."""
        manager, preempted = self.manager, []
        if manager.moves:
            for row in self.running[::-1]:
                self._preempt(row, keep=False)
            manager.end_step()
            manager.reset_prefix_cache()
            return
        for row in sorted(self._scheduled.tolist(), key=self.running.index, reverse=True):
            # What it found may be what the failed step was to compute, or only half replayed.
            is_new = row in self._admitted or manager.is_replaying(row)
            if not is_new:
                self.rows.num_computed[row] = manager.roll_back(row, int(self.rows.num_computed[row]))
            preempted.append(self._preempt(row, keep=not is_new))
        manager.end_step()
        for request in preempted:
            self.queue.expect_first(request)

    # Running requests

    def _grow_decodes(self) -> np.ndarray:
        """Rows (int64, oldest first) that decode one token, with room for it; only those at a block boundary cost
        anything."""
        rows = self.rows
        running = np.array(self.running, dtype=np.int64)
        computed = rows.num_computed[running]
        decodes = rows.num_tokens[running] - computed == 1
        num_preemptions = self._num_preemptions
        due = decodes & (computed >= rows.due[running])
        for row, position in zip(running[due].tolist(), computed[due].tolist(), strict=True):
            if rows.requests[row] is None:
                continue  # preempted for one before
            has_room = self.manager.grow(row, position, 1, is_prefill=False)
            if has_room or self._grow_or_preempt(row, 1, is_prefill=False):
                rows.due[row] = self.manager.next_due(row)
        if self._num_preemptions > num_preemptions:
            decodes &= [rows.requests[row] is not None for row in running.tolist()]
        decoding: np.ndarray = running[decodes]
        return decoding

    def _continue_prefills(self, num_new: dict[int, int], budget: int) -> int:
        rows = self.rows
        for row in list(self.running):
            if rows.requests[row] is None or row in num_new or budget == 0:
                continue
            remaining = int(rows.num_tokens[row] - rows.num_computed[row])
            chunk = self._grow_or_preempt(row, min(remaining, budget, self.chunk_tokens), is_prefill=True)
            if chunk:
                self.manager.commit_ahead(row, rows.tokens[row], int(rows.num_computed[row]) + chunk)
                num_new[row] = chunk
                budget -= chunk
        return budget

    def _grow_or_preempt(self, row: int, most: int, *, is_prefill: bool) -> int:
        """Room for up to `most` tokens of `row`, taken from those that lose least by it if need be.

        Returns how many tokens there is room for; 0 when `row` itself had to leave.
        """
        computed = int(self.rows.num_computed[row])
        while True:
            chunk = most
            while chunk:
                if self.manager.grow(row, computed, chunk, is_prefill=is_prefill):
                    return chunk
                # Fewer pages may still be had: half the chunk, up to a block boundary.
                shorter = ceil_div(computed + chunk // 2, self.manager.page_tokens) * self.manager.page_tokens
                chunk = shorter - computed if shorter - computed < chunk else 0
            if self._slide_running():
                continue
            if len(self.running) == 1:
                # Alone and still no room: its pages lie scattered over slabs that other groups need.
                # From an empty arena the sizing guarantees that it fits.
                logger.info("request %s restarts in an empty arena", self.rows.request(row).request_id)
                self._preempt(row, keep=False)
                self.manager.reset_prefix_cache()
                return 0
            victim = choose_victim(self.manager, self.rows, self.running)
            victim_computed = int(self.rows.num_computed[victim])
            if has_pending_blocks(self.manager, victim, victim_computed):  # planned for this step; no more
                self.rows.num_computed[victim] = self.manager.roll_back(victim, victim_computed)
            self.queue.expect_first(self._preempt(victim))
            if victim == row:
                return 0

    def _slide_running(self) -> bool:
        """Take back window pages that lag behind by an eviction interval; whether there were any."""
        before = sum(self.manager.num_owned)
        for row in self.running:
            self.manager.slide(row, int(self.rows.num_computed[row]))
        return sum(self.manager.num_owned) < before

    def _preempt(self, row: int, *, keep: bool = True) -> Request:
        """Back to the head of the queue; what was computed stays cached (with `keep`) until evicted."""
        rows = self.rows
        self.manager.release(row, rows.tokens[row], int(rows.num_computed[row]), keep=keep)
        self.running.remove(row)
        request = rows.take(row)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.queue.add_first(request, self._num_steps)
        return request

    def _leave_row(self, row: int) -> None:
        rows = self.rows
        self.manager.release(row, rows.tokens[row], int(rows.num_computed[row]))
        self.running.remove(row)
        self._admission.note_finished(rows.take(row))

    # Admission

    def _admit(self, num_new: dict[int, int], budget: int) -> None:
        self.queue.new_round()
        while self.queue and budget and self.rows.has_free_row:
            request = self.queue.next(self._num_steps)
            match = self.manager.match(request.token_ids, request.salt)
            if self.running and not self._admission.has_room(request, match, self.running, len(self.queue)):
                if self._slide_running():
                    continue
                return
            row = self.rows.next_free_row
            most = min(len(request.token_ids) - match.num_tokens, budget, self.chunk_tokens)
            chunk = self._begin(row, request, match, most)
            if not chunk:
                if self._slide_running():
                    continue
                if not self.running:
                    self._clear_for(request, match)
                return
            self.queue.discard(request)
            self.rows.put(request, match.num_tokens)
            self.running.append(row)
            self._admitted.add(row)
            self.rows.due[row] = self.manager.next_due(row)
            self.manager.commit_ahead(row, request.token_ids, match.num_tokens + chunk)
            num_new[row] = chunk
            budget -= chunk
            self._count_admission(request, match)

    def _begin(self, row: int, request: Request, match: PrefixMatch, most: int) -> int:
        """Room in `row` for the cached prefix and up to `most` tokens more; returns how many, 0 for none."""
        if not self.manager.begin(row, match, request.salt):
            return 0
        chunk = most
        while chunk and not self.manager.grow(row, match.num_tokens, chunk, is_prefill=True):
            chunk //= 2
        if not chunk:
            self.manager.release(row, request.token_ids, match.num_tokens, keep=False)
        return chunk

    def _clear_for(self, request: Request, match: PrefixMatch) -> None:
        """Nothing runs and still the request has no room: the cached prefix that it locked is in its way."""
        if not match.num_tokens:
            raise InvariantError(
                f"request {request.request_id} of {len(request.token_ids)} tokens does not fit into an empty arena "
                f"of {self.manager.arena.num_slabs} slabs, though the start-up check said it would"
            )
        self.manager.reset_prefix_cache()

    def _count_admission(self, request: Request, match: PrefixMatch) -> None:
        if request.num_cached_tokens is None:  # a resume is no hit
            num_cached = match.num_tokens - match.num_skipped_tokens
            request.num_cached_tokens = num_cached
            request.first_scheduled_time = time.monotonic()
            request.admission_index = self._num_admitted
            self._num_admitted += 1
            self._num_prompt_tokens += request.num_prompt_tokens
            self._num_cached_tokens += num_cached
            num_partial_tokens = num_cached % self.manager.page_tokens
            self._hits = self._hits.add(
                num_full_tokens=num_cached - num_partial_tokens,
                num_partial_tokens=num_partial_tokens,
                num_replay_tokens=match.num_replayed_tokens,
                num_skipped_tokens=match.num_skipped_tokens,
            )

    # Sampled tokens

    def _append(self, sampled_rows: np.ndarray, result: StepResult) -> NewTokens:
        """Give each row (int64 [S]) its token. Python touches only requests to which more happens: a first token,
        log-probabilities, an end."""
        rows, token_ids = self.rows, result.token_ids
        num_tokens = rows.num_tokens[sampled_rows]
        rows.tokens[sampled_rows, num_tokens] = token_ids
        self._num_generated_tokens += len(sampled_rows)
        requests = rows.requests_in(sampled_rows)
        ids = token_ids.tolist()
        for index, logprobs in result.logprobs.items():
            requests[index].output_logprobs.append(logprobs)
        for index in (num_tokens == rows.num_prompt_tokens[sampled_rows]).nonzero()[0].tolist():
            requests[index].first_token_time = time.monotonic()
        num_tokens += 1
        rows.num_tokens[sampled_rows] = num_tokens
        at_limit = num_tokens >= rows.max_total_tokens[sampled_rows]
        may_end = at_limit | np.isin(token_ids, rows.end_token_ids) if len(rows.end_token_ids) else at_limit
        ended = []
        for index in may_end.nonzero()[0].tolist():
            _end_if_due(requests[index], ids[index], at_limit=bool(at_limit[index]))
            if requests[index].is_finished:
                ended.append(requests[index])
        return NewTokens(requests, ids, ended)


# A third of the time of NewToken(request, token_id), which is Python code; a step makes one for each request.
def _end_if_due(request: Request, token_id: int, *, at_limit: bool) -> None:
    if token_id in request.stop_token_ids:
        request.finish_reason, request.stop_reason = "stop", token_id
    elif token_id in request.eos_token_ids:
        request.finish_reason = "stop"
    elif at_limit:
        request.finish_reason = "length"
