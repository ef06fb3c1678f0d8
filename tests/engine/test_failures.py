"""What an exception leaves behind, call by call: docs/failures.md."""

from __future__ import annotations

import gc
import signal
import weakref

import pytest

from lamella import LLM, Engine, RequestError, RequestOutputKind, SamplingParams
from tests.helpers.fake_engine import fake_models, foretell_answer
from tests.helpers.simulation import full, sliding
from tests.helpers.tiny_gemma import save_tiny_gemma

MAX_MODEL_LEN = 48
PROMPT = [(7 * position) % 49 + 1 for position in range(21)]
OTHER = [(11 * position + 3) % 49 + 1 for position in range(9)]
PARAMS = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
DELTA = SamplingParams(seed=5, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


class FailureError(Exception):
    pass


def fail(*_, **__):
    raise FailureError


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def model():
    with fake_models([full(), sliding(5)], max_model_len=MAX_MODEL_LEN, extra_slabs=40):
        yield


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(model, request):
    with Engine(model="fake", async_scheduling=request.param) as engine:
        yield engine


def answer(prompt=PROMPT, params=PARAMS, index=0):
    return foretell_answer(prompt, params, index, MAX_MODEL_LEN)


def run(engine):
    """Token ids and finish reason of each request's samples, from its last output."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = [(part.token_ids, part.finish_reason) for part in output.outputs]
    return last


def assert_empty(engine):
    engine.check_invariants()
    assert all(usage.owned == 0 for usage in engine.stats().kv_cache.pages.values())
    assert engine.reset_prefix_cache()
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**63),
        ("min_tokens", 2**63),
        ("logprobs", 2**64),
        ("temperature", 10**400),
        ("top_p", 10**400),
        ("min_p", "many"),
        ("presence_penalty", 10**400),
        ("frequency_penalty", 10**400),
        ("repetition_penalty", 10**400),
    ],
    ids=lambda value: value if isinstance(value, str) else "large",
)
def test_what_no_row_can_take_is_refused_and_harms_nobody(engine, name, value):
    """Even where the check of the parameters let it through."""
    engine.add_request("good", PROMPT, PARAMS)
    engine.step()
    bad = SamplingParams(max_tokens=3)
    object.__setattr__(bad, name, value)
    parsed = engine.parse(OTHER, PARAMS)
    with pytest.raises(RequestError, match=name):
        engine.add_parsed("bad", parsed, bad)
    assert engine.num_unfinished_requests == 1
    assert run(engine) == {"good": [(answer().token_ids, "length")]}
    assert_empty(engine)


@pytest.mark.parametrize("num_queued", range(4))
def test_of_an_interrupted_request_all_samples_are_queued_or_none(engine, monkeypatch, num_queued):
    engine.add_request("before", OTHER, PARAMS)
    engine.step()
    params = SamplingParams(n=3, seed=9, max_tokens=4, ignore_eos=True)
    queue, add = engine.inspect().scheduler.queue, engine.inspect().scheduler.queue.add
    left = [num_queued]

    def add_or_fail(*arguments):
        add(*arguments)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue, "add", add_or_fail)
        if num_queued < 3:
            with pytest.raises(KeyboardInterrupt):
                engine.add_request("three", PROMPT, params)
        else:
            engine.add_request("three", PROMPT, params)
    expected = {"before": [(answer(OTHER).token_ids, "length")]}
    if num_queued == 3:
        expected["three"] = [(answer(PROMPT, params, index).token_ids, "length") for index in range(3)]
    assert engine.num_unfinished_requests == len(expected)
    assert run(engine) == expected
    assert_empty(engine)


def test_a_failed_admission_does_not_change_the_seeds_of_others(model):
    tokens = []
    for fails in (False, True):
        with Engine(model="fake") as engine:
            if fails:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine.inspect().scheduler, "add", fail)
                    with pytest.raises(FailureError):
                        engine.add_request("a", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
            engine.add_request("b", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
            tokens.append(run(engine)["b"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("where", ["update", "schedule", "finish"])
def test_a_step_that_fails_on_the_host_is_undone(engine, monkeypatch, where):
    engine.add_request("a", PROMPT, PARAMS)
    stops = SamplingParams(seed=5, max_tokens=6, ignore_eos=True, stop=[answer().text.split()[3]])
    engine.add_request("b", PROMPT, stops)
    scheduler = engine.inspect().scheduler
    original, left = getattr(scheduler, where), [3 if where != "finish" else 0]

    def once(*arguments, **options):
        result = original(*arguments, **options)
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError
        return result

    monkeypatch.setattr(scheduler, where, once)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in engine.step()}
        engine.check_invariants()
    assert engine.stats().num_failed_steps == 1
    assert last["a"].token_ids == answer().token_ids
    expected = answer(params=stops)
    assert (last["b"].token_ids, last["b"].text, last["b"].stop_reason) == (*expected[:2], stops.stop[0])
    assert_empty(engine)


@pytest.fixture
def pythons_own_handler():
    """Of SIGINT, whatever started the tests: jobs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_handler")
def test_outputs_that_an_interrupt_kept_from_the_caller_come_with_the_next_step(engine):
    """The signal comes during the last step; it is raised when that is done."""
    runner = engine.inspect().runner
    compute, parts, num_interrupts = runner._compute, [], 0

    def compute_and_interrupt(plan, contexts):
        signal.raise_signal(signal.SIGINT)
        return compute(plan, contexts)

    runner._compute = compute_and_interrupt
    engine.add_request("a", PROMPT, DELTA)
    for _ in range(100):
        if not engine.has_unfinished_requests():
            break
        try:
            parts += [output.outputs[0] for output in engine.step()]
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts >= 6, "one for each computed step"
    assert [token for part in parts for token in part.token_ids] == answer().token_ids
    assert "".join(part.text for part in parts) == answer().text
    assert [part.finish_reason for part in parts] == [None] * 5 + ["length"]
    assert engine.stats().num_steps <= 8, "no step was done twice"
    assert_empty(engine)


def test_an_interrupted_abort_ends_all_or_none_and_its_outputs_are_not_lost(engine, monkeypatch):
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, DELTA)
    given = {"a": 0, "b": 0}
    while not all(given.values()):
        for output in engine.step():
            given[output.request_id] += len(output.outputs[0].token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(engine.inspect().scheduler, "finish", fail)
        with pytest.raises(FailureError):
            engine.abort(["a", "b"])
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == ["a", "b"]
    assert all(output.finished and output.outputs[0].finish_reason == "abort" for output in outputs)
    assert_empty(engine)


def test_recovery_that_fails_too_is_made_up_for_by_the_next_call(engine, monkeypatch):
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.inspect().scheduler, "update", fail)
        patch.setattr(engine.inspect().manager, "clear", fail)
        with pytest.raises(FailureError):
            engine.step()
        with pytest.raises(FailureError):
            engine.add_request("b", OTHER, PARAMS)
    engine.add_request("b", OTHER, PARAMS)
    assert run(engine) == {"a": [(answer().token_ids, "length")], "b": [(answer(OTHER).token_ids, "length")]}
    assert_empty(engine)


