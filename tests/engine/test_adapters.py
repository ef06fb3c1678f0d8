"""Requests with adapters, mixed in one batch: against transformers' model with the adapter merged into its weights."""

import json
import math
import shutil
import threading

import pytest
import torch

from lamella import LLM, ConfigError, Engine, LoRARequest, ModelLoadError, PrefixFileError, RequestError, SamplingParams
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from lamella.model_executor.adapters.adapter_reader import NativeAdapterReader
from lamella.model_executor.layers import native_operators
from tests.helpers.lora_files import merged, save_lora
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma

ARGUMENTS = {"max_model_len": 160, "kv_cache_memory_bytes": 1 << 24, "check_invariants": True, "max_num_seqs": 8}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[2] + [(7 * row + 11 * place) % 300 + 8 for place in range(20 + 9 * row)] for row in range(5)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=VOCAB_SIZE)


class Adapters:
    """Four adapters of one tiny Gemma, and transformers' models that they amount to; the fifth is the model alone."""

    def __init__(self, folder):
        self.folder = folder
        self.model = save_tiny_gemma(folder / "model")
        self.models = [
            self._make(0, 4.0, modules=("q_proj", "v_proj")),
            # r=8 but for layers' o_proj, where it is 2; alpha=6 but for layer 1's MLP.
            self._make(
                1,
                lambda name: (3.0 if "layers.1.mlp" in name else 6.0) / math.sqrt(2 if "o_proj" in name else 8),
                modules=ALL,
                ranks=lambda name: 2 if "o_proj" in name else 8,
                r=8,
                lora_alpha=6,
                use_rslora=True,
                rank_pattern={"o_proj": 2},
                alpha_pattern={r"layers\.1\.mlp\.\w+": 3},
            ),
            self._make(
                2,
                4.0,
                modules=lambda name: name.endswith(("o_proj", "down_proj")) and name.split(".")[2] in "14",
                target_modules=["o_proj", "mlp.down_proj"],
                layers_to_transform=[1, 4],
            ),
            self._make(
                3,
                4.0,
                modules=lambda name: name.endswith("gate_proj") and ".5." not in name,
                target_modules=r"model\.layers\.\d+\.mlp\.gate_proj",
                exclude_modules=["5.mlp.gate_proj"],
            ),
            self.model,
        ]
        self.requests = [LoRARequest(f"adapter {i}", i + 1, folder / f"adapter{i}") for i in range(4)] + [None]

    def _make(self, index, scale, **arguments):
        weights = save_lora(self.folder / f"adapter{index}", self.model, seed=index, spread=0.3, **arguments)
        return merged(self.model, weights, scale)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "model").mkdir()
    return Adapters(folder)


@pytest.fixture(scope="module")
def mixed(adapters):
    """All five requests in one batch on the native path."""
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:
        return llm.generate(PROMPTS, PARAMS, lora_request=adapters.requests, use_tqdm=False)


def logprobs_of(output):
    """float64 [num_tokens, vocab_size]: of each generated token, those of all tokens."""
    return torch.tensor(
        [[each[token].logprob for token in range(VOCAB_SIZE)] for each in output.outputs[0].logprobs],
        dtype=torch.float64,
    )


def expected_logprobs(model, output):
    tokens = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[0].double()
    return logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(dim=-1)


def assert_computed_by(output, model):
    """The output is greedy under the model's log-probabilities, which are these."""
    assert output.outputs[0].token_ids == logprobs_of(output).argmax(dim=1).tolist()
    torch.testing.assert_close(logprobs_of(output), expected_logprobs(model, output), rtol=0, atol=2e-4)


