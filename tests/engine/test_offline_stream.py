"""Prompts from iterators, outputs as they finish, bad rows in their place: engines whose answers are foretold."""

from __future__ import annotations

import gc
import itertools
import signal
import threading

import numpy as np
import pytest

from lamella import (
    LLM,
    EngineClosedError,
    InterruptedRequestError,
    LamellaError,
    RequestError,
    RequestFailedError,
    SamplingParams,
)
from tests.helpers.fake_engine import fake_models, foretell_answer
from tests.helpers.simulation import full, sliding
from tests.helpers.tiny_gemma import save_tiny_gemma

MAX_MODEL_LEN = 48
PARAMS = SamplingParams(seed=5, max_tokens=3, ignore_eos=True)


@pytest.fixture
def llm():
    with (
        fake_models([full(), sliding(5)], max_model_len=MAX_MODEL_LEN, extra_slabs=40, scheduling_policy="prefix"),
        LLM("fake", async_scheduling=False) as llm,
    ):
        yield llm


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    with LLM(str(path), max_model_len=128, kv_cache_memory_bytes=2**22, max_num_seqs=4) as llm:
        yield llm


def prompts_of(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, 50, int(rng.integers(1, 20))).tolist() for _ in range(count)]


def right(output, prompt, params=PARAMS) -> bool:
    answer = foretell_answer(prompt, params, 0, MAX_MODEL_LEN)
    (found,) = output.outputs
    return (found.token_ids, found.text, found.finish_reason) == answer[:3] and output.error is None


def is_idle(llm) -> bool:
    llm.engine.check_invariants()
    owned = [usage.owned for usage in llm.engine.stats().pages.values()]
    return not llm.engine.has_unfinished_requests() and owned == [0] * len(owned)


class Watched:
    """An iterator that knows how many were taken of it."""

    def __init__(self, items):
        self.items, self.num_taken = iter(items), 0

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.items)
        self.num_taken += 1
        return item


