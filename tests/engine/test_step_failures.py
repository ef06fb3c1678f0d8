"""What follows from failed steps, as values, and in an engine with requests that make steps fail."""

from __future__ import annotations

import pytest
import torch

from lamella import Engine, RequestOutputKind, SamplingParams
from lamella.engine.step_failures import (
    CALM,
    FEWEST_GOOD_STEPS,
    MOST_ALONE_IN_A_ROW,
    MOST_GOOD_STEPS,
    Position,
    StepFailures,
    is_out_of_memory,
)
from lamella.errors import InvariantError, LamellaError, StepFailedError
from tests.helpers.fake_engine import fake_models, foretell_answer, word
from tests.helpers.simulation import full, sliding

MAX_MODEL_LEN = 48
MAX_TOKENS = 64
BROKEN = ValueError("broken")
NAMES = ("a", "b", "c", "d", "e")


def after(failures: StepFailures, suspects, error: Exception = BROKEN, num_step_tokens: int = 40) -> StepFailures:
    positions = dict.fromkeys(suspects, (Position(30, 3),))
    return failures.after_failure(error, positions, num_step_tokens=num_step_tokens, max_num_tokens=MAX_TOKENS)


def good(failures: StepFailures, got_on=()) -> StepFailures:
    """A step after which these have a token more."""
    return failures.after_step(
        lambda name: (Position(31, 4) if name in got_on else Position(30, 3),), max_num_tokens=MAX_TOKENS
    )


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("expected scalar type Float"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_memory_that_ran_out(error, is_memory):
    assert is_out_of_memory(error) == is_memory


def test_torch_says_so_where_a_cpu_has_no_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_one_failure_is_forgotten_once_all_suspects_got_on():
    watching = after(CALM, "ab")
    assert watching.only is None
    assert good(watching, "a").is_watching
    assert good(good(watching, "a"), "ab") is CALM


def test_failures_at_different_places_of_a_prompt_are_not_the_same():
    failures = CALM
    for num_computed in range(0, 60, 10):
        failures = failures.after_failure(
            BROKEN, {"long": (Position(num_computed, 0),)}, num_step_tokens=10, max_num_tokens=MAX_TOKENS
        )
        assert failures.only is None
        failures = failures.after_step(
            lambda name, reached=num_computed + 10: (Position(reached, 0),), max_num_tokens=MAX_TOKENS
        )
        assert failures is CALM


def test_a_request_is_to_blame_once_it_fails_alone_twice_at_the_same_place():
    failures = after(after(CALM, "a"), "a")
    for num_computed in (30, 40, 50, 50):
        assert not failures.guilty
        failures = failures.after_failure(
            BROKEN, {"a": (Position(num_computed, 3),)}, num_step_tokens=10, max_num_tokens=MAX_TOKENS
        )
    assert set(failures.guilty) == {"a"}


def test_alone_only_a_token_clears():
    """For a prompt that is computed again may be cut into other chunks."""
    alone = after(after(CALM, "a"), "a")
    further = alone.after_step(lambda name: (Position(99, 3),), max_num_tokens=MAX_TOKENS)
    assert further.only == {"a"}
    assert good(further, "a").only is None


def find(guilty: set[str], names=NAMES) -> tuple[StepFailures, int]:
    """What is known when nobody has still to run alone, and how many steps failed. A step fails that has a guilty
    one in it; else all in it get on."""
    failures, num_failed, got_on = after(after(CALM, names), names), 2, set()
    while failures.groups:
        running = set(failures.only)
        if running & guilty:
            failures, num_failed = after(failures, running), num_failed + 1
        else:
            got_on |= running
            failures = good(failures, got_on)
    return failures, num_failed


@pytest.mark.parametrize("guilty_names", ["a", "c", "e", "bd", "".join(NAMES)])
def test_the_guilty_are_found_by_halves(guilty_names):
    guilty = set(guilty_names)
    failures, num_failed = find(guilty)
    assert set(failures.guilty) == guilty
    assert num_failed <= 2 + len(guilty) * (2 + 3), "2 tries alone and at most 3 halvings for each"
    for name, error in failures.guilty.items():
        assert isinstance(error, LamellaError)
        assert error.__cause__ is BROKEN
        assert f"request {name!r} has ended" in str(error)
        assert "ValueError: broken" in str(error)
    assert not failures.is_watching


def test_one_failure_alone_is_no_proof():
    failures = after(after(CALM, "a"), "a")
    assert failures.only == {"a"}
    failures = after(failures, "a")
    assert not failures.guilty
    assert good(failures, "a").guilty == {}
    assert set(after(failures, "a").guilty) == {"a"}


def test_where_nobody_is_found_steps_get_smaller_and_all_are_suspects():
    failures, num_failed = find(set())
    assert num_failed == 2
    assert (failures.guilty, failures.most_tokens, failures.suspects_all) == ({}, 20, True)


def test_where_nothing_works_not_every_request_is_tried():
    names = tuple(f"r{index}" for index in range(500))
    failures, num_failed = find(set(names), names)
    assert set(failures.guilty) == set(names)
    assert num_failed <= 2 + 2 * MOST_ALONE_IN_A_ROW + 2 * 9 + MOST_ALONE_IN_A_ROW
    assert f"and so did those of {MOST_ALONE_IN_A_ROW} requests that ran alone" in str(failures.guilty[names[-1]])


def test_memory_that_ran_out_halves_the_steps_until_they_cannot_be_smaller():
    failures, sizes = CALM, []
    for _ in range(6):
        failures = after(failures, "ab", MemoryError(), num_step_tokens=failures.most_tokens or 40)
        sizes.append(failures.most_tokens)
    assert sizes == [20, 10, 5, 2, 1, 1]
    assert failures.only is not None, "from then on it is a failure like any other"


def test_a_step_of_one_token_whose_memory_ran_out_gets_a_few_tries():
    failures, num_tries = CALM, 0
    while not failures.guilty:
        failures, num_tries = after(failures, "a", MemoryError(), num_step_tokens=1), num_tries + 1
    assert num_tries == 2 + 3, "limits 8 and 1, then as any failure of one that runs alone"


def test_steps_grow_again_and_more_slowly_after_each_relapse():
    failures = good(after(CALM, "a", MemoryError()), "a")
    assert failures.most_tokens == 20
    waits = []
    for _ in range(3):
        num_good = 0
        while failures.most_tokens == 20:
            failures, num_good = good(failures), num_good + 1
        waits.append(num_good)
        assert failures.most_tokens == 40
        failures = good(after(failures, "a", MemoryError(), num_step_tokens=40), "a")
    assert waits == [FEWEST_GOOD_STEPS - 1, 2 * FEWEST_GOOD_STEPS - 1, 4 * FEWEST_GOOD_STEPS - 1]
    for _ in range(3 * MOST_GOOD_STEPS):
        failures = good(failures)
    assert failures is CALM


def test_a_second_failure_of_memory_does_not_blame():
    failures = CALM
    for _ in range(3):
        failures = good(after(failures, NAMES, MemoryError()), NAMES)
    assert not failures.guilty
    assert failures.only is None


# In an engine


class Culprit:
    """Makes steps fail, at a phase, that certain requests are in."""

    def __init__(
        self, engine: Engine, guilty=(), phase: str = "result", error=BROKEN, most_tokens: int = 10**6
    ) -> None:
        self.guilty, self._phase, self._error, self._most_tokens = set(guilty), phase, error, most_tokens
        self.num_failed = 0
        self.sizes: list[int] = []
        engine.inspect().runner.disturb = self

    def __call__(self, phase, plan, requests) -> None:
        if phase != self._phase:
            return
        self.sizes.append(len(plan.token_ids))
        names = {request.request_id for request in requests}
        if names & self.guilty or len(plan.token_ids) > self._most_tokens:
            self.num_failed += 1
            raise self._error


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request):
    with fake_models([full(), sliding(5)], max_model_len=MAX_MODEL_LEN, extra_slabs=60, max_num_seqs=6):
        engine = Engine(model="fake", async_scheduling=request.param)
    yield engine
    engine.check_invariants()
    assert not engine.has_unfinished_requests()
    assert all(usage.owned == 0 for usage in engine.stats().pages.values())
    assert engine.reset_prefix_cache()
    engine.close()


