"""A script written for vLLM, with only its import changed: calls, methods and prompts."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest

from lamella import (
    LLM,
    ConfigError,
    Engine,
    EngineArgs,
    EngineConfig,
    LLMEngine,
    LoRARequest,
    RequestError,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from tests.helpers.tiny_gemma import save_tiny_gemma

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ARGUMENTS = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 4, "check_invariants": True}
CHAT = [{"role": "user", "content": "the cat"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, tensor_parallel_size=1, trust_remote_code=False, swap_space=4, dtype="half", **ARGUMENTS) as llm:
        yield llm


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_only_n_may_be_given_by_position():
    assert SamplingParams(3) == SamplingParams(n=3)
    for position in range(2, 6):
        with pytest.raises(TypeError, match="positional argument"):
            SamplingParams(*[1] * position)
    kinds = {p.kind for name, p in inspect.signature(SamplingParams).parameters.items() if name != "n"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_a_clone_is_equal_and_another():
    params = SamplingParams(n=2, stop=["a"], seed=5)
    assert params.clone() == params
    assert params.clone() is not params
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_the_engine_has_vllms_names(llm, folder):
    assert llm.llm_engine is llm.engine
    assert (EngineArgs, LLMEngine) == (EngineConfig, Engine)
    assert EngineArgs(folder, **ARGUMENTS).model == folder
    arguments = EngineArgs(folder, disable_log_stats=True, **ARGUMENTS)
    with LLM.from_engine_args(arguments) as made:
        made_of = made.engine.config
        assert dataclasses.replace(made_of, max_model_len=arguments.max_model_len) == arguments


def test_vllms_step_loop(llm, folder):
    expected = tokens(llm.generate(["the quick", [9, 8]], GREEDY, use_tqdm=False))
    engine = LLMEngine.from_engine_args(EngineArgs(folder, dtype="half", **ARGUMENTS), enable_multiprocessing=False)
    with engine:
        engine.add_request("0", "the quick", GREEDY, arrival_time=1.0, lora_request=None, priority=0)
        engine.add_request("1", TokensPrompt(prompt_token_ids=[9, 8]), GREEDY, trace_headers=None)
        engine.add_request("2", [5, 6], GREEDY)
        assert engine.get_num_unfinished_requests() == 3
        assert engine.abort_request(["2"]) is None
        finished = {}
        while engine.has_unfinished_requests():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
        assert tokens([finished["0"], finished["1"]]) == expected
        assert engine.reset_prefix_cache(reset_running_requests=False)
        for name, value in (("priority", 1), ("lora_request", object()), ("kv_hints", {"a": 1})):
            with pytest.raises(RequestError, match=f"^{name}="):
                engine.add_request("3", "x", GREEDY, **{name: value})
        with pytest.raises(TypeError, match="'priorty'; did you mean 'priority'"):
            engine.add_request("3", "x", GREEDY, priorty=0)
        with pytest.raises(ConfigError, match=r"^reset_running_requests=True"):
            engine.reset_prefix_cache(reset_running_requests=True)
        with pytest.raises(ConfigError, match=r"^enable_multiprocessing=True"):
            LLMEngine.from_engine_args(EngineArgs(folder), enable_multiprocessing=True)
        assert not engine.has_unfinished_requests()


def test_an_engine_is_made_of_a_config_only():
    with pytest.raises(ConfigError, match=r"^config='demo:gemma-3-270m' is a str; give an EngineConfig"):
        Engine("demo:gemma-3-270m")


def test_generate_takes_vllms_arguments(llm):
    prompts = [TextPrompt(prompt="the quick"), TokensPrompt(prompt_token_ids=[9, 8])]
    expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    given = llm.generate(
        prompts, GREEDY, use_tqdm=False, lora_request=[None, None], priority=[0, 0], tokenization_kwargs={}
    )
    assert tokens(given) == expected
    for name, value, hint in (
        ("lora_request", object(), "give a LoRARequest"),
        ("lora_request", LoRARequest("sql", 1, "adapter"), "enable_lora=True"),
        ("priority", [1, 0], "scheduling_policy"),
        ("tokenization_kwargs", {"truncation": True}, "give the token ids"),
        ("prompt_token_ids", [[1, 2]], "prompt_token_ids"),
    ):
        with pytest.raises(RequestError, match=rf"^{name}=.*{hint}"):
            llm.generate(prompts, GREEDY, use_tqdm=False, **{name: value})
    with pytest.raises(TypeError, match="'use_tqmd'; did you mean 'use_tqdm'"):
        llm.generate(prompts, GREEDY, use_tqmd=False)


def test_chat_takes_vllms_arguments(llm):
    expected = tokens(llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=TEMPLATE))
    given = llm.chat(
        CHAT,
        GREEDY,
        use_tqdm=False,
        chat_template=TEMPLATE,
        lora_request=None,
        tools=None,
        continue_final_message=False,
        chat_template_content_format="auto",
        mm_processor_kwargs=None,
    )
    assert tokens(given) == expected
    with pytest.raises(RequestError, match=r"^priority="):
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=TEMPLATE, priority=[3])
    with pytest.raises(RequestError, match=r"^add_generation_prompt='no'.*True or False"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=TEMPLATE, add_generation_prompt="no")
    with pytest.raises(TypeError, match="'chat_templat'; did you mean 'chat_template'"):
        llm.chat(CHAT, GREEDY, chat_templat=TEMPLATE)


@pytest.mark.parametrize("key", ["multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "token_type_ids"])
def test_keys_of_prompts_that_ask_for_nothing_are_taken(llm, key):
    expected = tokens(llm.generate(["the quick"], GREEDY, use_tqdm=False))
    assert tokens(llm.generate([{"prompt": "the quick", key: None}], GREEDY, use_tqdm=False)) == expected
    for error in (RequestError, ConfigError):
        with pytest.raises(error, match=rf"^prompts\[0\]: prompt has {key}=.*there are no images"):
            llm.generate([{"prompt": "the quick", key: {"image": 1}}], GREEDY, use_tqdm=False)


def test_an_unknown_key_of_a_prompt_names_the_nearest(llm):
    with pytest.raises(RequestError, match=r"'prompt_token_id' is unknown.*did you mean 'prompt_token_ids'"):
        llm.generate([{"prompt_token_id": [1]}], GREEDY, use_tqdm=False)
