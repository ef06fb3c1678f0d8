"""Whatever is raised at whatever line of a step, of an admission or of an abort: the engine goes on, and every request
gets what its prompt foretells. No line is an exception from that.

The lines are those of engine/ and kv_cache/ that a life of an engine comes to: with steps in flight and without, in
ample and in scarce memory, in both orders, and, for the lines that recover, with steps that fail of themselves.
"""

from __future__ import annotations

import zlib

import pytest

from tests.helpers.interrupted_lives import SETTINGS, Life, Line, lines_of, problems_with


def turn_of(line: Line) -> int:
    """Which of the settings that come to it tries the line, by the file's name and number alone."""
    return zlib.crc32(str(line).encode())


@pytest.fixture(scope="module")
def lines():
    """Per setting what it comes to."""
    return {setting: lines_of(setting) for setting in SETTINGS}


def test_the_lives_come_to_what_can_happen():
    lives = {setting: Life(setting.engine(), guilty=setting.guilty) for setting in SETTINGS}
    for life in lives.values():
        life.run()
        life.check()
    stats = {setting: life.engine.stats() for setting, life in lives.items()}
    for setting, life in lives.items():
        assert life.num_raised == 0
        # Those that fail by themselves, and at least four with the guilty request, which may be the same.
        assert (stats[setting].num_failed_steps > 4) == bool(setting.fails_at)
        if setting.tight:
            assert stats[setting].num_preemptions
            assert stats[setting].kv_cache.num_evicted_spare_pages
        elif not setting.fails_at:
            assert stats[setting].kv_cache.hits.num_replay_requests
        assert stats[setting].kv_cache.hits.num_full_requests
        assert stats[setting].kv_cache.num_evicted_resume_points
    runners = {setting: life.engine.inspect().runner for setting, life in lives.items()}
    for is_async in (False, True):
        assert any(runners[one].num_moved_pages for one in SETTINGS if one.is_async == is_async and one.tight)
        for is_tight in (False, True):
            alike = [one for one in SETTINGS if (one.is_async, bool(one.tight)) == (is_async, is_tight)]
            assert any(stats[one].kv_cache.hits.num_partial_requests for one in alike)
            assert any(runners[one].num_copied_pages for one in alike)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_an_exception_at_any_line_loses_nothing(setting, lines):
    """Every second line in one of the settings, and where steps fail of themselves every sixth; the full matrix has
    each in all of them."""
    mine, part = [], 6 if setting.fails_at else 2
    for line in lines[setting].counts:
        coming_to_it = [one for one in SETTINGS if line in lines[one].counts]
        if turn_of(line) // 8 % part == 0 and coming_to_it[turn_of(line) % len(coming_to_it)] == setting:
            mine.append(line)
    assert problems_with(setting, mine, lines[setting], num_together=8) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_an_exception_at_any_line_alone_loses_nothing(setting, part, lines):
    """Each line in each setting, nothing else being raised, at an occurrence drawn at random."""
    mine = [line for line in lines[setting].counts if turn_of(line) % 8 == part]
    assert problems_with(setting, mine, lines[setting], num_together=1, seed=part) == []
