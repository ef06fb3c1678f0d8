"""One of several engines that share requests: what a Ray actor runs."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine
from lamella.engine.outputs import RequestOutput
from lamella.engine.sampling_params import SamplingParams

# Outputs are handed over not more often than this: what goes between two calls costs about a millisecond.
_FEWEST_SECONDS = 0.02


class ReplicaState(NamedTuple):
    """process_id: on its machine."""

    max_model_len: int
    process_id: int


class QueuedRequest(NamedTuple):
    """What `Engine.add_request` takes."""

    request_id: str
    prompt: dict[str, Any]
    params: SamplingParams


class Replica:
    """Does nothing by itself: it steps while `run` is called, which takes a bounded time, so that a call that does not
    return tells of an engine that hangs."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def state(self) -> ReplicaState:
        """To be called first, and once: loads the engine, here and not above, as Ray hands over what a call raises, and
        of what an actor's making raises no more than its text."""
        self._engine = Engine(EngineConfig(**self._arguments))
        return ReplicaState(self._engine.max_model_len, os.getpid())

    def run(self, added: list[QueuedRequest], aborted: list[str], most_seconds: float) -> list[RequestOutput]:
        """Take requests in and out, then step until there are outputs, or for most_seconds and one step more."""
        engine, started = self._engine, time.monotonic()
        if aborted:
            engine.abort(aborted)
        for request in added:
            engine.add_request(request.request_id, request.prompt, request.params)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
            seconds = time.monotonic() - started
            if seconds > most_seconds or (outputs and seconds > _FEWEST_SECONDS):
                break
        return outputs

    def reset_prefix_cache(self) -> bool:
        return self._engine.reset_prefix_cache()

    def counters(self) -> dict[str, int]:
        stats = self._engine.stats()
        names = ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_steps", "num_preemptions")
        return {name: getattr(stats, name) for name in names}
