"""One self-contained HTML page of a trace: who had which slab of the KV memory when, and what happened meanwhile."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.errors import ConfigError
from lamella.observability.trace_file import read_trace

TEMPLATE = Path(__file__).with_name("arena_picture.html")
PHASES = ("queued", "prefill", "decode", "preempted")
EVICTIONS = ("resume points evicted", "spare pages evicted", "dead pages freed", "slabs moved")


@dataclass(slots=True)
class ArenaStory:
    """What the picture shows. Times are microseconds since the trace began.

    slabs: [slab, start, end, group, request], the request None where only the cache had the slab; requests are places
    in `requests`. phases: [request, phase, start, end], phases being places in PHASES. hits: [time, request, tokens,
    prompt tokens]. slides: [time, rows]. evictions: [time, what, how many].
    """

    title: str
    num_slabs: int
    slab_bytes: int
    groups: list[dict[str, Any]]
    end: float = 0.0
    requests: list[str] = field(default_factory=list)
    slabs: list[list[Any]] = field(default_factory=list)
    phases: list[list[Any]] = field(default_factory=list)
    hits: list[list[Any]] = field(default_factory=list)
    slides: list[list[Any]] = field(default_factory=list)
    evictions: list[list[Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"phaseNames": PHASES}


def read_story(events: Iterable[dict[str, Any]], place: str) -> ArenaStory:
    """The story of a trace's events. place: the file, for the ConfigError of a trace without a KV memory."""
    story: ArenaStory | None = None
    held: dict[int, tuple[float, int, int | None]] = {}  # slab -> since when, group, request
    begun: dict[tuple[str, str], float] = {}
    indices: dict[str, int] = {}

    def index_of(request: str) -> int:
        return indices.setdefault(request, len(indices))

    for event in events:
        args = event.get("args", {})
        if event["name"] == "arena layout":
            story = ArenaStory(args["title"], args["num_slabs"], args["slab_bytes"], args["groups"])
        if story is None or "ts" not in event:
            continue
        now, name = float(event["ts"]), event["name"]
        story.end = max(story.end, now + float(event.get("dur", 0.0)))
        if name == "arena":
            for slab, group, request in args["changes"]:
                if slab in held:
                    since, owner, user = held.pop(slab)
                    story.slabs.append([slab, since, now, owner, user])
                if group >= 0:
                    held[slab] = now, group, None if request is None else index_of(request)
        elif name == "windows slid":
            story.slides.append([now, args["rows"]])
        elif name == "prefix hit":
            story.hits.append([now, index_of(args["request"]), args["tokens"], args["prompt_tokens"]])
        elif name in EVICTIONS:
            story.evictions.append([now, name, next(iter(args.values()))])
        elif name in PHASES and event["ph"] == "b":
            begun[event["id"], name] = now
        elif name in PHASES and event["ph"] == "e":
            start = begun.pop((event["id"], name), 0.0)
            story.phases.append([index_of(event["id"]), PHASES.index(name), start, now])
    if story is None:
        raise ConfigError(f"{place} tells of no KV memory; give a file that profile= wrote")
    for slab, (since, group, request) in held.items():
        story.slabs.append([slab, since, story.end, group, request])
    for (request, name), start in begun.items():  # a trace that was never closed
        story.phases.append([index_of(request), PHASES.index(name), start, story.end])
    story.requests = list(indices)
    return story


def draw_arena(trace: str | Path, output: str | Path) -> ArenaStory:
    """Write the picture of a trace file. Returns what it shows. Raises ConfigError where one cannot be read or the
    other cannot be written."""
    story = read_story(read_trace(trace), str(trace))
    data = json.dumps(story.to_json(), separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("{{title}}", html.escape(story.title)).replace("{{data}}", data)
    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output={str(output)!r} cannot be written ({error}); give another file") from error
    return story
