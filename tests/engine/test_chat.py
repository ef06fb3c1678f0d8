"""`LLM.chat` and prompts on a whole engine: what reaches the model, and where it stops."""

import dataclasses
import json

import pytest
from transformers import AutoTokenizer

from lamella import LLM, SamplingParams
from lamella.errors import RequestError
from tests.helpers.tiny_gemma import save_tiny_gemma

ENGINE = {"kv_cache_memory_bytes": 4 << 20, "max_model_len": 128, "dtype": "float32", "device": "cpu"}
ONE = SamplingParams(max_tokens=1, temperature=0.0)
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}"
    "{% endfor %}"
    "{{ tools[0].name if tools }}{{ mood }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_gemma(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "default", "template": config["chat_template"]},
        {"name": "calls", "template": TEMPLATE},
    ]
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **ENGINE) as llm:
        yield llm


def chat(llm, messages, **arguments):
    (output,) = llm.chat(messages, ONE, use_tqdm=False, **arguments)
    return output


def test_a_message_with_tool_calls_alone_is_the_templates_affair(llm):
    messages = [{"role": "user", "content": "a"}, CALL]
    output = chat(llm, messages, chat_template="calls", tools=[{"name": "g"}], chat_template_kwargs={"mood": "!"})
    assert output.prompt == "[user]a[assistant]fg!"


def test_text_parts_are_no_repr(llm):
    output = chat(
        llm, [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]}]
    )
    assert output.prompt == "<bos><turn>user\nthe\ncat</turn>\n<turn>model\n"


def test_final_message_is_continued_as_in_transformers(llm, folder):
    messages = [{"role": "user", "content": "the"}, {"role": "model", "content": "cat sat"}]
    output = chat(llm, messages, continue_final_message=True, add_generation_prompt=False)
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert output.prompt == wanted == "<bos><turn>user\nthe</turn>\n<turn>model\ncat sat"


REASONING = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {{ t.function.parameters | tojson }};{% endfor %}"
    "{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}.{% endfor %}"
    "{% if add_generation_prompt %}[a]{% if enable_thinking is defined and not enable_thinking %}()"
    "{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": 1}}}


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("last", ["answer", "continue"])
def test_tools_and_reasoning_reach_the_model_as_in_transformers(llm, folder, variables, last):
    """Token by token, by a template of the kind that models with reasoning have."""
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "reasoning_content": "jumps", **CALL},
        {"role": "tool", "content": "over 10"},
    ]
    arguments = {"add_generation_prompt": True}
    if last == "continue":
        messages.append({"role": "assistant", "reasoning_content": "the dog", "content": "and the"})
        arguments = {"add_generation_prompt": False, "continue_final_message": True}
    output = llm.chat(
        messages,
        ONE,
        tools=[TOOL],
        chat_template=REASONING,
        chat_template_kwargs=variables,
        use_tqdm=False,
        **arguments,
    )[0]
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(
        messages, tools=[TOOL], chat_template=REASONING, tokenize=True, return_dict=False, **arguments, **variables
    )
    assert output.prompt_token_ids == wanted
    if last == "continue":
        with pytest.raises(RequestError, match="continue_final_message needs add_generation_prompt=False"):
            llm.chat(messages, ONE, chat_template=REASONING, continue_final_message=True)


def test_messages_may_be_objects(llm):
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    assert chat(llm, [Message("user", "a")]).prompt == "<bos><turn>user\na</turn>\n<turn>model\n"


@pytest.mark.parametrize(
    ("messages", "arguments", "reason"),
    [
        (["a"], {}, r"messages\[0\] is 'a'"),
        ([{"content": "a"}], {}, '"role"'),
        ([[CALL], [{"content": "a"}]], {}, r"conversation 1: messages\[0\]"),
        ([[CALL], "a"], {}, r"messages\[1\] must be a non-empty list"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, r'messages\[0\]\["content"\]\[0\]'),
        ([CALL], {"chat_template": "{{ 'a' * 10**9 }}"}, "units of work"),
        ([CALL], {"chat_template": "{{ messages[0].x.y }}"}, "chat template refuses"),
        ([CALL], {"chat_template_kwargs": {"tools": []}}, "pass them to chat itself"),
        ([CALL], {"continue_final_message": True}, "add_generation_prompt=False"),
    ],
)
def test_refusals(llm, messages, arguments, reason):
    with pytest.raises(RequestError, match=reason):
        llm.chat(messages, ONE, use_tqdm=False, **arguments)


def test_an_empty_prompt_runs_on_bos(llm):
    empty, bos = llm.generate(["", [2]], ONE, use_tqdm=False)
    assert list(empty.prompt_token_ids) == [2]
    assert list(empty.outputs[0].token_ids) == list(bos.outputs[0].token_ids)


def edited(folder, target, file, change):
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    value = json.loads((target / file).read_text())
    change(value)
    (target / file).write_text(json.dumps(value))
    return str(target)


def test_an_empty_prompt_without_bos_is_refused(folder, tmp_path):
    path = edited(folder, tmp_path, "tokenizer.json", lambda value: value.update(post_processor=None))
    with LLM(path, **ENGINE) as llm, pytest.raises(RequestError, match="prompt is empty"):
        llm.generate("", ONE, use_tqdm=False)


def test_the_tokenizers_end_token_ends_a_request(folder, llm, tmp_path):
    """A model whose configuration names another end token stops at the tokenizer's as well."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate("the cat", greedy, use_tqdm=False)
    stop_id = output.outputs[0].token_ids[2]
    token = llm.get_tokenizer().convert_ids_to_tokens(stop_id)
    first = output.outputs[0].token_ids.index(stop_id)
    path = edited(folder, tmp_path, "tokenizer_config.json", lambda value: value.update(eos_token=token))
    with LLM(path, **ENGINE) as changed:
        assert stop_id in changed.model_config.eos_token_ids
        assert set(llm.model_config.eos_token_ids) - {1} <= set(changed.model_config.eos_token_ids)
        prompt = list(output.prompt_token_ids)
        (ended,) = changed.generate([prompt], dataclasses.replace(greedy, ignore_eos=False), use_tqdm=False)
    assert ended.outputs[0].finish_reason == "stop"
    assert len(ended.outputs[0].token_ids) == first + 1


def test_an_end_token_beyond_the_model_is_none(folder, tmp_path):
    path = edited(folder, tmp_path, "tokenizer_config.json", lambda value: value.update(eos_token="<far>"))
    with LLM(path, **ENGINE) as llm:
        assert all(token_id < 320 for token_id in llm.model_config.eos_token_ids)
