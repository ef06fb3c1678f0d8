"""Who runs in the next step, with how many tokens: continuous batching.

    waiting ──admit──▶ running (a row) ──finish──▶ done
       ▲                  │
       └────preempt───────┘   what was computed stays in the prefix cache, so a resume is cheap

The oldest running request is never preempted for another, so there is always progress.

A row that decodes may compute drafts behind its last token, guesses at what comes next: the step verifies them
(`verification`), and the row gets all that were right. They take room that is left when everything else is planned, and
nobody is preempted for them (docs/speculation.md).

A step can be planned *ahead*, while the one before it runs. Such a plan takes only memory that is free or cached. Where
that is not enough, because pages must be moved, copied or taken from a request, or tokens replayed, planning waits
until no step is in flight (docs/async_scheduling.md).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable

import numpy as np

from lamella.engine.scheduling.admission import Admission
from lamella.engine.scheduling.long_texts import LongTexts
from lamella.engine.scheduling.new_tokens import NewTokens, append_tokens
from lamella.engine.scheduling.planned_steps import PlannedStep, Reached
from lamella.engine.scheduling.preemption import choose_victim
from lamella.engine.scheduling.request import NO_ADAPTER, NO_ROW, Request
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.scheduler_counters import AdmissionCounters, DraftCounters, SchedulerCounters
from lamella.engine.scheduling.speculation.drafter import Drafter
from lamella.engine.scheduling.step_builder import build_step_plan
from lamella.engine.scheduling.verification import verify
from lamella.engine.scheduling.waiting_queue import WaitingQueue
from lamella.errors import InvariantError
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from lamella.kv_cache.spec import ceil_div
from lamella.model_executor.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class Scheduler:
    """chunk_tokens: the largest prefill chunk that the KV memory was sized for.
    scheduling_policy: the order of the waiting queue, see WaitingQueue. short_text_tokens: see LongTexts. max_loras:
    most different adapters among running requests; None: as many as they have.
    drafter: what guesses tokens; None: there is no speculation. With one, no step is planned ahead.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunk_tokens: int,
        scheduling_policy: str = "fcfs",
        short_text_tokens: int | None = None,
        max_loras: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_tokens = min(chunk_tokens, max_num_batched_tokens)
        manager.limit_replays(self.chunk_tokens)
        self.rows = RequestRows(max_num_seqs, max_model_len)
        self._admission = Admission(manager, self.rows, leaves_growth=scheduling_policy == "prefix")
        self._scheduling_policy = scheduling_policy
        self._long_texts = LongTexts(short_text_tokens)
        self._max_loras = max_loras
        self._most_tokens = max_num_batched_tokens  # of the next steps
        self._only: Collection[str] | None = None  # ids of the requests that may run; None: all
        self._one_each = np.ones(max_num_seqs, dtype=np.int64)
        self.drafter = drafter
        self._drafts = DraftCounters.none(drafter.settings.num_draft_tokens if drafter is not None else 0)
        self._num_generated_tokens = self._num_steps = self._num_preemptions = 0
        self._admissions = AdmissionCounters()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self.queue = WaitingQueue(self.manager, self._scheduling_policy)
        self.running: list[int] = []  # rows, oldest request first
        self._aside: dict[Request, None] = {}  # requests that may not run now
        self._considered: Request | None = None  # the last that was to be admitted
        self._running_array: np.ndarray | None = None  # `running` as int64; None once a row came or went
        self._scheduled = np.zeros(0, dtype=np.int64)
        self._num_new = np.zeros(0, dtype=np.int64)
        self._admitted: set[int] = set()  # rows that the step in preparation admits
        self._planned: deque[PlannedStep] = deque()  # planned and not processed yet, oldest first; at most two
        self._leaving: list[int] = []  # rows whose requests have ended while a planned step still computes them
        self._must_wait = False  # the next plan cannot be made before the planned steps are processed
        self._starts_anew: Request | None = None  # what it finds is pinned and was in its way: it starts without
        self._restarted: Request | None = None  # the request that had to start anew, alone in an empty arena
        self._planned_time = 0.0  # when the last step began to be planned
        if self.drafter is not None:
            self.drafter.clear()

    # What the engine calls

    def add(self, request: Request) -> None:
        self._long_texts.mark(request)
        if self._only is not None and request.request_id not in self._only:
            self._aside[request] = None
        else:
            self.queue.add(request, self._num_steps)

    def limit(self, most_tokens: int | None) -> None:
        """From now on a step computes at most so many tokens; None: max_num_batched_tokens. Where it cannot take all
        rows that decode, the youngest wait."""
        limit = self.max_num_batched_tokens
        self._most_tokens = limit if most_tokens is None else min(most_tokens, limit)

    def run_only(self, request_ids: Collection[str] | None) -> None:
        """From now on run these requests alone, and keep all others aside, preempted where they run; None: run all
        again. No step may be planned. If this call is interrupted, `restart` must come next."""
        if request_ids == self._only:
            return
        assert not self._planned, "steps are planned: update with their results, or roll them back"
        self._only = request_ids
        for row in self.running[::-1]:
            if not self._may_run(self.rows.request(row)):
                self.queue.expect_first(self._preempt(row))
        for request in [request for request in self.queue if not self._may_run(request)]:
            self.queue.discard(request)
            self._aside[request] = None
        back = [request for request in self._aside if self._may_run(request)]
        for request in back:
            del self._aside[request]
        for request in sorted(back, key=lambda request: -request.admission_index):
            if request.admission_index >= 0:
                self.queue.add_first(request, self._num_steps)
                self.queue.expect_first(request)
        for request in sorted(back, key=lambda request: request.arrival_time):
            if request.admission_index < 0:
                self.queue.add(request, self._num_steps)

    def _may_run(self, request: Request) -> bool:
        return self._only is None or request.request_id in self._only

    @property
    def considered(self) -> Request | None:
        """The request that was last to be admitted, which may have run or ended since."""
        return self._considered

    @property
    def num_step_tokens(self) -> int:
        """How many tokens the last planned step computes."""
        return int(self._num_new.sum())

    @property
    def has_requests(self) -> bool:
        return bool(self.queue or self.running)

    @property
    def scheduled_rows(self) -> np.ndarray:
        """Rows of the last planned step, int64 [num_requests], in the plan's order. Not to be written."""
        return self._scheduled

    @property
    def running_rows(self) -> np.ndarray | None:
        """The rows that run, int64, oldest request first: the same array as long as none comes or goes. None: not
        gathered since one did."""
        return self._running_array

    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(
            self._admissions.num_prompt_tokens,
            self._admissions.num_cached_tokens,
            self._num_generated_tokens,
            self._num_steps,
            self._num_preemptions,
            self._admissions.hits,
        )

    def num_computed(self) -> dict[int, int]:
        """Row -> how many tokens processed steps have computed of it, for the rows that run."""
        return {row: self.rows.num_computed_at[row] for row in self.running}

    def draft_counters(self) -> DraftCounters:
        return self._drafts

    def finish(
        self, request: Request, reason: str, stop_reason: int | str | None = None, *, num_dropped_tokens: int = 0
    ) -> None:
        """End a request, whether it runs, waits or has just ended. Its pages become cache or are freed once no step in
        flight uses them.

        num_dropped_tokens: how many of its last tokens it is not given after all, because it ended before them. What
        was computed of them stays, for it is right."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._num_generated_tokens -= num_dropped_tokens
        if request.row >= 0:
            self.rows.num_tokens[request.row] -= num_dropped_tokens
            self._leave_row(request.row)
        else:
            self.queue.discard(request)
            self._aside.pop(request, None)
            if self.drafter is not None:
                self.drafter.forget(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step and reserve its memory. Returns None when nothing can run, or nothing before the step in
        flight is processed. At most one step may be in flight: planned by the previous call, and its result not yet
        given to `update`."""
        assert len(self._planned) < 2, "two steps are in flight: update with the result of the first"
        in_flight = self._planned[-1] if self._planned else None
        if in_flight is not None and not self._can_plan_ahead():
            return None
        self._planned_time = time.perf_counter()
        if not self.manager.begin_step(is_ahead=in_flight is not None):
            return None
        self._must_wait = False
        reached = Reached.after(self.rows, in_flight)
        self._admitted.clear()
        num_preemptions = self._num_preemptions
        if not self._begin_outgrown_anew(reached):
            return None
        self._scheduled = decodes = self._grow_decodes(reached)[: self._most_tokens]
        if self._must_wait:
            return None  # rows keep the pages that they got for this plan; the next one uses them
        self._num_new = self._one_each[: len(decodes)]
        if self.queue or len(decodes) < len(self.running):
            num_new = dict.fromkeys(decodes.tolist(), 1)
            budget = min(self._most_tokens - len(num_new), self._admission.prefill_tokens())
            budget = self._continue_prefills(num_new, budget, reached)
            if self._must_wait:
                return None
            if self._num_preemptions == num_preemptions:
                self._admit(num_new, budget)
            # A row that was planned above may have been preempted since, to make room for a later one.
            planned = [row for row in self.running if row in num_new]
            planned.sort(key=lambda row: num_new[row] > 1)
            self._scheduled = np.array(planned, dtype=np.int64)
            self._num_new = np.array([num_new[row] for row in planned], dtype=np.int64)
        if not len(self._scheduled):
            return None
        if self._admitted and in_flight is not None:  # `reached` does not know these rows yet
            reached = Reached.after(self.rows, in_flight)
        num_drafts = None if self.drafter is None else self._add_drafts(self.drafter)
        is_long_text = self._long_texts.flags(self.rows, self._scheduled)
        plan = build_step_plan(
            self.rows, self.manager, self._scheduled, self._num_new, reached, is_long_text, num_drafts
        )
        sampled_rows = self._scheduled.repeat(plan.num_sampled)
        self._planned.append(
            PlannedStep(
                self._scheduled, self._num_new, sampled_rows, frozenset(self._admitted), plan.scored, num_drafts
            )
        )
        return plan

    def update(self, result: StepResult) -> NewTokens:
        """Take in what the oldest planned step computed: move positions on by what was accepted, enter complete blocks
        in the prefix tree, append sampled tokens and end requests."""
        rows, manager = self.rows, self.manager
        step = self._planned.popleft()
        if step.scored is not None:
            rows.take_in_scores(step.scored, result.scored)
        manager.end_step(in_flight=bool(self._planned))
        if self._leaving:
            step, result = step.without(self._leaving, result)
            for row in [row for row in self._leaving if not self._is_in_flight(row)]:
                self._leaving.remove(row)
                self._vacate(row, keep=row not in step.admitted)
        scheduled, num_new, sampled_rows, offsets = step.rows, step.num_new, step.sampled_rows, None
        if step.num_drafts is not None:
            verified = verify(rows, step, result)
            self._drafts = self._drafts.add(verified.num_drafts, verified.num_accepted)
            num_new = num_new - verified.num_rejected
            offsets = verified.offsets
            sampled_rows, result = sampled_rows[verified.samples], result.part(verified.samples)
        computed = rows.num_computed[scheduled] + num_new
        rows.num_computed[scheduled] = computed
        self._num_steps += 1
        ends_prompt = computed == rows.num_prompt_tokens[scheduled]
        manager.commit(scheduled, rows.tokens, computed, ends_prompt=ends_prompt)
        is_chunk = step.num_new > 1 if step.num_drafts is None else step.num_new - step.num_drafts > 1
        if np.count_nonzero(is_chunk):
            rows_of_chunks, reached = scheduled[is_chunk], computed[is_chunk]
            num_tokens = rows.num_tokens[rows_of_chunks]
            ends = np.where(reached < num_tokens, num_tokens, 0)
            manager.slide(rows_of_chunks.tolist(), reached.tolist(), ends.tolist())
        new_tokens = append_tokens(rows, sampled_rows, result, offsets)
        self._num_generated_tokens += len(new_tokens.token_ids)
        if self.drafter is not None:
            num_tokens = int(step.num_new.sum())
            self.drafter.costs.note(num_tokens, time.perf_counter() - self._planned_time)
        for request in (*new_tokens.ended, *new_tokens.failed):
            self._leave_row(request.row)
        return new_tokens

    def roll_back(self) -> None:
        """Undo all planned steps, because one of them failed. Their requests go back to waiting and keep what earlier
        steps computed.

        If one of the steps was to move pages, nobody knows which of them arrived. Then all KV is forgotten, and every
        running request starts anew."""
        manager, preempted = self.manager, []
        admitted = {row for step in self._planned for row in step.admitted}
        failed = {row for step in self._planned for row in step.rows.tolist()}
        self._planned.clear()
        if manager.fail_steps():
            for row in self.running[::-1]:
                self._preempt(row, keep=False)
            for row in self._leaving:
                self._vacate(row, keep=False)
            self._leaving.clear()
            manager.end_step()
            manager.reset_prefix_cache(pinned=True)
            return
        for row in [*self._leaving, *(row for row in self.running[::-1] if row in failed)]:
            # The prefix that a new row found may be what the failed step was to compute: nothing of it is kept.
            is_new = row in admitted
            if not is_new:
                self.rows.num_computed[row] = manager.roll_back(row, int(self.rows.num_computed[row]))
            if row in self._leaving:
                self._vacate(row, keep=not is_new)
            else:
                preempted.append(self._preempt(row, keep=not is_new))
        self._leaving.clear()
        manager.end_step()
        for request in preempted:
            self.queue.expect_first(request)

    def restart(self, requests: Iterable[Request], num_generated_tokens: int) -> None:
        """Begin anew with empty rows and an empty cache, whatever state an exception left behind.

        requests: all that go on, in order of arrival, with their tokens so far. All of them wait; those that have
        already run come first, as if they had been preempted.
        num_generated_tokens: how many tokens of all requests have been taken in since the start.
        If this call is interrupted, it must be made again before any other.
        """
        started: list[Request] = []
        fresh: list[Request] = []
        for request in requests:
            (started if request.admission_index >= 0 else fresh).append(request)
            if request.row != NO_ROW:
                request.num_preemptions += 1
                self._num_preemptions += 1
                request.row = NO_ROW
        self.manager.clear()
        self.rows.clear()
        self._begin_empty()
        self._num_generated_tokens = num_generated_tokens
        started.sort(key=lambda request: request.admission_index)
        for request in [*started, *fresh]:
            self.add(request)

    # Running requests

    def _can_plan_ahead(self) -> bool:
        """Whether a step can be planned while another is in flight. A request that restarted alone in an empty arena
        is planned step by step, because only then does the sizing of the arena guarantee it room."""
        if self._restarted is not None and self._restarted.is_finished:
            self._restarted = None
        return not (self._must_wait or self._restarted or self.rows.reads_tokens or self.drafter is not None)

    def _begin_outgrown_anew(self, reached: Reached) -> bool:
        """Send requests that have become long texts back to the queue, to begin anew. Returns False where that must
        wait until the step in flight is processed."""
        outgrown = self._long_texts.outgrown(self.rows, self.running, reached.num_tokens)
        if outgrown and self._planned:
            self._must_wait = True
            return False
        for row in outgrown[::-1]:
            self.queue.expect_first(self._preempt(row))
        return True

    def _grow_decodes(self, reached: Reached) -> np.ndarray:
        """Returns the rows (int64, oldest first) that decode one token, with room for it. Only rows at a block boundary
        are looked at one by one."""
        rows = self.rows
        if self._running_array is None:
            self._running_array = np.array(self.running, dtype=np.int64)
        running = self._running_array
        computed = reached.num_computed[running]
        num_tokens = reached.num_tokens[running]
        decodes = num_tokens - computed == 1
        if self._planned:  # a row whose last token comes from the step in flight is done
            decodes &= num_tokens < rows.max_total_tokens[running]
        num_preemptions = self._num_preemptions
        due = (decodes & (computed >= rows.due[running])).nonzero()[0]
        for row, position in zip(running[due].tolist(), computed[due].tolist(), strict=True):
            if rows.requests[row] is None:
                continue  # preempted to make room for a row earlier in this loop
            has_room = self.manager.grow(
                row,
                position,
                1,
                is_prefill=False,
                num_processed=rows.num_computed_at[row],
                prompt_tokens=self._prompt_tokens(row),
            )
            if has_room or self._grow_or_preempt(row, 1, reached, is_prefill=False):
                rows.due_at[row] = self.manager.next_due(row)
        if self._num_preemptions > num_preemptions:
            decodes &= [rows.requests[row] is not None for row in running.tolist()]
        decoding: np.ndarray = running[decodes]
        return decoding

    def _continue_prefills(self, num_new: dict[int, int], budget: int, reached: Reached) -> int:
        rows = self.rows
        for row in list(self.running):
            remaining = int(reached.num_tokens[row] - reached.num_computed[row])
            if rows.requests[row] is None or row in num_new or budget == 0 or remaining == 1:
                continue
            chunk = self._grow_or_preempt(row, min(remaining, budget, self.chunk_tokens), reached, is_prefill=True)
            if chunk:
                if not self._planned:
                    self.manager.commit_ahead(row, rows.tokens[row], int(rows.num_computed[row]) + chunk)
                num_new[row] = chunk
                budget -= chunk
        return budget

    def _grow_or_preempt(self, row: int, most: int, reached: Reached, *, is_prefill: bool) -> int:
        """Make room for up to `most` tokens of `row`, if need be by preempting the requests that lose least by it.

        Returns how many tokens there is room for; 0 when `row` itself had to leave, or when a step is in flight that
        must be processed first.
        """
        computed, num_processed = int(reached.num_computed[row]), int(self.rows.num_computed[row])
        prompt_tokens = self._prompt_tokens(row)
        while True:
            chunk = most
            while chunk:
                if self.manager.grow(
                    row,
                    computed,
                    chunk,
                    is_prefill=is_prefill,
                    num_processed=num_processed,
                    prompt_tokens=prompt_tokens,
                ):
                    return chunk
                if self._planned:
                    self._must_wait = True
                    return 0
                # There may be room for fewer tokens: try half the chunk, extended to a block boundary.
                page_tokens = self.manager.layout.page_tokens
                shorter = ceil_div(computed + chunk // 2, page_tokens) * page_tokens
                chunk = shorter - computed if shorter - computed < chunk else 0
            if self._slide_running():
                continue
            if len(self.running) == 1:
                # The row runs alone and still has no room: its pages lie scattered over slabs that other groups need.
                # In an empty arena the sizing guarantees that it fits.
                logger.info("request %s restarts in an empty arena", self.rows.request(row).request_id)
                self._restarted = self._preempt(row, keep=False)
                self.manager.reset_prefix_cache()
                return 0
            victim = choose_victim(self.manager, self.rows, self.running)
            self.queue.expect_first(self._preempt(victim))
            if victim == row:
                return 0

    def _add_drafts(self, drafter: Drafter) -> np.ndarray | None:
        """Let rows of the step in preparation verify drafts as well, as far as that pays and there is room. Changes
        `_scheduled` and `_num_new`. Returns how many each row has, int64 [R], None where none has any."""
        rows, scheduled = self.rows, self._scheduled
        num_computed, num_known = rows.num_computed[scheduled], rows.num_tokens[scheduled]
        # A row whose prompt is not complete ends it in this step, to be kept as a place to resume.
        decodes = (num_known - num_computed == 1) & (num_computed >= rows.num_prompt_tokens[scheduled])
        decodes &= self._num_new == 1
        # The token behind the last draft is the last that the request may have.
        room = dict(
            zip(
                scheduled[decodes].tolist(),
                (rows.max_total_tokens[scheduled] - num_known - 1)[decodes].tolist(),
                strict=True,
            )
        )
        for row in room:
            most_tokens = self._long_texts.num_short_tokens(rows, row)
            if most_tokens is not None:
                room[row] = min(room[row], most_tokens - rows.num_tokens_at[row])
        num_tokens = int(self._num_new.sum())
        drafts = drafter.drafts(rows, room, num_tokens, self._most_tokens - num_tokens)
        granted = {}
        for row, token_ids in drafts.items():
            num_drafts = self._grow_for_drafts(row, len(token_ids))
            if num_drafts:
                granted[row] = num_drafts
                start = rows.num_tokens_at[row]
                rows.tokens[row, start : start + num_drafts] = token_ids[:num_drafts]
        if not granted:
            return None
        drafts_each = np.array([granted.get(row, 0) for row in scheduled.tolist()], dtype=np.int64)
        num_new = self._num_new + drafts_each
        order = np.argsort(num_new > 1, kind="stable")
        self._scheduled, self._num_new = scheduled[order], num_new[order]
        num_drafts_each: np.ndarray = drafts_each[order]
        return num_drafts_each

    def _grow_for_drafts(self, row: int, most: int) -> int:
        """Room for how many of `most` drafts behind the row's last token, without anyone being preempted."""
        rows = self.rows
        num_computed = rows.num_computed_at[row]
        if num_computed + 1 + most > rows.due_at[row]:
            if not self.manager.grow(row, num_computed, 1 + most, is_prefill=False):
                return max(0, min(most, rows.due_at[row] - num_computed - 1))
            rows.due_at[row] = self.manager.next_due(row)
        return most

    def _slide_running(self) -> bool:
        """Take pages that have left their windows from all running rows, without waiting for the eviction interval to
        be full. Returns whether there were any."""
        computed = self.rows.num_computed[self.running].tolist()
        return self.manager.slide(self.running, computed, map(self._prompt_tokens, self.running))

    def _prompt_tokens(self, row: int) -> int:
        """The length of the row's prompt while processed steps have not computed all of it; else 0. What a preempted
        request had generated counts as prompt, too. A last token that is left alone is computed like a decode: it still
        counts as prompt if it was given, not if it was generated."""
        num_computed, num_tokens = self.rows.num_computed_at[row], self.rows.num_tokens_at[row]
        is_prompt = num_computed + 1 < num_tokens or num_computed < self.rows.num_prompt_tokens_at[row]
        return num_tokens if is_prompt else 0

    def _preempt(self, row: int, *, keep: bool = True) -> Request:
        """Move a running request back to the head of the queue. With `keep`, what it computed stays cached until it is
        evicted."""
        rows = self.rows
        self.manager.release(row, rows.tokens[row], int(rows.num_computed[row]), keep=keep)
        self._running_array = None
        self.running.remove(row)
        request = rows.take(row)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._long_texts.mark(request)
        self.queue.add_first(request, self._num_steps)
        return request

    def _leave_row(self, row: int) -> None:
        self._running_array = None
        self.running.remove(row)
        if self._is_in_flight(row):
            self._leaving.append(row)
        else:
            self._vacate(row)

    def _is_in_flight(self, row: int) -> bool:
        return any((step.rows == row).any() for step in self._planned)

    def _vacate(self, row: int, *, keep: bool = True) -> None:
        rows = self.rows
        self.manager.release(row, rows.tokens[row], int(rows.num_computed[row]), keep=keep)
        request = rows.take(row)
        self._admission.note_finished(request)
        if self.drafter is not None:
            self.drafter.forget(request)

    # Admission

    def _admit(self, num_new: dict[int, int], budget: int) -> None:
        while self.queue and budget and self.rows.has_free_row:
            request, match = self.queue.next(self._num_steps)
            self._considered = request
            if not self._may_run_adapter(request):
                return
            if request is self._starts_anew:
                match = NO_MATCH._replace(boundaries=match.boundaries)
            if self.running and not self._admission.has_room(request, match, self.running, len(self.queue)):
                if self._slide_running():
                    continue
                return
            if self._planned and not self._can_admit_ahead(request, match):
                self._must_wait = True
                return
            row = self.rows.next_free_row
            most = min(len(request.token_ids) - match.num_tokens, budget, self.chunk_tokens)
            chunk = self._begin(row, request, match, most)
            if not chunk:
                if self._slide_running():
                    continue
                if self._planned:
                    self._must_wait = True
                elif not self.running:
                    self._clear_for(request, match)
                return
            self.rows.put(request, match.num_tokens)
            self.queue.start(request)
            self._running_array = None
            self.running.append(row)
            self._admitted.add(row)
            self.rows.due[row] = self.manager.next_due(row)
            if not self._planned:
                self.manager.commit_ahead(row, request.token_ids, match.num_tokens + chunk)
            num_new[row] = chunk
            budget -= chunk
            self._count_admission(request, match)

    def _may_run_adapter(self, request: Request) -> bool:
        """Whether no more than max_loras adapters run if the request does. Else it waits, and those behind it."""
        if self._max_loras is None or request.adapter_id == NO_ADAPTER:
            return True
        return self.rows.num_adapters_with(request.adapter_id) <= self._max_loras

    def _can_admit_ahead(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the request can start while a step is in flight: it needs nothing but pages, and no planned step
        computes more of its prompt than the cache has now."""
        in_the_making = self._planned[-1].prompt_rows | self._admitted
        if not self.manager.may_begin_ahead(match):
            return False
        return not self._admission.finds_more_later(request, match, in_the_making)

    def _begin(self, row: int, request: Request, match: PrefixMatch, most: int) -> int:
        """Make room in `row` for the cached prefix and up to `most` more tokens. Returns how many more there is room
        for; 0 if there is none, and then the row stays empty."""
        if not self.manager.begin(row, match, request.salt, parting_tokens=self.queue.parting_tokens(request)):
            return 0
        chunk, prompt_tokens = most, len(request.token_ids)
        while chunk and not self.manager.grow(
            row, match.num_tokens, chunk, is_prefill=True, prompt_tokens=prompt_tokens
        ):
            chunk = 0 if self._planned else chunk // 2
        if not chunk:
            self.manager.release(row, request.token_ids, match.num_tokens, keep=False)
        return chunk

    def _clear_for(self, request: Request, match: PrefixMatch) -> None:
        """Nothing runs and the request still has no room, because the cached prefix that it locked is in its way: empty
        the cache. What is pinned stays; beside that there is room for a request that locks none of it. Raises
        InvariantError where the request had found no prefix."""
        if not match.num_tokens:
            raise InvariantError(
                f"request {request.request_id} of {len(request.token_ids)} tokens does not fit into an empty arena "
                f"of {self.manager.settings.num_slabs} slabs, though the start-up check said it would"
            )
        self.manager.reset_prefix_cache()
        self._starts_anew = request if self.manager.pinned() else None

    def _count_admission(self, request: Request, match: PrefixMatch) -> None:
        if request.num_cached_tokens is None:  # only a first start counts: a resume is no hit
            admission_index = self._admissions.num_requests
            self._admissions = self._admissions.add(request, match, self.manager.layout.page_tokens)
            request.first_scheduled_time = time.monotonic()
            request.admission_index = admission_index
            request.num_cached_tokens = match.num_tokens - match.num_skipped_tokens