def test_a_roll_back_that_fails_empties_the_cache_instead(engine, monkeypatch):
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.inspect().runner, "launch", fail)
        patch.setattr(engine.inspect().scheduler, "roll_back", fail)
        while not engine.stats().num_failed_steps:
            engine.step()
    engine.check_invariants()
    assert run(engine) == {"a": [(answer().token_ids, "length")]}
    assert_empty(engine)


def test_generate_works_after_one_that_was_interrupted_twice(model, monkeypatch):
    llm = LLM("fake")
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.inspect().scheduler, "update", interrupt)
        patch.setattr(llm.engine, "abort", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, OTHER], PARAMS, use_tqdm=False)
    assert llm.engine.has_unfinished_requests()
    outputs = llm.generate([OTHER], PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [answer(OTHER).token_ids]
    assert_empty(llm.engine)


# A real model: log-probabilities and samples that come from arithmetic.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


ARGUMENTS = {"max_model_len": 96, "max_num_seqs": 4, "page_size": 4, "kv_cache_memory_bytes": 2**22}
REQUESTS = {
    "sampled": SamplingParams(n=2, temperature=0.9, top_p=0.9, seed=3, max_tokens=9, logprobs=3, ignore_eos=True),
    "penalised": SamplingParams(temperature=0.8, seed=4, max_tokens=9, presence_penalty=1.0,
                                repetition_penalty=1.3, ignore_eos=True),
    "delta": SamplingParams(temperature=1.2, seed=6, max_tokens=9, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA),
}  # fmt: skip


def outputs_of(engine, failing_call):
    """(token ids, text, log-probabilities by token) of each sample; None: nothing fails."""
    loaded = engine.inspect()
    for name, params in REQUESTS.items():
        engine.add_request(name, "the cat sat on the mat", params)
    update, calls = loaded.scheduler.update, [0]

    def failing(result):
        tokens = update(result)
        calls[0] += 1
        if calls[0] == failing_call:
            raise FailureError
        return tokens

    loaded.scheduler.update = failing
    collected, num_failed_before = {}, engine.stats().num_failed_steps
    while engine.has_unfinished_requests():
        for output in engine.step():
            for part in output.outputs:
                key = output.request_id, part.index
                before = collected.get(key, ([], "", [])) if output.request_id == "delta" else ([], "", [])
                new = [{token: one.logprob for token, one in entry.items()} for entry in part.logprobs or ()]
                collected[key] = (before[0] + part.token_ids, before[1] + part.text, before[2] + new)
    loaded.scheduler.update = update
    assert engine.stats().num_failed_steps - num_failed_before == (failing_call is not None)
    return collected


@pytest.mark.parametrize("is_async", [False, True])
def test_samples_are_drawn_again_as_they_were(folder, is_async):
    with Engine(model=folder, async_scheduling=is_async, **ARGUMENTS) as engine:
        expected = outputs_of(engine, None)
        for failing_call in (1, 2, 5, 9):
            found = outputs_of(engine, failing_call)
            assert {key: one[:2] for key, one in found.items()} == {key: one[:2] for key, one in expected.items()}
            for key, (_, _, logprobs) in found.items():
                for entry, expected_entry in zip(logprobs, expected[key][2], strict=True):
                    assert entry == pytest.approx(expected_entry, abs=1e-4)


@pytest.mark.parametrize("where", ["scheduler.schedule", "scheduler.update", "runner.launch"])
def test_close_gives_memory_back_though_the_error_is_kept(folder, monkeypatch, where):
    engine = Engine(model=folder, **ARGUMENTS)
    engine.add_request("a", "the cat", SamplingParams(temperature=0))
    engine.step()
    loaded = engine.inspect()
    arena = weakref.ref(loaded.runner.arena)
    weight = weakref.ref(loaded.runner.model.model.embed_tokens.weight)
    part, call = where.split(".")
    monkeypatch.setattr(getattr(loaded, part), call, fail)
    del loaded
    (output,) = [output for _ in range(4) for output in engine.step()]
    monkeypatch.undo()
    kept = output.error.__cause__
    assert isinstance(kept, FailureError)
    engine.close()
    gc.collect()
    assert arena() is None
    assert weight() is None
    assert kept.__traceback__ is not None