class Dataset:
    """As data sets are: neither a list nor an iterator, and with a length."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


def test_a_generators_prompts_give_what_a_list_gives(llm):
    prompts = prompts_of(60)
    for given in ((prompt for prompt in prompts), Dataset(prompts), iter(prompts)):
        outputs = llm.generate(given, PARAMS, use_tqdm=False, lookahead_prompts=7)
        assert [output.index for output in outputs] == list(range(60))
        assert all(map(right, outputs, prompts))
    assert all(map(right, llm.generate(prompts, PARAMS, use_tqdm=False), prompts))
    assert llm.generate(iter([]), PARAMS, use_tqdm=False) == []
    assert is_idle(llm)


def test_no_more_prompts_are_taken_than_the_look_ahead_allows(llm):
    """Of a stream that is read slowly, by one output at a time."""
    for in_order in (False, True):
        source = Watched(prompts_of(40))
        most = 0
        for num_given, _ in enumerate(llm.stream(source, PARAMS, in_order=in_order, lookahead_prompts=6), start=1):
            most = max(most, source.num_taken - num_given)
        assert num_given == source.num_taken == 40
        assert most == 5  # the sixth is the one that is being given


def test_a_stream_gives_each_output_once_as_it_finishes_or_in_order(llm):
    prompts = prompts_of(30)
    params = [SamplingParams(seed=5, max_tokens=1 + 7 * (index % 3 == 0), ignore_eos=True) for index in range(30)]
    finished = list(llm.stream(prompts, params))
    assert sorted(output.index for output in finished) == list(range(30))
    assert [output.index for output in finished] != list(range(30))
    ordered = list(llm.stream(iter(prompts), iter(params), in_order=True, lookahead_prompts=9))
    assert [output.index for output in ordered] == list(range(30))
    for output in [*finished, *ordered]:
        assert right(output, prompts[output.index], params[output.index])
    assert is_idle(llm)


def test_outputs_come_before_the_last_prompt_is_taken(llm):
    source = Watched(itertools.cycle(prompts_of(5)))  # it has no end
    stream = llm.stream(source, PARAMS, lookahead_prompts=8)
    assert [next(stream).outputs[0].finish_reason for _ in range(20)] == ["length"] * 20
    assert source.num_taken <= 28
    stream.close()
    assert is_idle(llm)
    assert list(stream) == []


def test_leaving_a_stream_aborts_what_is_unfinished(llm):
    def broken():
        for _ in llm.stream(prompts_of(20), PARAMS):
            break

    def closed():
        with llm.stream(prompts_of(20), PARAMS) as stream:
            next(stream)

    def raised():
        for _ in llm.stream(prompts_of(20), PARAMS):
            raise KeyError

    broken()
    assert is_idle(llm)
    closed()
    assert is_idle(llm)
    with pytest.raises(KeyError) as kept:
        raised()
    del kept  # its traceback has the stream
    gc.collect()
    assert is_idle(llm)


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_is_ended_after_it(llm):
    """The garbage collector may run a finalizer anywhere, also within the engine."""
    cycle = [llm.stream(prompts_of(20), PARAMS)]
    next(cycle[0])
    cycle.append(cycle)
    runner = llm.engine.inspect().runner
    launch, calls = runner.launch, []

    def launch_and_collect(plan):
        if not calls:
            cycle.clear()
            calls.append(llm.engine.num_unfinished_requests)
        return launch(plan)

    runner.launch = launch_and_collect
    prompts = prompts_of(6)
    assert all(map(right, llm.generate(prompts, PARAMS, use_tqdm=False), prompts))
    assert calls[0] > 6
    assert is_idle(llm)


def test_calls_and_streams_within_a_stream_each_get_their_own(llm):
    outer, inner = prompts_of(12), prompts_of(5)
    seen = []
    for output in llm.stream(outer, PARAMS, lookahead_prompts=6):
        seen.append(output.index)
        assert right(output, outer[output.index])
        if len(seen) == 3:
            assert all(map(right, llm.generate(inner, PARAMS, use_tqdm=False), inner))
        if len(seen) == 6:
            assert sum(right(one, inner[one.index]) for one in llm.stream(iter(inner), PARAMS)) == 5
    assert sorted(seen) == list(range(12))

    def made_by_the_model():
        for prompt in inner:
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            yield output.outputs[0].token_ids

    wanted = [foretell_answer(prompt, PARAMS, 0, MAX_MODEL_LEN).token_ids for prompt in inner]
    assert all(map(right, llm.generate(made_by_the_model(), PARAMS, use_tqdm=False, lookahead_prompts=2), wanted))
    assert is_idle(llm)


def test_several_threads_read_one_stream_each(llm):
    prompts, found, errors = prompts_of(15), {}, []

    def read(name):
        try:
            found[name] = {one.index: one for one in llm.stream(iter(prompts), PARAMS, lookahead_prompts=4)}
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for outputs in found.values():
        assert all(right(outputs[index], prompt) for index, prompt in enumerate(prompts))
    assert len(found) == 3
    assert is_idle(llm)


BAD = [
    ([], PARAMS, "empty"),
    ([1, 50], PARAMS, "token 1 is 50"),
    ([3] * MAX_MODEL_LEN, PARAMS, "no room"),
    (7, PARAMS, "prompt is int"),
    ([1, 2.5], PARAMS, "token ids are integers"),
    ({"text": [1]}, PARAMS, "unknown"),
    (None, PARAMS, "prompt is NoneType"),
    ({"prompt_token_ids": [1], "cache_salt": ""}, PARAMS, "cache_salt"),
    ([4, 5], {"temperature": 0}, "must be a SamplingParams"),
    ([4, 5], SamplingParams(stop_token_ids=[50]), "stop_token_ids has 50"),
    ([4, 5], SamplingParams(min_tokens=60, max_tokens=70), "min_tokens=60"),
    ([4, 5], SamplingParams(logprobs=51), "logprobs=51"),
]


def mixed(count: int):
    """Every fifth row is bad, each in the next way: (prompts, params, indices of the bad -> what their errors say)."""
    prompts, params, bad = prompts_of(count), [PARAMS] * count, {}
    for number, index in enumerate(range(3, count, 5)):
        prompts[index], params[index], bad[index] = BAD[number % len(BAD)]
    return prompts, params, bad


@pytest.mark.parametrize("how", ["list", "iterator", "stream"])
def test_of_500_requests_100_are_bad_and_400_are_answered(llm, how):
    prompts, params, bad = mixed(500)
    assert len(bad) == 100
    if how == "list":
        outputs = llm.generate(prompts, params, use_tqdm=False, on_error="return")
    elif how == "iterator":
        outputs = llm.generate(iter(prompts), iter(params), use_tqdm=False, on_error="return", lookahead_prompts=50)
    else:
        outputs = list(llm.stream(iter(prompts), params, on_error="return", in_order=True, lookahead_prompts=50))
    assert [output.index for output in outputs] == list(range(500))
    for index, output in enumerate(outputs):
        assert output.finished
        if index in bad:
            assert isinstance(output.error, RequestError)
            assert bad[index] in str(output.error)
            assert output.outputs == []
        else:
            assert right(output, prompts[index])
    assert is_idle(llm)


def test_the_first_bad_row_is_raised_with_its_index_and_all_is_aborted(llm):
    prompts, params, bad = mixed(20)
    with pytest.raises(RequestError, match=rf"^prompts\[3\]: .*{bad[3]}"):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats().num_steps == 0
    with pytest.raises(RequestError, match=r"^prompts\[3\]: "):
        llm.generate(iter(prompts), params, use_tqdm=False, lookahead_prompts=2)
    assert llm.engine.stats().num_steps > 0
    stream = llm.stream(prompts, params, lookahead_prompts=2)
    with pytest.raises(RequestError, match=r"^prompts\[3\]: "):
        list(stream)
    assert list(stream) == []
    assert is_idle(llm)


def test_an_iterator_that_raises_ends_the_call(llm):
    def prompts():
        yield from prompts_of(6)
        raise OSError("the disk is gone")

    for on_error in ("raise", "return"):
        with pytest.raises(OSError, match="the disk is gone"):
            llm.generate(prompts(), PARAMS, use_tqdm=False, on_error=on_error, lookahead_prompts=3)
        assert is_idle(llm)
        found = []
        with pytest.raises(OSError, match="the disk is gone"):
            found.extend(llm.stream(prompts(), PARAMS, on_error=on_error, lookahead_prompts=3))
        assert is_idle(llm)


def test_parameters_beside_an_iterator_that_do_not_come_out_even(llm):
    prompts = prompts_of(5)
    for given, params in ((iter(prompts), [PARAMS] * 4), (iter(prompts), iter([PARAMS] * 4))):
        with pytest.raises(RequestError, match="sampling_params ended after 4 entries while there are more prompts"):
            llm.generate(given, params, use_tqdm=False)
    with pytest.raises(RequestError, match="6 entries for 5 prompts"):
        llm.generate(iter(prompts), [PARAMS] * 6, use_tqdm=False)
    with pytest.raises(RequestError, match="4 entries for 5 prompts"):
        llm.stream(Dataset(prompts), [PARAMS] * 4)
    assert len(llm.generate(iter(prompts), itertools.repeat(PARAMS), use_tqdm=False)) == 5
    with pytest.raises(RequestError, match="sampling_params ended after 3 entries"):
        llm.generate(iter(prompts), iter([PARAMS] * 3), use_tqdm=False, on_error="return")
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_error": "ignore"}, 'on_error=\'ignore\' is not known; give "raise" or "return"'),
        ({"on_error": None}, "on_error=None"),
        ({"lookahead_prompts": 0}, "lookahead_prompts=0 is out of range"),
        ({"lookahead_prompts": 2.0}, "lookahead_prompts=2.0 is a float"),
        ({"sampling_params": 5}, "sampling_params is int"),
        ({"lora_request": "a"}, "lora_request='a' is a str"),
        ({"prompts": {(1, 2)}}, "prompts is a set, which has no order"),
        ({"prompts": 5}, "prompts is int: must be"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(llm, arguments, message):
    for method in (llm.generate, llm.stream):
        given = {"prompts": iter([[1]]), "sampling_params": PARAMS, "use_tqdm": False, **arguments}
        with pytest.raises(RequestError) as refused:
            method(**given)
        assert message in str(refused.value)
    with pytest.raises(RequestError, match="in_order='no' is not a truth value"):
        llm.stream([[1]], in_order="no")


def interrupt_at(llm, call: int) -> None:
    """A real SIGINT comes within the engine's step of this number."""
    runner = llm.engine.inspect().runner
    launch, calls = runner.launch, []

    def interrupted(plan):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return launch(plan)

    runner.launch = interrupted


