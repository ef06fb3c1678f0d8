"""lamella's own scheduler and block manager on a workload, with an executor that only answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kv_replay.closed_loop import ClosedLoop
from kv_replay.results import Measurements, PromptCost, median
from kv_replay.traces import TraceRequest, token_ids
from lamella.engine.engine_view import EngineView, snapshot_of
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.errors import CapacityError, InvariantError
from lamella.model_executor.step_plan import StepPlan, StepResult

MAX_IDLE_STEPS = 8
PROMPT_OUTPUT_TOKENS = 2  # so that the step that takes a prompt in does not also end its request
# Of the prompts that are there before, and what all prompts begin with then.
SIBLING_TOKENS = 38
FIRST_TOKEN = 2
GREEDY = SamplingParams(temperature=0)


class Driver:
    """Steps a scheduler whose requests' outputs are known beforehand, and takes notes. view: what is told of each step,
    as an engine tells it, which counts as part of the step; None: nothing is."""

    def __init__(self, scheduler: Scheduler, *, budget_bytes: int, view: EngineView | None = None) -> None:
        self._view = view
        self._watched: Any = SimpleNamespace(scheduler=scheduler, manager=scheduler.manager)
        self.scheduler = scheduler
        self._outputs: dict[str, np.ndarray] = {}
        self._arrival_step: dict[str, int] = {}
        self.add_seconds: list[float] = []  # per request
        self.step_seconds: list[tuple[float, float]] = []  # schedule and update, per step
        self._num_running: list[int] = []
        self._wait_steps: list[int] = []
        self.num_computed_tokens = 0
        self._num_first_decodes = 0
        self._budget_bytes = budget_bytes
        self._memory = _MemoryNotes(scheduler, budget_bytes)

    def add(self, request_id: str, prompt: np.ndarray, output: np.ndarray, boundaries: tuple[int, ...] = ()) -> None:
        """prompt, output: int32. boundaries: where other prompts part from this one, as far as told. The request
        ends when it has been given all of `output`, whatever the ids."""
        self._outputs[request_id] = output
        self._arrival_step[request_id] = len(self.step_seconds)
        start = time.perf_counter()
        request = Request(
            request_id=request_id,
            sample_index=0,
            params=GREEDY,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + len(output),
            seed=0,
            eos_token_ids=frozenset(),
            stop_token_ids=frozenset(),
            arrival_time=0.0,
            prefix_boundaries=boundaries,
        )
        self.scheduler.add(request)
        self.add_seconds.append(time.perf_counter() - start)

    def step(self) -> list[str]:
        """One step; the ids of the requests that it finished."""
        seconds, plan = 0.0, None
        for _ in range(MAX_IDLE_STEPS):
            start = time.perf_counter()
            if self._view is not None:
                self._view.step_begins()
            plan = self.scheduler.schedule()
            if self._view is not None:
                self._view.planned(self._watched)
            seconds += time.perf_counter() - start
            if plan is not None:
                break
        if plan is None:
            raise InvariantError(f"the scheduler has requests and ran none of them in {MAX_IDLE_STEPS} attempts")
        self._note(plan)
        result = self._execute(plan)
        start = time.perf_counter()
        if self._view is not None:
            self._view.launched(plan)
            self._view.part_ends("wait")
        new_tokens = self.scheduler.update(result)
        if self._view is not None:
            self._view.part_ends("update")
            self._view.processed(new_tokens, ())
            self._view.step_ends(self._watched)
        finished = [request.request_id for request in new_tokens.ended]
        self.step_seconds.append((seconds, time.perf_counter() - start))
        for request_id in finished:
            self._num_first_decodes += len(self._outputs.pop(request_id)) - 1
        return finished

    def _note(self, plan: StepPlan) -> None:
        self._num_running.append(len(self.scheduler.running))
        self.num_computed_tokens += len(plan.token_ids)
        self._memory.take()
        for row in self.scheduler.scheduled_rows.tolist():
            arrival = self._arrival_step.pop(self.scheduler.rows.request(row).request_id, None)
            if arrival is not None:
                self._wait_steps.append(len(self.step_seconds) - arrival)

    def _execute(self, plan: StepPlan) -> StepResult:
        """Each sampled row's next output token, as given."""
        rows = self.scheduler.rows
        sampled = np.zeros(len(plan.sample_requests), dtype=np.int64)
        for index, row in enumerate(self.scheduler.scheduled_rows[plan.sample_requests].tolist()):
            request = rows.request(row)
            sampled[index] = self._outputs[request.request_id][int(rows.num_tokens[row]) - request.num_prompt_tokens]
        return StepResult(token_ids=sampled, logprobs={})

    def forget_steps(self) -> None:
        """The steps up to here were preparation: times, the batch's size and memory averages begin anew."""
        self.step_seconds.clear()
        self._num_running.clear()
        self._memory = _MemoryNotes(self.scheduler, self._budget_bytes)

    def measurements(self) -> Measurements:
        counters = self.scheduler.counters()
        host_us = [1e6 * sum(seconds) for seconds in self.step_seconds]
        num_decoding = sum(
            int(self.scheduler.rows.num_tokens[row] - self.scheduler.rows.num_prompt_tokens[row]) - 1
            for row in self.scheduler.running
        )
        return Measurements(
            num_prompt_tokens=counters.num_prompt_tokens,
            hit_share=counters.num_cached_tokens / max(1, counters.num_prompt_tokens),
            prefill_tokens_computed=self.num_computed_tokens - self._num_first_decodes - num_decoding,
            steps=len(host_us),
            mean_running=sum(self._num_running) / max(1, len(self._num_running)),
            max_running=max(self._num_running, default=0),
            preemptions=counters.num_preemptions,
            host_us_per_step_p50=median(host_us),
            host_us_per_step_min=min(host_us, default=0.0),
            host_us_per_step_mean=sum(host_us) / max(1, len(host_us)),
            add_us_p50=median([1e6 * seconds for seconds in self.add_seconds]),
            wait_steps_p50=median([float(steps) for steps in self._wait_steps]),
            wait_steps_max=max(self._wait_steps, default=0),
            chunk_tokens=self.scheduler.chunk_tokens,
            used_interval_tokens=self.scheduler.manager.settings.interval_tokens,
            peak_bytes=self._memory.peak_bytes(),
            unusable_bytes_share=self._memory.unusable_bytes_share,
            windowed_bytes_mean=self._memory.windowed_bytes_mean,
            windowed_held_over_ideal=self._memory.windowed_held_over_ideal,
        )