def assert_same_bits(outputs, others):
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in others]
    for one, other in zip(outputs, others, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_four_adapters_and_none_in_one_batch(adapters, mixed):
    for output, model, request in zip(mixed, adapters.models, adapters.requests, strict=True):
        assert_computed_by(output, model)
        assert output.lora_request == request
    # Adapters that did nothing would pass.
    for output in mixed[:4]:
        assert (logprobs_of(output) - expected_logprobs(adapters.model, output)).abs().max() > 0.05


def test_on_the_torch_path(adapters):
    with LLM(adapters.folder / "model", enable_lora=True, attention_backend="torch", **ARGUMENTS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=adapters.requests, use_tqdm=False)
    for output, model in zip(outputs, adapters.models, strict=True):
        assert_computed_by(output, model)


@pytest.mark.parametrize(
    "changed",
    [
        {"max_num_seqs": 1},  # each alone
        {"max_num_seqs": 3, "max_num_batched_tokens": 16, "page_size": 32},  # prompts in chunks
        {"async_scheduling": True, "enable_prefix_caching": False, "max_num_batched_tokens": 40},
        {"max_loras": 1},
    ],
)
def test_the_same_bits_whatever_else_is_in_the_batch(adapters, mixed, changed):
    with LLM(adapters.folder / "model", enable_lora=True, **{**ARGUMENTS, **changed}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=adapters.requests, use_tqdm=False)
    assert_same_bits(outputs, mixed)


def test_the_same_bits_after_preemption(adapters):
    prompts, requests = PROMPTS * 2, adapters.requests * 2
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:
        roomy = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        assert llm.engine.stats().num_preemptions == 0
    narrow = {**ARGUMENTS, "kv_cache_memory_bytes": 400_000, "scheduling_policy": "fcfs"}
    with LLM(adapters.folder / "model", enable_lora=True, **narrow) as llm:
        outputs = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)
        assert llm.engine.stats().num_preemptions > 0
    assert_same_bits(outputs, roomy)


@pytest.mark.parametrize("temperature", [0.0, 0.02])
def test_speculation_changes_no_token(adapters, temperature):
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(5)]
    prompts, folder = [prompt * 2 for prompt in PROMPTS], adapters.folder / "model"
    with LLM(folder, enable_lora=True, **ARGUMENTS) as llm:
        outputs = llm.generate(prompts, params, lora_request=adapters.requests, use_tqdm=False)
    config = {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}
    with LLM(folder, enable_lora=True, speculative_config=config, **ARGUMENTS) as llm:
        llm.engine.inspect().scheduler.drafter.costs = StepCosts([1], [1.0])  # as many drafts as can be made
        found = llm.generate(prompts, params, lora_request=adapters.requests, use_tqdm=False)
        drafts = llm.engine.stats().drafts
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in outputs]
    assert 0 < drafts.num_accepted < drafts.num_proposed


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_adapters(adapters, mixed):
    with LLM(adapters.folder / "model", **ARGUMENTS) as llm:
        assert_same_bits(llm.generate([PROMPTS[4]], PARAMS, use_tqdm=False), mixed[4:])


def test_the_same_bits_where_layers_run_operation_by_operation(adapters, mixed, monkeypatch):
    """As they do in models that the calls of whole layers are not for."""
    monkeypatch.setattr(native_operators, "_reason_against_one_tail", lambda layer, next_norm: "a test")
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:
        assert not llm.engine.inspect().runner.model.operators._tails
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=adapters.requests, use_tqdm=False)
    assert_same_bits(outputs, mixed)


def test_each_adapter_has_a_cache_of_its_own(adapters):
    prompt = PROMPTS[3]
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:

        def run(request):
            return llm.generate([prompt], PARAMS, lora_request=request, use_tqdm=False)[0]

        cold = [run(request) for request in adapters.requests]
        assert [output.num_cached_tokens for output in cold] == [0] * 5
        warm = [run(request) for request in adapters.requests]
        assert [output.num_cached_tokens for output in warm] == [len(prompt) - 1] * 5
        assert_same_bits(warm, cold)
        salted = llm.generate(
            [{"prompt_token_ids": prompt, "cache_salt": "mine"}], PARAMS, lora_request=adapters.requests[0],
            use_tqdm=False,
        )  # fmt: skip
        assert salted[0].num_cached_tokens == 0