@pytest.mark.parametrize("how", ["list", "iterator"])
def test_ctrl_c_returns_what_has_finished(llm, how):
    prompts, params, bad = mixed(30)
    interrupt_at(llm, 7)
    given = prompts if how == "list" else iter(prompts)
    outputs = llm.generate(given, params, use_tqdm=False, on_error="return", lookahead_prompts=12)
    kinds = {"finished": 0, "bad": 0, "cut": 0, "never": 0}
    for index, output in enumerate(outputs):
        assert output.index == index
        if output.error is None:
            assert right(output, prompts[index])
            kinds["finished"] += 1
        elif not isinstance(output.error, InterruptedRequestError):
            assert bad[index] in str(output.error)
            kinds["bad"] += 1
        else:
            assert "Ctrl-C" in str(output.error)
            whole = foretell_answer(prompts[index], PARAMS, 0, MAX_MODEL_LEN).token_ids
            tokens = output.outputs[0].token_ids if output.outputs else []
            assert tokens == whole[: len(tokens)] != whole
            kinds["cut" if tokens else "never"] += 1
    assert all(kinds.values()), kinds
    assert len(outputs) == 30 if how == "list" else len(outputs) < 30
    assert is_idle(llm)
    assert all(map(right, llm.generate(prompts[:3], PARAMS, use_tqdm=False), prompts[:3]))