class _MemoryNotes:
    """How the arena is used, looked at once a step, when the step's pages have been taken."""

    def __init__(self, scheduler: Scheduler, budget_bytes: int) -> None:
        self._scheduler = scheduler
        self._manager, self._groups = scheduler.manager, scheduler.manager.layout.groups
        self._budget_bytes = budget_bytes
        self._num_steps = 0
        self._unusable_bytes = 0
        self._windowed_bytes = self._ideal_bytes = 0

    def take(self) -> None:
        parts, groups = self._manager.inspect(), self._groups
        arena, num_owned = parts.arena, parts.supply.num_owned
        used_bytes = sum(count * group.page_bytes for count, group in zip(arena.num_used, groups, strict=True))
        least_takeable = min(arena.num_allocatable(index) * group.page_bytes for index, group in enumerate(groups))
        self._unusable_bytes += self._budget_bytes - used_bytes - least_takeable
        self._num_steps += 1
        windowed = [(index, group) for index, group in enumerate(groups) if group.spec.is_windowed]
        if windowed:
            rows = self._scheduler.rows
            running = np.array(self._scheduler.running, dtype=np.int64)
            lengths = rows.num_computed[running] + 1  # with the token that is computed now
            for index, group in windowed:
                self._windowed_bytes += num_owned[index] * group.page_bytes
                tokens = (lengths - group.spec.first_visible_each(lengths - 1)).sum()
                self._ideal_bytes += int(tokens) * len(group.layers) * group.spec.token_bytes

    def peak_bytes(self) -> dict[str, int]:
        peaks = self._manager.peak_pages()
        return {group.name: peaks[group.name] * group.page_bytes for group in self._groups}

    @property
    def unusable_bytes_share(self) -> float:
        return self._unusable_bytes / max(1, self._num_steps) / self._budget_bytes

    @property
    def windowed_bytes_mean(self) -> float:
        return self._windowed_bytes / max(1, self._num_steps)

    @property
    def windowed_held_over_ideal(self) -> float | None:
        return self._windowed_bytes / self._ideal_bytes if self._ideal_bytes else None


def replay(
    scheduler: Scheduler,
    requests: Sequence[TraceRequest],
    *,
    num_sessions: int,
    budget_bytes: int,
    tells_boundaries: bool = False,
) -> Measurements:
    """All requests as closed-loop sessions: a turn arrives when the one before it is answered. tells_boundaries: say
    where prompts will part, where the trace knows."""
    driver = Driver(scheduler, budget_bytes=budget_bytes)
    loop = ClosedLoop(requests, num_sessions)
    on_their_way: dict[str, TraceRequest] = {}

    def arrive(request: TraceRequest) -> None:
        on_their_way[request.request_id] = request
        driver.add(request.request_id, *token_ids(request), request.boundaries if tells_boundaries else ())

    for request in loop.start():
        arrive(request)
    while on_their_way:
        for request_id in driver.step():
            following = loop.answer(on_their_way.pop(request_id))
            if following is not None:
                arrive(following)
    return driver.measurements()


