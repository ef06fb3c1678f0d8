"""Requests served one after another by a Simulation, and arenas of an exact size."""

from __future__ import annotations

import numpy as np

from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.sizing import request_slabs
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, num_tokens).tolist()


def step(simulation: Simulation, num_steps: int) -> None:
    for _ in range(num_steps):
        simulation.step()


def run_all(simulation: Simulation, max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if not simulation.scheduler.has_requests:
            return
        simulation.step()
    raise AssertionError(f"not finished after {max_steps} steps")


def serve(simulation: Simulation, prompt, num_tokens: int = 1, salt: str | None = None) -> int | None:
    """Run one more request to its end and check its answer. Returns the prompt tokens that it found cached."""
    request_id = f"r{len(simulation.requests)}"
    request = simulation.add(request_id, prompt, num_tokens, salt)
    run_all(simulation)
    assert simulation.outputs[request_id] == foretell(salt, prompt, num_tokens)
    return request.num_cached_tokens


def arena_of(num_slabs: int, specs, *, page_tokens: int, max_model_len: int, **options) -> Simulation:
    """A Simulation whose arena has exactly `num_slabs` slabs, the null slab included."""
    layout = build_layout(specs, page_tokens=page_tokens)
    smallest = request_slabs(
        layout,
        max_model_len=max_model_len,
        chunk_tokens=min(page_tokens, options.get("chunk_tokens", 16)),
        interval_tokens=options.get("interval_tokens") or page_tokens,
    )
    return Simulation(
        specs, page_tokens=page_tokens, max_model_len=max_model_len, extra_slabs=num_slabs - 1 - smallest, **options
    )