PROMPTS = {
    name: [(7 * position + index) % 49 + 1 for position in range(9 + 3 * index)] for index, name in enumerate("abcdef")
}
PARAMS = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)


def ask(engine, names="abcdef", params=PARAMS) -> None:
    for name in names:
        engine.add_request(name, PROMPTS[name], params)


def run(engine):
    last, num_calls = {}, 0
    while engine.has_unfinished_requests():
        num_calls += 1
        assert num_calls < 500
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
    return last


def assert_right(last, names) -> None:
    for name in names:
        part = last[name].outputs[0]
        assert last[name].error is None
        assert (part.token_ids, part.text) == foretell_answer(PROMPTS[name], PARAMS, 0, MAX_MODEL_LEN)[:2], name


@pytest.mark.parametrize("guilty", ["a", "f", "be"])
@pytest.mark.parametrize("phase", ["launch", "result"])
def test_guilty_requests_end_and_all_others_go_on(engine, phase, guilty):
    culprit = Culprit(engine, guilty, phase)
    ask(engine)
    last = run(engine)
    assert_right(last, set("abcdef") - set(guilty))
    for name in guilty:
        assert last[name].finished
        assert isinstance(last[name].error, StepFailedError)
        assert last[name].error.__cause__ is BROKEN
        assert [part.finish_reason for part in last[name].outputs] == ["error"]
        assert last[name].outputs[0].token_ids == []
    assert engine.stats().num_failed_steps == culprit.num_failed <= 2 + len(guilty) * (2 + 3)


