"""A whole engine whose decode steps run as graphs: the triton backend in the interpreter, replays as recordings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lamella import SamplingParams
from lamella.errors import InvariantError
from tests.helpers.graph_engine import (
    GRAPH_STEPS,
    PROMPT_LENGTHS,
    CheckedReplays,
    capture,
    make_engine,
    save_model,
    serve,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def test_replays_equal_eager_steps_and_the_references_tokens(folder: Path) -> None:
    with make_engine(folder, "reference") as engine:
        expected = serve(engine)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPT_LENGTHS)
    with make_engine(folder) as engine:
        maker = capture(engine)
        checked = CheckedReplays(engine.inspect().runner)
        assert serve(engine) == expected
    assert checked.steps == GRAPH_STEPS
    assert sum(maker.num_replays) == len(GRAPH_STEPS)


def test_a_block_table_that_starts_too_late_is_refused(folder: Path) -> None:
    """The check that eager steps make; the graph's kernels would read another's page."""
    with make_engine(folder, max_num_seqs=1) as engine:
        capture(engine)
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=3))
        engine.step()
        loaded = engine.inspect()
        plan = loaded.scheduler.schedule()
        late = tuple(dataclasses.replace(group, first_blocks=group.first_blocks + 1) for group in plan.groups)
        assert loaded.runner.graphs.size_for(plan) == 1
        with pytest.raises(InvariantError, match="a table must cover every block"):
            loaded.runner.execute(dataclasses.replace(plan, groups=late))