def decode_only(
    scheduler: Scheduler,
    *,
    num_requests: int,
    context_tokens: int,
    num_steps: int,
    budget_bytes: int,
    view: EngineView | None = None,
) -> Measurements:
    """`num_steps` steps in which `num_requests` requests of different prompts decode, after their prefill. view: see
    Driver.

    Steps, batch size and host time are those of the pure decode alone.
    """
    driver = Driver(scheduler, budget_bytes=budget_bytes, view=view)
    for prompt, output in decode_prompts(num_requests, context_tokens, num_steps):
        driver.add(f"r{len(driver._outputs)}", prompt, output)
    while len(scheduler.running) < num_requests or not _all_decode(scheduler):
        driver.step()
    driver.forget_steps()
    for _ in range(num_steps):
        driver.step()
    return driver.measurements()


def view_of(scheduler: Scheduler, *, trace_file: str | None) -> EngineView:
    """What an engine with this scheduler would tell of its steps. trace_file: of `profile=`; None: no trace."""
    manager = scheduler.manager
    pool = SimpleNamespace(num_slabs=manager.settings.num_slabs, max_model_len=manager.settings.max_model_len)
    loaded: Any = SimpleNamespace(
        scheduler=scheduler, manager=manager, layout=manager.layout, pool=pool, runner=SimpleNamespace(clock=None)
    )
    config: Any = SimpleNamespace(model="none", disable_log_stats=False, profile=trace_file)
    return EngineView(config, loaded, lambda: snapshot_of(loaded))


def prompt_cost(
    scheduler: Scheduler, *, num_prompt_tokens: int, num_prompts: int, num_siblings: int = 0, budget_bytes: int
) -> PromptCost:
    """Each of `num_prompts` different prompts alone in the scheduler, from `add` to the `update` of the one step that
    computes all of it: match, begin, grow and commit with all that goes with them.

    num_siblings: so many short prompts have been there before, and all prompts begin with the same token.
    Raises CapacityError where a prompt is not computed whole, in one step.
    """
    driver = Driver(scheduler, budget_bytes=budget_bytes)
    rng = np.random.default_rng(0)
    output = np.zeros(PROMPT_OUTPUT_TOKENS, dtype=np.int32)
    for index in range(num_siblings):
        sibling = np.random.default_rng(index + 1).integers(0, 200_000, SIBLING_TOKENS, dtype=np.int32)
        sibling[0] = FIRST_TOKEN
        driver.add(f"sibling {index}", sibling, output)
        driver.step()
        driver.step()
    seconds: list[tuple[float, float, float]] = []
    cache_seconds: list[float] = []
    cache = _TimedCalls(scheduler.manager, ("match", "commit_ahead", "commit"))
    for index in range(num_prompts):
        prompt = rng.integers(0, 200_000, num_prompt_tokens, dtype=np.int32)
        if num_siblings:
            prompt[0] = FIRST_TOKEN
        driver.add(f"r{index}", prompt, output)
        num_before = driver.num_computed_tokens
        num_found_before = scheduler.counters().num_cached_tokens
        cache.seconds = 0.0
        driver.step()
        cache_seconds.append(cache.seconds)
        seconds.append((driver.add_seconds[-1], *driver.step_seconds[-1]))
        num_computed = driver.num_computed_tokens - num_before
        if num_computed + scheduler.counters().num_cached_tokens - num_found_before != num_prompt_tokens:
            raise CapacityError(
                f"{num_computed} of a prompt's {num_prompt_tokens} tokens were computed in its first step: the "
                "memory does not allow a larger chunk; use shorter prompts"
            )
        driver.step()
    return PromptCost.of(seconds, cache_seconds)


class _TimedCalls:
    """`seconds` spent in the methods `names` of `target`."""

    def __init__(self, target: object, names: Sequence[str]) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def decode_prompts(num_requests: int, context_tokens: int, num_steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, output) per request. Prefills take turns, so the first requests decode while the last ones start:
    the outputs are long enough for that."""
    rng = np.random.default_rng(0)
    num_output = decode_output_tokens(num_requests, num_steps)
    return [
        (
            rng.integers(0, 200_000, context_tokens, dtype=np.int32),
            rng.integers(0, 200_000, num_output, dtype=np.int32),
        )
        for _ in range(num_requests)
    ]


def decode_output_tokens(num_requests: int, num_steps: int) -> int:
    return num_steps + 3 * num_requests + 16


def _all_decode(scheduler: Scheduler) -> bool:
    running = np.array(scheduler.running, dtype=np.int64)
    return bool((scheduler.rows.num_tokens[running] - scheduler.rows.num_computed[running] == 1).all())
