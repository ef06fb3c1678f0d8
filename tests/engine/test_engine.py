"""The engine's own promises: outputs, refusals, aborts, several engines, memory given back."""

from __future__ import annotations

import gc
import weakref

import pytest

from lamella import (
    LLM,
    CapacityError,
    ConfigError,
    Engine,
    EngineClosedError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from tests.helpers.tiny_gemma import save_tiny_gemma

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ARGUMENTS = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "check_invariants": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture
def llm(folder):
    with LLM(folder, **ARGUMENTS) as llm:
        yield llm


def tokens(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_output_is_cut_at_max_model_len(llm):
    output = llm.generate([[7] * 120], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)[
        0
    ]
    assert len(tokens(output)) == 8
    assert output.outputs[0].finish_reason == "length"


def test_stop_token_and_eos(llm):
    free = tokens(llm.generate("the cat", GREEDY, use_tqdm=False)[0])
    stop = free[3]
    end = free.index(stop) + 1
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate("the cat", params, use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == free[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == llm.get_tokenizer().decode(free[: end - 1])


def test_stop_string_ends_the_request_and_frees_its_pages(llm):
    text = llm.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[3:5]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=stop)
    output = llm.generate("the cat", params, use_tqdm=False)[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert all(usage.owned == 0 for usage in llm.engine.stats().pages.values())


def test_min_tokens_keeps_a_stop_token_away(llm):
    stop = tokens(llm.generate("the cat", GREEDY, use_tqdm=False)[0])[0]
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=5, ignore_eos=True, stop_token_ids=[stop])
    output = tokens(llm.generate("the cat", params, use_tqdm=False)[0])
    assert stop not in output[:5]
    assert len(output) >= 5


def test_samples_depend_on_the_seed_alone(llm):
    params = [SamplingParams(temperature=1.0, max_tokens=8, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    alone = [tokens(llm.generate("the cat", one, use_tqdm=False)[0]) for one in params]
    together = [tokens(output) for output in llm.generate(["the cat"] * 3, params, use_tqdm=False)]
    assert alone == together
    assert alone[0] == alone[2] != alone[1]


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed(folder):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def run(seed):
        with LLM(folder, seed=seed, **ARGUMENTS) as llm:
            return [tokens(output) for output in llm.generate(["the cat"] * 3, params, use_tqdm=False)]

    first = run(0)
    assert len({tuple(sample) for sample in first}) == 3
    assert run(0) == first
    assert run(1) != first


def test_n_samples_come_as_one_output(llm):
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, seed=5, ignore_eos=True)
    outputs = llm.generate(["the cat", "a window"], params, use_tqdm=False)
    assert [[one.index for one in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) == 3


def test_logprobs_name_the_sampled_token_and_the_likeliest(llm):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    output = llm.generate("the cat", params, use_tqdm=False)[0].outputs[0]
    assert len(output.logprobs) == 3
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token_id == next(iter(entry))
        assert entry[token_id].rank == 1
        assert len(entry) == 2
        assert entry[token_id].decoded_token == llm.get_tokenizer().decode([token_id], False)
    assert output.cumulative_logprob == pytest.approx(
        sum(entry[token_id].logprob for token_id, entry in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_cumulative_and_delta_outputs_add_up_to_the_final_one(folder):
    with Engine(model=folder, **ARGUMENTS) as engine:
        for kind in RequestOutputKind:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=kind)
            engine.add_request(kind.value, "the cat", params)
        seen = {kind.value: [] for kind in RequestOutputKind}
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen[output.request_id].append(output)
    final = seen["final_only"][-1].outputs[0]
    assert len(seen["final_only"]) == 1
    assert seen["cumulative"][-1].outputs[0].text == final.text
    assert [len(output.outputs[0].token_ids) for output in seen["cumulative"]] == list(range(1, 9))
    assert "".join(output.outputs[0].text for output in seen["delta"]) == final.text
    delta_ids = [token_id for output in seen["delta"] for token_id in output.outputs[0].token_ids]
    assert delta_ids == list(final.token_ids)


def test_abort_ends_one_request_and_no_other(folder):
    with Engine(model=folder, **ARGUMENTS) as engine:
        for request_id in ("a", "b", "c", "d", "waiting"):
            engine.add_request(request_id, f"the {request_id}", GREEDY)
        engine.step()
        engine.step()
        outputs = engine.abort(["a", "waiting", "unknown"])
        assert [(output.request_id, output.outputs[0].finish_reason) for output in outputs] == [
            ("a", "abort"),
            ("waiting", "abort"),
        ]
        assert len(outputs[0].outputs[0].token_ids) == 2
        finished = {}
        while engine.has_unfinished_requests():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
        assert set(finished) == {"b", "c", "d"}
        assert all(usage.owned == 0 for usage in engine.stats().pages.values())
        with LLM(folder, **ARGUMENTS) as llm:
            alone = llm.generate(["the b"], GREEDY, use_tqdm=False)[0]
        assert tokens(finished["b"]) == tokens(alone)


def test_request_ids_are_unique_while_in_use(folder):
    with Engine(model=folder, **ARGUMENTS) as engine:
        engine.add_request("a", "x y", GREEDY)
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add_request("a", "x y", GREEDY)
        with pytest.raises(RequestError, match="must be a string"):
            engine.add_request(7, "x y", GREEDY)
        engine.abort("a")
        engine.add_request("a", "x y", GREEDY)
        assert engine.num_unfinished_requests == 1


def test_a_failing_step_harms_nothing(folder, monkeypatch):
    with Engine(model=folder, **ARGUMENTS) as engine, LLM(folder, **ARGUMENTS) as other:
        expected = [tokens(output) for output in other.generate(["the cat", "a window"], GREEDY, use_tqdm=False)]
        engine.add_request("0", "the cat", GREEDY)
        engine.add_request("1", "a window", GREEDY)
        engine.step()
        runner = engine.inspect().runner
        with monkeypatch.context() as patch:
            patch.setattr(type(runner), "launch", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
            assert engine.step() == []
        engine.check_invariants()
        finished = {}
        while engine.has_unfinished_requests():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
        assert [tokens(finished[name]) for name in ("0", "1")] == expected


def test_two_engines_live_side_by_side(folder, tmp_path):
    save_tiny_gemma(tmp_path, seed=1)
    with LLM(folder, **ARGUMENTS) as first, LLM(str(tmp_path), **ARGUMENTS) as second:
        alone = [tokens(llm.generate("the cat", GREEDY, use_tqdm=False)[0]) for llm in (first, second)]
        assert alone[0] != alone[1]
        engines = [first.engine, second.engine]
        for engine in engines:
            engine.add_request("x", "the cat", GREEDY)
        results = [None, None]
        while any(engine.has_unfinished_requests() for engine in engines):
            for index, engine in enumerate(engines):
                for output in engine.step():
                    results[index] = tokens(output)
        assert results == alone


def test_close_gives_memory_back_and_ends_use(folder):
    engine = Engine(model=folder, **ARGUMENTS)
    engine.add_request("a", "the cat", GREEDY)
    engine.step()
    arena = weakref.ref(engine.inspect().runner.arena)
    weight = weakref.ref(engine.inspect().runner.model.model.embed_tokens.weight)
    engine.close()
    gc.collect()
    assert arena() is None
    assert weight() is None
    engine.close()
    assert not engine.has_unfinished_requests()
    uses = (engine.step, engine.stats, engine.inspect, engine.reset_prefix_cache)
    for use in (*uses, lambda: engine.add_request("b", "x", GREEDY)):
        with pytest.raises(EngineClosedError):
            use()


def test_inspect_shows_the_parts_at_work_and_cannot_be_written_to(llm):
    engine = llm.engine
    parts = engine.inspect()
    assert [group.name for group in parts.layout.groups] == list(engine.stats().pages)
    assert parts.pool.max_model_len == engine.max_model_len
    assert parts.runner.backend.name == engine.attention_backend
    engine.add_request("a", "the cat", GREEDY)
    engine.step()
    assert parts.scheduler is engine.inspect().scheduler
    (row,) = parts.scheduler.running
    assert parts.scheduler.rows.request(row).request_id == "a"
    owned = {name: usage.owned for name, usage in engine.stats().pages.items()}
    assert {name: usage.owned for name, usage in parts.manager.usage().items()} == owned
    assert min(owned.values()) > 0
    with pytest.raises(AttributeError):
        parts.manager = None
    engine.abort("a")


def test_unknown_arguments_raise(folder):
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM(folder, max_num_seq=4)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)


def test_lengths_and_memory_are_checked_at_start(folder):
    with pytest.raises(ConfigError, match=r"max_model_len=4096.*at most 512"):
        LLM(folder, max_model_len=4096)
    with pytest.raises(ConfigError, match="device='tpu'"):
        LLM(folder, device="tpu")
    with pytest.raises(CapacityError, match=r"needs (\d+) bytes") as refused:
        LLM(folder, kv_cache_memory_bytes=100_000)
    needed = int(str(refused.value).split("needs ")[1].split()[0])
    with LLM(folder, kv_cache_memory_bytes=needed, max_num_seqs=4) as llm:
        assert llm.engine.max_model_len == 512
        output = llm.generate(
            [[9] * 500], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False
        )
        assert len(tokens(output[0])) == 12
    with LLM(folder, kv_cache_memory_bytes=needed // 2, max_model_len="auto", max_num_seqs=4) as llm:
        assert 16 < llm.engine.max_model_len < 512


def test_num_cached_tokens_and_stats(llm):
    prompt = [7 + index for index in range(50)]
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 49
    stats = llm.engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens) == (100, 49, 16)
    assert set(stats.peak_pages) == {"sliding_16", "full"}
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_salted_prompts_share_nothing(llm):
    prompt = [7 + index for index in range(50)]
    for salt, hits in (("a", 0), ("b", 0), ("a", 49)):
        salted = {"prompt_token_ids": prompt, "cache_salt": salt}
        assert llm.generate([salted], GREEDY, use_tqdm=False)[0].num_cached_tokens == hits
