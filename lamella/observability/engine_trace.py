"""What `profile=` writes: steps and their parts, the lives of requests, and what happened in the KV memory.

While a step runs only tuples are noted; they become text in batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lamella.kv_cache.counters import CacheEvents, SlabUse
from lamella.kv_cache.layout import KVLayout
from lamella.observability.engine_snapshot import ObservedRequest
from lamella.observability.trace_file import TraceFile

PROCESS = 1
STEPS_THREAD = 1
FLUSH_STEPS = 256
FLUSH_SECONDS = 1.0
# At most this share of the time goes into looking at who has which slab.
LOOK_SHARE = 0.02
FREE, CACHED = -1, -1


class Watched(Protocol):
    """What is looked at after a step: a block manager."""

    def events(self) -> CacheEvents: ...

    def slab_use(self) -> SlabUse: ...


class Part(NamedTuple):
    """A part of a call of `step`: its name, and when it began and ended."""

    name: str
    start: float
    end: float
    details: Mapping[str, float] | None = None  # of a launch: seconds by kind of work


class StepNote(NamedTuple):
    """One call of `step`, with what is so at its end."""

    number: int
    start: float
    end: float
    parts: list[Part]
    num_tokens: int
    num_running: int
    num_waiting: int


class EngineTrace:
    """One engine's trace. Times are of `time.monotonic`.

    An event `arena` says which slabs changed hands since the one before: [slab, group, request], the group -1 where the
    slab is free, the request null where only the cache has it.
    """

    def __init__(self, file: TraceFile, layout: KVLayout, num_slabs: int, manager: Watched, *, title: str) -> None:
        self._file, self._manager, self._layout = file, manager, layout
        self._start = time.monotonic()
        self._events: list[str] = []
        self._steps: list[tuple[StepNote, CacheEvents]] = []
        self._flushed = self._look_due = self._start
        self._phases: dict[ObservedRequest, str] = {}
        self._rows: dict[int, ObservedRequest] = {}  # of the requests that run
        self._running: object = None
        self._seen = manager.events()
        self._slabs: dict[int, tuple[int, str | None]] = {}
        self._meta("process_name", {"name": f"lamella {title}"})
        self._meta("thread_name", {"name": "steps"}, thread=STEPS_THREAD)
        groups = [
            {"name": group.name, "pages_per_slab": group.pages_per_slab, "is_windowed": group.spec.is_windowed}
            for group in layout.groups
        ]
        about = {"title": title, "num_slabs": num_slabs, "slab_bytes": layout.slab_bytes, "groups": groups}
        self._instant("arena layout", "kv", self._start, about)
        self._flush(self._start)

    # Requests

    def arrived(self, requests: Iterable[ObservedRequest]) -> None:
        for request in requests:
            args = {"prompt_tokens": request.num_prompt_tokens}
            self._async("b", "request", request, request.arrival_time, args)
            self._enter(request, "queued", request.arrival_time)

    def running(
        self, token: object, rows: Sequence[int], request_in: Callable[[int], ObservedRequest], now: float
    ) -> None:
        """A step is planned. token: the same object as before where no request came or went; None: one may have. rows:
        those that run."""
        if token is not None and token is self._running:
            return
        self._running = token
        before, self._rows = self._rows, {row: request_in(row) for row in rows}
        runs = set(self._rows.values())
        for request in before.values():
            if request not in runs and request in self._phases:
                self._enter(request, "preempted", now)
        for request in self._rows.values():
            phase = self._phases.get(request)
            if phase == "queued":
                started = request.first_scheduled_time or now
                self._enter(request, "prefill", started)
                if request.num_cached_tokens:
                    args = {
                        "request": name_of(request),
                        "tokens": request.num_cached_tokens,
                        "prompt_tokens": request.num_prompt_tokens,
                    }
                    self._instant("prefix hit", "kv", started, args)
            elif phase == "preempted":
                self._enter(request, "prefill", now)

    def got_tokens(self, requests: Sequence[ObservedRequest], now: float) -> None:
        """Requests got tokens: those whose prompts were being computed decode from now on."""
        if "prefill" in self._phases.values():
            for request in dict.fromkeys(requests):
                if self._phases.get(request) == "prefill":
                    self._enter(request, "decode", now)

    def ended(self, request: ObservedRequest, num_output_tokens: int, now: float) -> None:
        phase = self._phases.pop(request, None)
        if phase is None:
            return
        self._async("e", phase, request, now)
        args = {
            "finish_reason": request.finish_reason,
            "output_tokens": num_output_tokens,
            "cached_tokens": request.num_cached_tokens or 0,
            "preemptions": request.num_preemptions,
        }
        self._async("e", "request", request, now, args)

    def _enter(self, request: ObservedRequest, phase: str, now: float) -> None:
        before = self._phases.get(request)
        if before is not None:
            self._async("e", before, request, now)
        self._phases[request] = phase
        self._async("b", phase, request, now)

    # Steps and memory

    def stepped(self, note: StepNote) -> None:
        self._steps.append((note, self._manager.events()))
        if note.end >= self._look_due or not note.num_running:
            self._look(note.end)
        if len(self._steps) >= FLUSH_STEPS or note.end - self._flushed >= FLUSH_SECONDS:
            self._flush(note.end)

    def recovered(self, now: float) -> None:
        """An exception was handled: steps that were in flight are undone, and requests wait again."""
        self._running = None
        self._instant("recovered", "step", now, {})

    def close(self) -> None:
        """Write what is left, and end the file. Requests that still run end with the trace."""
        now = time.monotonic()
        for request in list(self._phases):
            self.ended(request, 0, now)
        self._look(now)
        self._flush(now)
        self._file.close()

    def _tell(self, events: CacheEvents, now: float) -> None:
        """Say what has changed since `_seen`."""
        seen, self._seen = self._seen, events
        for index, group in enumerate(self._layout.groups):
            used, owned = events.num_used[index], events.num_owned[index]
            if (used, owned) != (seen.num_used[index], seen.num_owned[index]):
                args = f'{{"owned":{owned},"cached":{used - owned}}}'
                self._events.append(
                    f'{{"ph":"C","name":"pages {group.name}","pid":{PROCESS},"ts":{self._at(now)},"args":{args}}}'
                )
        happened = {
            "windows slid": ("rows", events.num_slides - seen.num_slides),
            "slabs moved": ("slabs", events.num_slab_moves - seen.num_slab_moves),
            "resume points evicted": ("points", events.num_evicted_resume_points - seen.num_evicted_resume_points),
            "spare pages evicted": ("pages", events.num_evicted_spare_pages - seen.num_evicted_spare_pages),
            "dead pages freed": ("pages", events.num_dead_full_pages - seen.num_dead_full_pages),
        }
        for name, (unit, count) in happened.items():
            if count > 0:
                self._instant(name, "kv", now, {unit: count})

    def _look(self, now: float) -> None:
        """See who has which slab, and say what is new of it."""
        started = time.monotonic()
        use = self._manager.slab_use()
        lent = (use.groups >= 0).nonzero()[0].tolist()
        groups, rows = use.groups.tolist(), use.rows.tolist()
        names = {row: name_of(request) for row, request in self._rows.items()}
        slabs = {slab: (groups[slab], names.get(rows[slab])) for slab in lent}
        changes = [
            [slab, group, name] for slab, (group, name) in slabs.items() if self._slabs.get(slab) != (group, name)
        ]
        changes += [[slab, FREE, None] for slab in self._slabs if slab not in slabs]
        self._slabs = slabs
        if changes:
            self._instant("arena", "kv", now, {"changes": changes})
        self._look_due = now + (time.monotonic() - started) / LOOK_SHARE

    # Text

    def _at(self, moment: float) -> str:
        """Microseconds since the trace began; what came before that is at its beginning."""
        return f"{max(0.0, (moment - self._start) * 1e6):.1f}"

    def _meta(self, name: str, args: dict[str, Any], thread: int = 0) -> None:
        event = {"ph": "M", "name": name, "pid": PROCESS, "tid": thread, "args": args}
        self._events.append(json.dumps(event, separators=(",", ":")))

    def _instant(self, name: str, category: str, now: float, args: dict[str, Any]) -> None:
        self._events.append(
            f'{{"ph":"i","s":"p","name":"{name}","cat":"{category}","pid":{PROCESS},"tid":{STEPS_THREAD},'
            f'"ts":{self._at(now)},"args":{json.dumps(args, separators=(",", ":"))}}}'
        )

    def _async(
        self, kind: str, name: str, request: ObservedRequest, now: float, args: dict[str, Any] | None = None
    ) -> None:
        event = (
            f'{{"ph":"{kind}","name":"{name}","cat":"request","id":{json.dumps(name_of(request))},"pid":{PROCESS},'
            f'"tid":{STEPS_THREAD},"ts":{self._at(now)}'
        )
        self._events.append(event + ("}" if args is None else f',"args":{json.dumps(args)}}}'))

    def _slice(self, name: str, start: float, seconds: float, args: str = "") -> None:
        self._events.append(
            f'{{"ph":"X","name":"{name}","cat":"step","pid":{PROCESS},"tid":{STEPS_THREAD},"ts":{self._at(start)},'
            f'"dur":{max(0.0, seconds * 1e6):.1f}{args}}}'
        )

    def _flush(self, now: float) -> None:
        for note, happened in self._steps:
            if happened != self._seen:
                self._tell(happened, note.end)
            args = (
                f',"args":{{"step":{note.number},"tokens":{note.num_tokens},"running":{note.num_running},'
                f'"waiting":{note.num_waiting}}}'
            )
            self._slice("step", note.start, note.end - note.start, args)
            for name, start, end, details in note.parts:
                self._slice(name, start, end - start)
                for kind, seconds in (details or {}).items():
                    if seconds > 0:
                        # The sums of a step, one behind the other: layers take turns with products and attention.
                        self._slice(kind, start, seconds)
                        start += seconds
        self._steps.clear()
        self._file.write(self._events)
        self._events.clear()
        self._flushed = now


def name_of(request: ObservedRequest) -> str:
    """The request's id, and the number of the sample where it is not the first."""
    index = request.sample_index
    return f"{request.request_id}#{index}" if index else request.request_id