def test_other_weights_under_the_same_name_do_not_find_the_old_cache(adapters, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters.folder / "adapter0", folder)
    request, prompt = LoRARequest("it", 7, folder), PROMPTS[2]
    with Engine(model=adapters.folder / "model", enable_lora=True, **ARGUMENTS) as engine:

        def run():
            engine.add_request("0", prompt, PARAMS, lora_request=request)
            return [output for _ in range(PARAMS.max_tokens) for output in engine.step()][-1]

        assert_computed_by(run(), adapters.models[0])
        assert engine.remove_lora(7)
        shutil.rmtree(folder)
        shutil.copytree(adapters.folder / "adapter1", folder)
        other = run()
        assert other.num_cached_tokens == 0
        assert_computed_by(other, adapters.models[1])
        assert engine.remove_lora(7)
        shutil.rmtree(folder)
        shutil.copytree(adapters.folder / "adapter0", folder)
        again = run()  # the first one's weights: what it cached is still right
        assert again.num_cached_tokens == len(prompt) - 1
        assert_computed_by(again, adapters.models[0])


def test_offline_requests_of_one_adapter_run_together(adapters):
    """Offline the order is ours: two runs of one at a time change adapters as rarely as can be."""
    shared = [[2, *range(20, 52), 60 + row] for row in range(6)]
    requests = [adapters.requests[row % 2] for row in range(6)]
    with LLM(adapters.folder / "model", enable_lora=True, **{**ARGUMENTS, "max_num_seqs": 1}) as llm:
        outputs = llm.generate(shared, PARAMS, lora_request=requests, use_tqdm=False)
    order = sorted(range(6), key=lambda row: outputs[row].metrics.first_scheduled_time)
    assert [row % 2 for row in order] == [0, 0, 0, 1, 1, 1]
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 0, 33, 33, 33, 33]


def test_no_more_adapters_run_at_once_than_max_loras(adapters):
    with Engine(model=adapters.folder / "model", enable_lora=True, max_loras=2, **ARGUMENTS) as engine:
        for row, (prompt, request) in enumerate(zip(PROMPTS, adapters.requests, strict=True)):
            engine.add_request(str(row), prompt, PARAMS, lora_request=request)
        most, finished = 0, []
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step() if output.finished]
            ids = set(engine.inspect().scheduler.rows.adapter_ids.tolist()) - {0}
            most = max(most, len(ids))
        assert most == 2
        assert sorted(finished) == ["0", "1", "2", "3", "4"]


def test_adapters_come_and_go_while_requests_run(adapters):
    first, second, third, fourth, _ = adapters.requests
    with Engine(model=adapters.folder / "model", enable_lora=True, max_cpu_loras=2, **ARGUMENTS) as engine:
        assert engine.add_lora(first)
        assert not engine.add_lora(first)
        assert engine.list_loras() == {1}
        engine.add_request("a", PROMPTS[0], PARAMS, lora_request=first)
        engine.step()
        with pytest.raises(RequestError, match=r"lora_int_id=1: 1 unfinished requests use 'adapter 0'; step until"):
            engine.remove_lora(1)
        engine.add_lora(second)
        engine.add_lora(third)  # second makes room, as first is in use
        assert engine.list_loras() == {1, 3}
        assert engine.pin_lora(3)
        assert not engine.pin_lora(2)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert_computed_by(outputs[-1], adapters.models[0])
        engine.add_lora(fourth)  # first makes room, as third is pinned
        assert engine.list_loras() == {3, 4}
        assert engine.remove_lora(3)
        assert not engine.remove_lora(3)
        assert engine.list_loras() == {4}
        assert set(engine.inspect().runner.adapters) == {4}  # loaded as the fourth
        # An adapter that had to go is loaded again by whoever asks for it.
        engine.add_request("b", PROMPTS[1], PARAMS, lora_request=second)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert_computed_by(outputs[-1], adapters.models[1])


