"""The offline interface: what `generate` and `chat` take, give back and refuse, and in which order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lamella import LLM, EngineConfig, LamellaError, RequestError, SamplingParams
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


def test_prompts_of_every_form_in_one_call_come_back_in_order(llm):
    text = "the quick brown fox"
    ids = llm.get_tokenizer().encode(text)
    prompts = [
        text,
        {"prompt": text},
        ids,
        np.array(ids),
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "prompt": "x"},
    ]
    outputs = llm.generate([*prompts, "the cat sat"], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [text, text, None, None, None, "x", "the cat sat"]
    assert all(list(output.prompt_token_ids) == ids for output in outputs[:6])
    assert len({tuple(tokens(output)) for output in outputs[:6]}) == 1
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert outputs[0].outputs[0].text == llm.get_tokenizer().decode(tokens(outputs[0]))


def test_one_prompt_or_many(llm):
    single = llm.generate("the cat", GREEDY, use_tqdm=False)
    assert len(single) == 1
    ids = list(single[0].prompt_token_ids)
    assert [tokens(output) for output in llm.generate(ids, GREEDY, use_tqdm=False)] == [tokens(single[0])]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_one_sampling_params_each(llm):
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 1, 5)]
    outputs = llm.generate(["a", "a", "a"], params, use_tqdm=False)
    assert [len(tokens(output)) for output in outputs] == [3, 1, 5]
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([5, 320], r"token 1 is 320: must lie in \[0, 319\]"),
        ([5, -1], "token 1 is -1"),
        ([5, 2.5], "token 1 is 2.5"),
        ([True, 4], "token 0 is True"),
        ([7] * 128, "128 tokens.*at most 127"),
        ({"text": "x"}, "keys"),
        ({"prompt": "x", "stop": "y"}, "keys"),
        ({"prompt_token_ids": "abc"}, "prompt is str"),
        ({"prompt_token_ids": None}, "keys"),
        ({"prompt": 5}, "must be a string"),
        (5, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm, prompt, message):
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate(["the cat", prompt], GREEDY, use_tqdm=False)
    assert "prompts[1]" in str(refused.value)
    assert llm.engine.stats().num_steps == 0
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[320]), "stop_token_ids has 320"),
        (SamplingParams(min_tokens=128, max_tokens=200), "min_tokens=128"),
        (SamplingParams(logprobs=321), "logprobs=321"),
        ({"temperature": 0}, "must be a SamplingParams"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(llm, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(["a b"], [params], use_tqdm=False)
    assert llm.engine.stats().num_steps == 0


def test_generate_after_an_interrupt_starts_clean(llm, monkeypatch):
    step = llm.engine.step
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the cat", "a window"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert all(usage.owned == 0 for usage in llm.engine.stats().pages.values())
    assert len(llm.generate(["the cat"], GREEDY, use_tqdm=False)) == 1


def test_generate_refuses_while_add_request_is_in_use(llm):
    llm.engine.add_request("mine", "the cat", GREEDY)
    with pytest.raises(LamellaError, match="1 requests from add_request"):
        llm.generate("the cat", GREEDY, use_tqdm=False)


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "the cat"}]
    outputs = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert outputs[0].prompt == "<bos><turn>user\nthe cat</turn>\n<turn>model\n"
    assert list(outputs[0].prompt_token_ids).count(llm.get_tokenizer().bos_token_id) == 1
    assert tokens(outputs[0]) == tokens(outputs[1])
    custom = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0]['content'] }}!")
    assert custom[0].prompt == "the cat!"
    for bad in ([], "hello", [{"role": "user"}], [[]]):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(bad, GREEDY, use_tqdm=False)


def test_the_progress_bar_counts_tokens(llm):
    made = []

    class Recorder:
        def __init__(self, **kwargs):
            self.format_dict = {"elapsed": 2.0}
            self.total, self.updates, self.postfix, self.closed = kwargs["total"], 0, "", False
            made.append(self)

        def set_postfix_str(self, text, refresh):
            self.postfix = text

        def update(self):
            self.updates += 1

        def close(self):
            self.closed = True

    llm.generate([[5] * 4, [6] * 6], GREEDY, use_tqdm=Recorder)
    assert (made[0].total, made[0].updates, made[0].closed) == (2, 2, True)
    assert made[0].postfix == "in 5.0 tok/s, out 8.0 tok/s"


def test_more_prompts_than_run_at_once_come_back_in_order_each_with_its_own_answer(llm):
    prompts = [[9 + index] * (3 + 5 * (index % 4)) for index in range(11)]
    alone = [tokens(llm.generate([prompt], GREEDY, use_tqdm=False)[0]) for prompt in prompts]
    assert len({tuple(answer) for answer in alone}) > 5
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [tokens(output) for output in outputs] == alone
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_whatever_kind_of_output_is_asked_for_each_comes_once_and_whole(llm):
    expected = tokens(llm.generate("the cat", GREEDY, use_tqdm=False)[0])
    for kind in ("CUMULATIVE", "DELTA"):
        params = dataclasses.replace(GREEDY, output_kind=getattr(type(GREEDY.output_kind), kind))
        outputs = llm.generate(["the cat", "a window"], params, use_tqdm=False)
        assert [output.finished for output in outputs] == [True, True]
        assert tokens(outputs[0]) == expected


def test_prompts_that_share_a_prefix_run_together_unless_told_otherwise(folder, monkeypatch):
    """One at a time: in the order given, the first and the last, which begin alike, are apart."""
    prompts = [[*range(10, 50), 7], [*range(60, 100), 7], [*range(10, 50), 8]]

    def order_of(llm):
        step, finished = llm.engine.step, []

        def watched():
            outputs = step()
            finished.extend(int(output.request_id.removeprefix("llm-")) for output in outputs)
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", watched)
            llm.generate(prompts, GREEDY, use_tqdm=False)
        return finished

    arguments = {**ARGUMENTS, "max_num_seqs": 1}
    with LLM(folder, **arguments) as llm:
        order = order_of(llm)
    assert abs(order.index(0) - order.index(2)) == 1
    with LLM.from_engine_args(EngineConfig(folder, **arguments)) as llm:
        assert order_of(llm) == [0, 1, 2]


def test_chat_answers_each_of_several_conversations_and_names_the_one_that_is_wrong(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("the cat", "a window", "x y")]
    alone = [tokens(llm.chat(one, GREEDY, use_tqdm=False)[0]) for one in conversations]
    assert [tokens(output) for output in llm.chat(conversations, GREEDY, use_tqdm=False)] == alone
    with pytest.raises(RequestError, match="conversation 1"):
        llm.chat([conversations[0], [{"role": "user"}]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="chat_template_kwargs has tools"):
        llm.chat(conversations[0], GREEDY, use_tqdm=False, chat_template_kwargs={"tools": []})


def test_sampling_params_of_another_kind_are_refused(llm):
    with pytest.raises(RequestError, match="sampling_params is int"):
        llm.generate(["x y"], 3, use_tqdm=False)
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        llm.generate(["x y"], [None], use_tqdm=False)
    assert llm.engine.stats().num_steps == 0
