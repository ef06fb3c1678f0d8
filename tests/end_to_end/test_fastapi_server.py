"""The example service over HTTP on loopback, with OpenAI's client library and httpx."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from lamella import LLM, AsyncEngine, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi_server.py"
ARGUMENTS = {"max_model_len": 512, "kv_cache_memory_bytes": 2**23, "max_num_seqs": 4}
GREEDY = {"temperature": 0, "max_tokens": 12}
LONG = {"temperature": 0, "max_tokens": 480, "extra_body": {"ignore_eos": True}}
CHAT = [{"role": "user", "content": "the cat"}]


class Service:
    """url: of what the example's app answers to, in a thread; expected: LLM's outputs for a text and for CHAT."""

    def __init__(self, folder: str) -> None:
        with LLM(folder, **ARGUMENTS) as llm:
            params = SamplingParams(**GREEDY)
            self.expected = [
                llm.generate("the quick", params, use_tqdm=False)[0],
                llm.chat(CHAT, params, use_tqdm=False)[0],
            ]
        spec = importlib.util.spec_from_file_location("fastapi_server", EXAMPLE)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        compact = {"disable_any_whitespace": True}  # a random model would go on with spaces for ever
        self.engine = AsyncEngine(model=folder, structured_outputs_config=compact, **ARGUMENTS)
        app = example.build_app(self.engine, "tiny")
        self.server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join()
        assert self.engine.is_closed

    def owned_pages(self) -> int:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("lamella:kv_group_pages_owned{"))


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    service = Service(str(path))
    yield service
    service.close()


@pytest.fixture(autouse=True)
def nothing_is_left(service):
    yield
    wait_until(lambda: service.engine.num_unfinished_requests == 0)
    assert service.owned_pages() == 0


def test_completions_are_the_models(service):
    expected = service.expected[0]
    made = service.client.completions.create(model="tiny", prompt=["the quick", expected.prompt_token_ids], **GREEDY)
    assert [choice.text for choice in made.choices] == [expected.outputs[0].text] * 2
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert made.usage.prompt_tokens == 2 * len(expected.prompt_token_ids)
    assert made.usage.completion_tokens == 2 * len(expected.outputs[0].token_ids)
    assert [one.id for one in service.client.models.list()] == ["tiny"]


def test_a_chat_is_streamed_with_its_usage(service):
    expected = service.expected[1]
    chunks = list(
        service.client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content for part in parts) == expected.outputs[0].text
    assert [part.choices[0].delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
    assert [part.choices[0].finish_reason for part in parts][-1] == expected.outputs[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.outputs[0].token_ids)
    made = service.client.chat.completions.create(model="tiny", messages=CHAT, **GREEDY)
    assert made.choices[0].message.content == expected.outputs[0].text
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids) == last.usage.prompt_tokens
    assert made.choices[0].message.role == "assistant"


def test_samples_are_told_apart_in_a_stream(service):
    asked = {"model": "tiny", "prompt": "the cat", "n": 3, "seed": 5, "max_tokens": 20}
    whole = service.client.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in service.client.completions.create(stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 1


def test_an_answer_has_the_form_that_was_asked_for(service):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    made = service.client.chat.completions.create(
        model="tiny", messages=CHAT, response_format=form, temperature=0, max_tokens=200
    )
    assert set(json.loads(made.choices[0].message.content)) == {"a"}


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"temperature": 9}, 400, "temperature=9"),
        ({"max_tokens": 0}, 400, "max_tokens=0"),
        ({"extra_body": {"tempreture": 1}}, 400, "did you mean 'temperature'"),
        ({"prompt": "the quick " * 600}, 400, "shorten it to at most 511"),
        ({"prompt": [5, 10**6]}, 400, r"must lie in \[0, 319\]"),
        ({"model": "other"}, 404, "runs the model 'tiny'"),
        ({"logprobs": 2}, 400, "no log-probabilities"),
        ({"prompt": ["a", "b"], "stream": True}, 400, "streams one at a time"),
        ({"prompt": "the quick " * 600, "stream": True}, 400, "shorten it to at most 511"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_errors_have_openais_form(service, change, status, message):
    with pytest.raises(openai.APIStatusError, match=message) as raised:
        service.client.completions.create(**{"model": "tiny", "prompt": "a", **change})
    assert raised.value.status_code == status
    assert set(raised.value.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}"])
def test_bodies_that_say_nothing_are_refused(service, body):
    response = httpx.post(f"{service.url}/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_frees_the_memory(service):
    """Amid a stream, and while it waits for a whole answer."""
    before = httpx.get(f"{service.url}/metrics").text
    stream = service.client.completions.create(model="tiny", prompt="a", stream=True, **LONG)
    next(iter(stream))
    stream.close()
    wait_until(lambda: service.engine.num_unfinished_requests == 0)
    with pytest.raises(openai.APITimeoutError):
        service.client.completions.create(model="tiny", prompt="a", timeout=0.05, **LONG)
    wait_until(lambda: service.engine.num_unfinished_requests == 0)
    after = httpx.get(f"{service.url}/metrics").text

    def num_generated(text):
        lines = [line for line in text.splitlines() if line.startswith("lamella:generation_tokens_total{")]
        return int(float(lines[0].split()[-1]))

    assert num_generated(after) - num_generated(before) < 2 * 480


def test_it_says_whether_it_lives(service):
    assert httpx.get(f"{service.url}/health").status_code == 200
