"""The line says what happened since the line before, and pauses are left out."""

import dataclasses
import logging

import pytest

from lamella.kv_cache.counters import GroupUsage, HitCounters, KVCacheCounters
from lamella.observability.engine_snapshot import EngineSnapshot
from lamella.observability.log_line import LogLine

START = EngineSnapshot(
    num_running=3, num_waiting=2, num_prompt_tokens=100, num_cached_tokens=40, num_generated_tokens=7,
    num_preemptions=0, num_steps=5, page_bytes={"full": 10}, arena_bytes=1000, num_proposed_at=(), num_accepted_at=(),
    kv_cache=KVCacheCounters({"full": GroupUsage(25, 3, 2)}, 0, 0, 0, 0, 0, 0, HitCounters()),
)  # fmt: skip


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, logger="lamella.stats")
    return caplog


def lines(told):
    return [record.getMessage() for record in told.records]


def test_rates_are_of_the_time_since_the_line_before(told):
    now = START
    line = LogLine(lambda: now, interval_seconds=4.0)
    line.step(10.0)
    now = dataclasses.replace(now, num_prompt_tokens=300, num_cached_tokens=90, num_generated_tokens=107)
    line.step(12.0)
    assert lines(told) == []
    line.step(15.0)
    assert lines(told) == [
        "prompts 40.0 tokens/s, generation 20.0 tokens/s, 3 running, 2 waiting, KV memory in use 25.0 %, "
        "prefix hits 25.0 %"
    ]
    now = dataclasses.replace(now, num_generated_tokens=147)
    line.step(19.0)
    assert lines(told)[1:] == [
        "prompts 0.0 tokens/s, generation 10.0 tokens/s, 3 running, 2 waiting, KV memory in use 25.0 %, "
        "prefix hits no new prompts"
    ]


def test_a_pause_begins_anew(told):
    line = LogLine(lambda: START, interval_seconds=4.0)
    line.step(10.0)
    line.step(100.0)  # hours without a request are no slow step
    assert lines(told) == []
    line.step(104.5)
    assert len(lines(told)) == 1


def test_nobody_asks_the_engine_where_nobody_reads(caplog):
    caplog.set_level(logging.WARNING, logger="lamella.stats")
    line = LogLine(lambda: pytest.fail("asked"), interval_seconds=0.0)
    line.step(10.0)
    line.step(20.0)