def test_what_came_before_is_kept(engine):
    """A request that makes steps fail from its third token on, for two samples and outputs in parts."""
    params = SamplingParams(n=2, seed=5, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    culprit = Culprit(engine)
    ask(engine, "b", params)
    parts: dict[int, list] = {0: [], 1: []}
    while min(map(len, parts.values())) < 2:
        for output in engine.step():
            for part in output.outputs:
                parts[part.index] += part.token_ids
    culprit.guilty.add("b")
    ask(engine, "ac")
    outputs = {"a": [], "b": [], "c": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for output in outputs["b"]:
        for part in output.outputs:
            parts[part.index] += part.token_ids
    for index in (0, 1):
        expected = foretell_answer(PROMPTS["b"], params, index, MAX_MODEL_LEN).token_ids
        assert 2 <= len(parts[index]) < len(expected)
        assert parts[index] == expected[: len(parts[index])]
    assert isinstance(outputs["b"][-1].error, StepFailedError)
    assert_right({name: outputs[name][-1] for name in "ac"}, "ac")


@pytest.mark.parametrize("error", [MemoryError("no"), torch.OutOfMemoryError("no")], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("most_tokens", [1, 2, 7])
def test_where_memory_runs_out_steps_are_split(engine, error, most_tokens):
    culprit = Culprit(engine, error=error, phase="launch", most_tokens=most_tokens)
    ask(engine)
    last = run(engine)
    assert_right(last, "abcdef")
    runner = engine.inspect().runner
    assert engine.stats().num_failed_steps == culprit.num_failed == runner.num_trims
    assert max(culprit.sizes) > most_tokens
    assert culprit.sizes[-1] <= most_tokens


def test_steps_are_as_large_as_ever_once_there_is_memory_again(engine):
    culprit = Culprit(engine, error=MemoryError("no"), phase="launch", most_tokens=3)
    ask(engine, "a")
    run(engine)
    del culprit
    culprit = Culprit(engine, phase="launch")
    for _ in range(20):
        engine.reset_prefix_cache()
        ask(engine, "abcdef")
        run(engine)
    assert max(culprit.sizes) == 16, "the whole chunk"


@pytest.mark.parametrize("where", ["schedule", "update"])
def test_a_fault_of_no_request_ends_those_that_it_meets(engine, monkeypatch, where):
    def broken(*_):
        raise BROKEN

    ask(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.inspect().scheduler, where, broken)
        last = run(engine)
    assert set(last) == set("abcdef")
    assert all(isinstance(output.error, StepFailedError) for output in last.values())
    ask(engine)
    assert_right(run(engine), "abcdef")


def test_a_request_that_is_aborted_while_suspects_run_alone_does_not_hold_up_others(engine):
    culprit = Culprit(engine, "a")
    ask(engine)
    while engine._failures.only is None or "a" not in engine._failures.only:
        engine.step()
    aborted = engine.abort(sorted(engine._failures.only))
    assert {output.outputs[0].finish_reason for output in aborted} == {"abort"}
    culprit.guilty.clear()
    ended = {output.request_id for output in aborted}
    engine.add_request("late", PROMPTS["a"], PARAMS)
    last = run(engine)
    assert last.keys() == {*"abcdef", "late"} - ended
    assert_right(last, set("abcdef") - ended)
    assert last["late"].outputs[0].token_ids == foretell_answer(PROMPTS["a"], PARAMS, 0, MAX_MODEL_LEN).token_ids


def test_who_comes_while_suspects_run_alone_waits_and_is_not_blamed(engine):
    Culprit(engine, "c")
    ask(engine, "abc")
    while engine._failures.only is None:
        engine.step()
    ask(engine, "def")
    last = run(engine)
    assert_right(last, "abdef")
    assert last["c"].error is not None


def test_an_output_that_cannot_be_made_is_left_out(engine, monkeypatch):
    """The request fails where its text is made; the tokens before can still be told, and its id is free again."""
    ask(engine)
    last = {}
    while "b" not in last or len(last["b"].outputs[0].token_ids) < 2:
        last |= {output.request_id: output for output in engine.step()}
    make = engine._outputs._detokenizer

    def broken(conversation, sample):
        if conversation.request_id == "b":
            raise BROKEN
        return make(conversation, sample)

    with monkeypatch.context() as patch:
        patch.setattr(engine._outputs, "_detokenizer", broken)
        engine._outputs._conversations["b"].samples[0].detokenizer = None
        last |= run(engine)
    assert_right(last, "acdef")
    expected = foretell_answer(PROMPTS["b"], PARAMS, 0, MAX_MODEL_LEN).token_ids
    (part,) = last["b"].outputs
    assert last["b"].error.__cause__ is BROKEN
    assert (part.token_ids, part.text, part.finish_reason) == (expected[:2], "", "error")
    ask(engine, "b")
    again = run(engine)
    assert_right(again, "b")
    assert again["b"].outputs[0].text == "".join(map(word, expected))


def test_contradictions_are_raised_where_they_are_looked_for(monkeypatch):
    with fake_models([full()], max_model_len=MAX_MODEL_LEN), Engine(model="fake") as engine:
        object.__setattr__(engine.config, "check_invariants", True)
        ask(engine, "a")
        with monkeypatch.context() as patch:

            def contradiction(*_):
                raise InvariantError("two owners")

            patch.setattr(engine.inspect().scheduler, "update", contradiction)
            for _ in range(9):
                with pytest.raises(InvariantError, match="two owners"):
                    engine.step()
        assert_right(run(engine), "a")