def test_steps_run_while_an_adapter_is_read(adapters, monkeypatch):
    first, second, *_ = adapters.requests
    is_reading, may_read = threading.Event(), threading.Event()
    read = NativeAdapterReader.read

    def read_late(self, path, **arguments):
        is_reading.set()
        assert may_read.wait(60)
        return read(self, path, **arguments)

    with Engine(model=adapters.folder / "model", enable_lora=True, **ARGUMENTS) as engine:
        engine.add_request("a", PROMPTS[0], PARAMS, lora_request=first)
        monkeypatch.setattr(NativeAdapterReader, "read", read_late)
        adding = threading.Thread(
            target=engine.add_request, args=("b", PROMPTS[1], PARAMS), kwargs={"lora_request": second}
        )
        adding.start()
        assert is_reading.wait(60)
        stepping = threading.Thread(target=lambda: [engine.step() for _ in range(3)], daemon=True)
        stepping.start()
        stepping.join(30)
        has_stepped = not stepping.is_alive()
        may_read.set()
        adding.join()
        stepping.join()
        assert has_stepped
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
        assert_computed_by(found["a"], adapters.models[0])
        assert_computed_by(found["b"], adapters.models[1])


def test_two_threads_read_one_adapter(adapters, monkeypatch):
    """Both have read it before one of them enters it."""
    both = threading.Barrier(2, timeout=60)
    read = NativeAdapterReader.read

    def read_together(self, path, **arguments):
        both.wait()
        return read(self, path, **arguments)

    monkeypatch.setattr(NativeAdapterReader, "read", read_together)
    with Engine(model=adapters.folder / "model", enable_lora=True, **ARGUMENTS) as engine:
        loaded = []
        threads = [
            threading.Thread(target=lambda: loaded.append(engine.load_adapter(adapters.requests[0]))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loaded[0] is loaded[1]
        assert set(engine.inspect().runner.adapters) == {loaded[0].number}


def test_prefixes_of_an_adapter_are_pinned_and_saved(adapters, mixed, tmp_path):
    first, second, *_ = adapters.requests
    prompt, prefix = PROMPTS[0], PROMPTS[0][:-3]
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:
        llm.save_prefix(tmp_path / "prefix", prefix, lora_request=first)
        assert llm.pin_prefix(prefix, lora_request=first).is_cached
        assert llm.reset_prefix_cache()
        wanted = {first: len(prefix), second: 0, None: 0}
        for request, num_cached in wanted.items():
            output = llm.generate([prompt], PARAMS, lora_request=request, use_tqdm=False)[0]
            assert output.num_cached_tokens == num_cached
            if request is first:
                assert_same_bits([output], mixed[:1])
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:
        for other in (second, None):
            with pytest.raises(PrefixFileError, match=r"adapter='[0-9a-f]+'.*load it with the same lora_request"):
                llm.load_prefix(tmp_path / "prefix", lora_request=other)
        assert llm.load_prefix(tmp_path / "prefix", lora_request=first).cache_salt is None
        output = llm.generate([prompt], PARAMS, lora_request=first, use_tqdm=False)[0]
        assert output.num_cached_tokens == len(prefix)
        assert_same_bits([output], mixed[:1])
        assert llm.generate([prompt], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


def test_more_adapters_than_stay_loaded_in_one_call(adapters):
    with LLM(adapters.folder / "model", enable_lora=True, max_loras=1, max_cpu_loras=1, **ARGUMENTS) as llm:
        outputs = llm.generate(PROMPTS * 2, PARAMS, lora_request=adapters.requests * 2, use_tqdm=False)
        for output, model in zip(outputs, adapters.models * 2, strict=True):
            assert_computed_by(output, model)
        llm.engine.add_lora(adapters.requests[0])
        assert llm.engine.list_loras() == {1}


def test_all_samples_of_a_request_have_its_adapter(adapters):
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
    with LLM(adapters.folder / "model", enable_lora=True, **ARGUMENTS) as llm:
        (alone,) = llm.generate([PROMPTS[0]], params, lora_request=adapters.requests[1], use_tqdm=False)
        outputs = llm.generate(PROMPTS[:2], params, lora_request=adapters.requests[1], use_tqdm=False)
    texts = [sample.token_ids for sample in alone.outputs]
    assert texts[0] != texts[1]
    assert [sample.token_ids for sample in outputs[0].outputs] == texts


def test_a_step_without_adapters_carries_none(adapters):
    with Engine(model=adapters.folder / "model", enable_lora=True, **ARGUMENTS) as engine:
        plans = []
        launch = engine.inspect().runner.launch
        engine.inspect().runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
        for request in (None, adapters.requests[0], None):
            engine.add_request("0", PROMPTS[0], PARAMS, lora_request=request)
            while engine.has_unfinished_requests():
                engine.step()
        has_adapters = [plan.adapter_ids is not None for plan in plans]
        assert has_adapters == [False] * 6 + [True] * 6 + [False] * 6


def test_what_is_refused(adapters, tmp_path):
    request = adapters.requests[0]
    with LLM(adapters.folder / "model", **ARGUMENTS) as llm:
        with pytest.raises(RequestError, match="adapters are not enabled; make the engine with enable_lora=True"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request=request, use_tqdm=False)
        with pytest.raises(RequestError, match="enable_lora=True"):
            llm.engine.add_lora(request)
    with LLM(adapters.folder / "model", enable_lora=True, max_lora_rank=4, **ARGUMENTS) as llm:
        with pytest.raises(RequestError, match="lora_request has 1 entries for 2 prompts: give one for all"):
            llm.generate(PROMPTS[:2], PARAMS, lora_request=[request], use_tqdm=False)
        with pytest.raises(RequestError, match=r"lora_request='sql' is a str; give a LoRARequest"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request="sql", use_tqdm=False)
        with pytest.raises(ModelLoadError, match=r"r=8 of model\.layers\.0\.\S+ is more than max_lora_rank=4"):
            llm.engine.add_lora(adapters.requests[1])
        with pytest.raises(ModelLoadError, match="is no folder; give one"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request=LoRARequest("x", 9, tmp_path / "none"), use_tqdm=False)
        assert llm.engine.list_loras() == set()
        llm.engine.add_lora(request)
        with pytest.raises(RequestError, match=r"lora_int_id=1 of 'x' .* is that of 'adapter 0' at .*remove_lora\(1\)"):
            llm.engine.add_lora(LoRARequest("x", 1, tmp_path))
        assert not llm.engine.has_unfinished_requests()
        with pytest.raises(RequestError, match=r"cache_salt=.*no null character"):
            llm.generate([{"prompt": "a", "cache_salt": "b\0lora:0"}], PARAMS, use_tqdm=False)
    with pytest.raises(ConfigError, match=r"enable_lora=True is for native families.*merge the adapter"):
        Engine(model=adapters.folder / "model", model_impl="transformers", enable_lora=True, **ARGUMENTS)
    with pytest.raises(ConfigError, match=r"max_cpu_loras=1 is below max_loras=2"):
        Engine(model=adapters.folder / "model", enable_lora=True, max_loras=2, max_cpu_loras=1)
    for arguments, named in (
        (("", 1, "x"), "lora_name=''"),
        (("a", 0, "x"), "lora_int_id=0"),
        (("a", True, "x"), "lora_int_id=True"),
        (("a", 1, ""), "lora_path=''"),
    ):
        with pytest.raises(RequestError, match=named):
            LoRARequest(*arguments)


def test_an_adapter_that_cannot_be_read_fails_no_other_request(adapters, tmp_path):
    shutil.copytree(adapters.folder / "adapter0", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with Engine(model=adapters.folder / "model", enable_lora=True, **ARGUMENTS) as engine:
        engine.add_request("0", PROMPTS[0], PARAMS, lora_request=adapters.requests[0])
        engine.step()
        with pytest.raises(ModelLoadError, match=r"shape \[4, 64\], wanted \[3, 64\]"):
            engine.add_request("1", PROMPTS[1], PARAMS, lora_request=LoRARequest("bad", 2, tmp_path / "adapter"))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert_computed_by(outputs[-1], adapters.models[0])
