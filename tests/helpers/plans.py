"""Plans of known models, and their text as words."""

from __future__ import annotations

from lamella.planner.known_models import known_specs
from lamella.planner.plan import PlanOptions, plan_memory

OPTIONS = PlanOptions(memory_bytes=80 << 30, context_tokens=32_768, chunk_tokens=8192)


def plan_of(name, options=OPTIONS):
    return plan_memory(name, known_specs(name, 2), options)


def requests_of(plan):
    return {outcome.system: outcome.num_requests for outcome in plan.outcomes}


def lines_of(text):
    return [line.split() for line in text.splitlines()]
