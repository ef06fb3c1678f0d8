"""What an engine tells those who watch it: its metrics, its line in the log and its trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import LoadedEngine
from lamella.engine.output_processor import EndedSample
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.new_tokens import NewTokens
from lamella.engine.scheduling.request import Request
from lamella.errors import LamellaError
from lamella.model_executor.step_clock import StepClock
from lamella.model_executor.step_plan import StepPlan
from lamella.observability.engine_snapshot import EngineSnapshot
from lamella.observability.engine_trace import EngineTrace, Part, StepNote
from lamella.observability.log_line import LogLine
from lamella.observability.metrics import EngineMetrics
from lamella.observability.trace_file import TraceFile


def snapshot_of(loaded: LoadedEngine) -> EngineSnapshot:
    """The engine's counters, now."""
    scheduler, layout = loaded.scheduler, loaded.layout
    counters, drafts = scheduler.counters(), scheduler.draft_counters()
    return EngineSnapshot(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.queue),
        num_prompt_tokens=counters.num_prompt_tokens,
        num_cached_tokens=counters.num_cached_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_preemptions=counters.num_preemptions,
        num_steps=counters.num_steps,
        kv_cache=loaded.manager.counters(counters.hits),
        page_bytes={group.name: group.page_bytes for group in layout.groups},
        arena_bytes=(loaded.pool.num_slabs - 1) * layout.slab_bytes,
        num_proposed_at=drafts.num_proposed_at,
        num_accepted_at=drafts.num_accepted_at,
    )


class EngineView:
    """The engine calls it at each event; what nobody asked for costs nothing. snapshot: the engine's counters, to be
    had from any thread. Raises ConfigError where the trace's file cannot be written."""

    def __init__(self, config: EngineConfig, loaded: LoadedEngine, snapshot: Callable[[], EngineSnapshot]) -> None:
        title = Path(config.model).name
        self._metrics: EngineMetrics | None = None
        self._line: LogLine | None = None
        if not config.disable_log_stats:
            self._metrics = EngineMetrics(snapshot, model_name=config.model, max_model_len=loaded.pool.max_model_len)
            self._line = LogLine(snapshot)
        self._trace: EngineTrace | None = None
        if config.profile is not None:
            file = TraceFile(config.profile)
            self._trace = EngineTrace(file, loaded.layout, loaded.pool.num_slabs, loaded.manager, title=title)
            loaded.runner.clock = self._clock = StepClock()
        self._num_steps = 0
        self._parts: list[Part] = []
        self._started = self._moment = 0.0  # of the call of `step`; of its last part
        self._num_tokens = 0

    @property
    def metrics(self) -> EngineMetrics:
        """Raises LamellaError where the engine keeps none."""
        if self._metrics is None:
            raise LamellaError("disable_log_stats=True: this engine keeps no metrics; make it without that argument")
        return self._metrics

    def arrived(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """A user's request was queued, with all its samples."""
        if self._metrics is not None:
            self._metrics.arrived(params)
        if self._trace is not None:
            self._trace.arrived(requests)

    def ended(self, samples: Sequence[EndedSample]) -> None:
        """Requests have ended, by whatever reason."""
        if not samples:
            return
        now = time.monotonic()
        for request, num_output_tokens in samples:
            if self._metrics is not None:
                self._metrics.ended(request, num_output_tokens, now)
            if self._trace is not None:
                self._trace.ended(request, num_output_tokens, now)

    # A call of `step`, in the order of its parts

    def step_begins(self) -> None:
        if self._trace is not None:
            self._parts = []
            self._started = self._moment = time.monotonic()
            self._num_tokens = 0

    def planned(self, loaded: LoadedEngine) -> None:
        """A step was planned, or there was none to plan."""
        if self._trace is not None:
            self.part_ends("schedule")
            scheduler = loaded.scheduler
            self._trace.running(scheduler.running_rows, scheduler.running, scheduler.rows.request, self._moment)

    def launched(self, plan: StepPlan) -> None:
        num_tokens = len(plan.token_ids)
        if self._metrics is not None:
            self._metrics.step_launched(num_tokens)
        if self._trace is not None:
            self.part_ends("launch")
            self._parts[-1] = self._parts[-1]._replace(details=self._clock.take())
            self._num_tokens += num_tokens

    def part_ends(self, name: str) -> None:
        """What has been done since the last part is called so."""
        if self._trace is not None:
            now = time.monotonic()
            self._parts.append(Part(name, self._moment, now))
            self._moment = now

    def processed(self, new_tokens: NewTokens, ended: Sequence[EndedSample]) -> None:
        """A step's tokens are taken in, and outputs are made."""
        if self._metrics is not None:
            self._metrics.step_processed(new_tokens.requests, time.monotonic())  # type: ignore[arg-type]
        if self._trace is not None:
            self.part_ends("outputs")
            self._trace.got_tokens(new_tokens.requests, self._moment)
        self.ended(ended)

    def step_ends(self, loaded: LoadedEngine) -> None:
        """The call of `step` has done its work."""
        if self._line is not None:
            self._line.step(time.monotonic())
        if self._trace is not None:
            scheduler = loaded.scheduler
            num_running, num_waiting = len(scheduler.running), len(scheduler.queue)
            note = StepNote(
                self._num_steps,
                self._started,
                time.monotonic(),
                self._parts,
                self._num_tokens,
                num_running,
                num_waiting,
            )
            self._num_steps += 1
            self._trace.stepped(note)

    def recovered(self) -> None:
        """An exception was handled, and everything is between two steps again."""
        if self._trace is not None:
            self._trace.recovered(time.monotonic())

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