def test_ctrl_c_is_raised_where_errors_are_and_by_streams(llm):
    interrupt_at(llm, 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts_of(10), PARAMS, use_tqdm=False)
    assert is_idle(llm)
    interrupt_at(llm, 3)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(prompts_of(10), PARAMS, on_error="return"))
    assert is_idle(llm)


def test_closing_ends_a_stream(llm):
    stream = llm.stream(prompts_of(10), PARAMS)
    next(stream)
    llm.close()
    with pytest.raises(EngineClosedError):
        list(stream)


def test_requests_from_add_request_are_not_swallowed(llm):
    stream = llm.stream(prompts_of(9), PARAMS, lookahead_prompts=3)
    next(stream)
    llm.engine.add_request("mine", [5, 6], PARAMS)
    with pytest.raises(LamellaError, match="1 requests from add_request"):
        list(stream)
    assert llm.engine.num_unfinished_requests == 1


def test_progress_of_prompts_that_nobody_has_counted(llm, capsys, monkeypatch):
    monkeypatch.setattr("lamella.model_executor.progress.LINE_SECONDS", 0.0)
    llm.generate(iter(prompts_of(9)), PARAMS)
    lines = capsys.readouterr().err.splitlines()
    num_in = sum(map(len, prompts_of(9)))
    assert lines[-1].startswith(f"Generating: 9 prompts finished, {num_in} prompt tokens read, 27 tokens generated, ")
    assert "%" not in lines[0]
    llm.generate(Dataset(prompts_of(9)), PARAMS)
    assert capsys.readouterr().err.splitlines()[-1].startswith("Generating: 100 %, 9 prompts finished")


def test_a_row_that_fails_in_the_engine_and_bad_text(real):
    def fails(output_ids, logits):
        raise ValueError("no such state")

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = ["the cat", "a window", "\ud800", {"prompt": 5}, "the dog"]
    params = [greedy, SamplingParams(temperature=0, logits_processors=[fails]), greedy, greedy, greedy]
    wanted = real.generate(["the cat", "the dog"], greedy, use_tqdm=False)
    for given in (prompts, iter(prompts)):
        outputs = real.generate(given, params, use_tqdm=False, on_error="return")
        assert [outputs[0].outputs[0].text, outputs[4].outputs[0].text] == [one.outputs[0].text for one in wanted]
        assert isinstance(outputs[1].error, RequestFailedError)
        assert "no such state" in str(outputs[1].error)
        assert outputs[1].outputs[0].finish_reason == "error"
        assert [output.error is None for output in outputs] == [True, False, False, False, True]
        assert "must be a string" in str(outputs[3].error)
    assert is_idle(real)


def test_conversations_from_an_iterator_and_bad_ones_among_them(real):
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    good = [[{"role": "user", "content": text}] for text in ("the cat", "a window")]
    wanted = [output.outputs[0].text for output in real.chat(good, greedy, use_tqdm=False)]
    mixed = [good[0], [{"role": "user"}], [], good[1], "hello"]
    for given in (mixed, iter(mixed)):
        outputs = real.chat(given, greedy, use_tqdm=False, on_error="return")
        assert [output.error is None for output in outputs] == [True, False, False, True, False]
        assert [outputs[index].outputs[0].text for index in (0, 3)] == wanted
    assert [one.outputs[0].text for one in real.chat(iter(good), greedy, use_tqdm=False)] == wanted
    with pytest.raises(RequestError, match="conversation 1: "):
        real.chat(iter(mixed), greedy, use_tqdm=False)
    assert is_idle(real)
