"""The scheduler with steps in flight: a device that computes a step only when its result is asked for.

By then the next step has been planned and launched, so whatever its plan did to memory that the first still uses, the
first finds. Three things are watched:

- the device: every key that a query sees is the right one (FakeExecutor), from the arrays of the plan as they are then;
- pages that a launched step sees or writes: none is freed or moved before that step is processed;
- the prefix tree: all that it has, but for pending blocks, has been computed by processed steps, of tokens that
  requests were given.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request import Request
from lamella.kv_cache import invariants
from lamella.kv_cache.arena import NULL_PAGE
from lamella.model_executor.step_plan import StepPlan, StepResult
from tests.helpers.fake_executor import FakeExecutor, keys_seen, tags_of
from tests.helpers.simulation import Simulation


class DeviceError(Exception):
    """The step that was to fail did."""


class InFlight(NamedTuple):
    plan: StepPlan
    contexts: list[tuple[str | None, list[int]]]  # salt and known tokens of each request
    frozen: list[tuple[np.ndarray, list]]  # arrays of the plan, and their contents at launch
    pages: set[tuple[int, int]]  # (group, page) that it sees or writes


class LateSimulation(Simulation):
    """`step` does what `Engine.step` does: launch one, launch the next, process the first."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.launched: deque[InFlight] = deque()
        self.samples = np.zeros(0, dtype=np.int64)  # of the step computed last, on the device
        self.num_ahead = self.num_discarded = 0
        self._watch_memory()

    def _watch_memory(self) -> None:
        arena = self.manager.inspect().arena
        free, compact = arena.free, arena.compact

        def watched_free(group, page):
            assert not self._is_used(group, page), f"page {page} of group {group} is freed while a step uses it"
            free(group, page)

        def watched_compact(group, **kwargs):
            moves = compact(group, **kwargs)
            for source in () if moves is None else moves.src_pages.tolist():
                assert not self._is_used(moves.group, source), f"page {source} moves while a step uses it"
            return moves

        arena.free = self.manager.inspect().tree._free_page = watched_free
        arena.compact = watched_compact

    def _is_used(self, group: int, page: int) -> bool:
        return any((group, page) in step.pages for step in self.launched)

    def step(self, *, fail: bool = False, fail_at: str = "result") -> bool:
        """fail_at: "result": the first step fails when it is waited for; "launch": the one after it, or the first
        where there is none, when it is launched. DeviceError is not let out."""
        try:
            if not self.launched and not self._launch(fail=False):
                self._check()
                return False
            has_next = self._launch(fail=fail and fail_at == "launch")
            if fail and fail_at == "launch" and not has_next:
                raise DeviceError
            self._process(fail=fail)
        except DeviceError:
            self._spoil()
            self.launched.clear()
            self.scheduler.roll_back()
            self._check()
        while self.launched and not self.scheduler.has_requests:
            self._process(fail=False)
        return True

    def run(self, max_steps: int = 10_000) -> None:
        super().run(max_steps)
        while self.launched:
            self._process(fail=False)
        self._check()

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        while self.launched and not self.scheduler.has_requests:
            self._process(fail=False)
        self._check()

    def _launch(self, *, fail: bool) -> bool:
        scheduler, rows = self.scheduler, self.scheduler.rows
        plan = scheduler.schedule()
        if plan is None:
            return False
        contexts = []
        for index, row in enumerate(scheduler.scheduled_rows.tolist()):
            request = rows.request(row)
            assert not request.is_finished, "a request that has ended is planned"
            assert plan.seq_lens[index] < request.max_total_tokens, "more is computed than the request can need"
            contexts.append((request.salt, rows.tokens[row, : rows.num_tokens[row]].tolist()))
        for index, draw_index in zip(plan.sample_requests.tolist(), plan.sampling.draw_index.tolist(), strict=True):
            num_prompt_tokens = rows.request(int(scheduler.scheduled_rows[index])).num_prompt_tokens
            assert draw_index == plan.seq_lens[index] - num_prompt_tokens, "the draw is not the request's next"
        arrays = [plan.token_ids, plan.positions, plan.seq_lens, plan.num_sampled]
        for part in plan.groups:
            arrays += [part.block_tables, part.first_blocks, part.first_keys, part.slot_mapping, *vars_of(part.copies)]
        frozen = [(array, array.tolist()) for array in arrays]
        # Before it is in flight: what planning itself frees of other steps' pages is watched, and what it takes is new.
        self.launched.append(InFlight(plan, contexts, frozen, self._pages_of(plan)))
        self.num_ahead += len(self.launched) > 1
        invariants.check(self.manager)
        if fail:
            raise DeviceError
        return True

    def _pages_of(self, plan: StepPlan) -> set[tuple[int, int]]:
        page_tokens, pages = self.layout.page_tokens, set()
        for group, part in enumerate(plan.groups):
            pages.update((group, slot // page_tokens) for slot in part.slot_mapping.tolist() if slot >= 0)
            pages.update((group, page) for array in vars_of(part.copies) for page in array.tolist())
            for index, first_block in enumerate(part.first_blocks.tolist()):
                table, first_key = part.block_tables[index].tolist(), int(part.first_keys[index])
                for position in FakeExecutor._positions(plan, index):
                    seen = keys_seen(*self.executor.kinds[group], position)
                    blocks = {key // page_tokens for key in seen if key >= first_key}
                    pages.update((group, table[block - first_block]) for block in blocks)
        for move in plan.moves:
            pages.update((move.group, page) for page in (*move.src_pages.tolist(), *move.dst_pages.tolist()))
        return {(group, page) for group, page in pages if page < self.manager.inspect().step_pages.first_page}

    @property
    def layout(self):
        return self.manager.layout

    def _process(self, *, fail: bool) -> None:
        step = self.launched[0]
        if fail:
            raise DeviceError
        result = self._execute(step)
        self.launched.popleft()
        new_tokens = self.scheduler.update(result)
        self.num_discarded += len(result.token_ids) - len(new_tokens.token_ids)
        for new in new_tokens.each():
            self.outputs[new.request.request_id].append(new.token_id)
        self._check()

    def _execute(self, step: InFlight) -> StepResult:
        """What a device does at last: nothing of what the host has learned since the launch comes in."""
        for array, contents in step.frozen:
            assert array.tolist() == contents, "a plan changed before its step ran"
        plan = step.plan
        contexts = [(salt, list(tokens)) for salt, tokens in step.contexts]
        if plan.token_sources is not None:
            token_ids = plan.token_ids.copy()
            for token in np.flatnonzero(plan.token_sources >= 0).tolist():
                token_ids[token] = self.samples[plan.token_sources[token]]
                index = int(np.searchsorted(plan.query_start, token, side="right")) - 1
                contexts[index][1].append(int(token_ids[token]))
            plan = dataclasses.replace(plan, token_ids=token_ids, token_sources=None)
        result = self.spoil(self.executor.execute(plan, contexts))
        self.samples = result.token_ids
        return result

    def _spoil(self) -> None:
        """Steps failed at nobody knows which instruction: what they were to write is anything."""
        page_tokens = self.layout.page_tokens
        for plan in (step.plan for step in self.launched):
            written = [(group, slot) for group, part in enumerate(plan.groups) for slot in part.slot_mapping.tolist()]
            for move in plan.moves:
                pages = (*move.src_pages.tolist(), *move.dst_pages.tolist())
                written += [
                    (move.group, page * page_tokens + offset) for page in pages for offset in range(page_tokens)
                ]
            for group, slot in written:
                for layer in self.layout.groups[group].layers if slot >= 0 else ():
                    self.executor._entries(layer, slot // page_tokens)[slot % page_tokens] = None

    def _check(self) -> None:
        invariants.check(self.manager)
        self._check_tree()

    def _check_tree(self) -> None:
        tree, executor = self.manager.inspect().tree, self.executor
        given = [(request.salt, self._given_tokens(request)) for request in self.requests.values()]
        # Node -> salt, tokens, tag of the last.
        paths: dict[int, tuple[str | None, list[int], bytes]] = {
            node: (salt, [], b"") for salt, node in tree.roots().items()
        }
        # Parents before children: a parent ends earlier.
        for node in sorted(tree.nodes(), key=lambda node: int(tree.end[node])):
            salt, before, tag = paths[int(tree.parent[node])]
            block = np.frombuffer(tree._index.tokens(node), dtype=np.int32).tolist()
            tokens, tags = [*before, *block], tags_of(salt, block, tag)
            paths[node] = salt, tokens, tags[-1]
            assert tree.num_children[node] or any(
                salt == other and known[: len(tokens)] == tokens for other, known in given
            ), "the tree has tokens that no request was given"
            if node in tree.pending:
                continue
            for group, spec in enumerate(self.layout.groups):
                page = int(tree.page[group, node])
                for layer in spec.layers if page != NULL_PAGE else ():
                    entries = executor._entries(layer, page)
                    for entry, tag, position in zip(entries, tags, range(len(before), len(tokens)), strict=False):
                        assert entry is not None, f"the tree has position {position}, which is not computed"
                        assert entry.tag == tag, f"the tree has other KV at position {position}"
                        assert entry.is_exact, f"the tree has inexact KV at position {position}"

    def _given_tokens(self, request: Request) -> list[int]:
        """The request's prompt and answer, without the last token: its KV is never needed. Where none could be chosen
        to follow it, it is the last one's KV that led to that."""
        prompt, answer = self.prompts[request.request_id], self.outputs[request.request_id]
        return [*prompt, *(answer if request.finish_reason == "error" else answer[:-1])]

    def add(self, request_id, prompt, num_tokens, salt=None, stop_token_ids=(), boundaries=()) -> Request:
        self.prompts = getattr(self, "prompts", {})
        self.prompts[request_id] = [int(token) for token in prompt]
        return super().add(request_id, prompt, num_tokens, salt, stop_token_ids, boundaries)


def vars_of(copies) -> tuple[np.ndarray, np.ndarray]:
    return copies.src_pages, copies.dst_pages
