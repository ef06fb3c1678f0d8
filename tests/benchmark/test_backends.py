"""What runs a benchmark's requests, and what is said of their times."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from lamella import CompletionOutput, RequestOutput
from lamella.benchmark import backends
from lamella.benchmark.backends import RunSettings, open_backend
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.request_times import RequestTimes, plot_times
from lamella.benchmark.requests import BenchmarkRequest
from lamella.benchmark.throughput import ThroughputArgs, run_throughput
from lamella.errors import ConfigError
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.tiny_gemma import save_tiny_gemma

DATASET = DatasetOptions(random_input_len=9, random_output_len=6, random_range_ratio=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.mark.parametrize("backend", ["lamella", "async", "transformers"])
def test_real_backends_generate_what_was_asked_for(folder, tmp_path, backend):
    engine_args = {"model": folder, "max_model_len": 128}
    is_async, backend = backend == "async", backend.replace("async", "lamella")
    if backend == "lamella":
        engine_args["kv_cache_memory_bytes"] = 2**22
    args = ThroughputArgs(
        engine_args=engine_args, dataset=DATASET, num_prompts=5, n=2, backend=backend, hf_max_batch_size=2,
        async_engine=is_async,
        output_json=str(tmp_path / "out.json"),
    )  # fmt: skip
    result = run_throughput(args)
    reference = run_throughput(
        ThroughputArgs(engine_args={"model": "m", "max_model_len": 128}, dataset=DATASET, num_prompts=5), FakeLLM
    )
    assert result.num_requests == 5
    assert result.num_prompt_tokens == reference.num_prompt_tokens
    assert result.num_output_tokens == 2 * reference.num_output_tokens
    written = json.loads((tmp_path / "out.json").read_text())
    assert ("p99_ttft_ms" in written) == (backend == "lamella")
    if backend == "lamella":
        assert 0 < written["p50_ttft_ms"] <= written["p99_ttft_ms"] < written["p99_e2el_ms"]
        assert len(result.times.e2el) == 5
        assert "Time to first token (ms): P50" in result.report()


def test_transformers_backend_continues_each_prompt_as_if_it_were_alone(folder):
    """Padding must not reach the shorter prompts of a batch: greedy outputs are those without a batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [[7, 8, 9, 10, 11, 12], [30, 31]]
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, -5:].tolist()
        for prompt in prompts
    ]
    seen = []
    with open_backend("hf", {"model": folder}, is_async=False, max_batch_size=2, llm_factory=FakeLLM) as backend:
        generate = backend._model.generate
        backend._model.generate = lambda **given: seen.append(generate(**given))
        counts = backend.run([BenchmarkRequest(prompt, 5) for prompt in prompts], RunSettings(0.0, 1))
    assert [row[-5:].tolist() for row in seen[0]] == alone
    assert (counts.num_output_tokens, counts.num_prompt_tokens) == (10, 8)


def test_vllm_is_called_by_its_own_names(monkeypatch):
    class Params:
        def __init__(self, **given):
            self.__dict__.update(given)

    class Model(FakeLLM):
        def __init__(self, model):
            super().__init__(model)
            config = SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=64)
            self.llm_engine = SimpleNamespace(model_config=config)

        def generate(self, prompts, params, use_tqdm):
            assert [one.ignore_eos for one in params] == [True] * len(prompts)
            return [
                RequestOutput(
                    request_id=str(index), prompt=None, prompt_token_ids=prompt["prompt_token_ids"], finished=True,
                    outputs=[
                        CompletionOutput(k, "", [1] * one.max_tokens, finish_reason="length") for k in range(one.n)
                    ],
                )
                for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
            ]  # fmt: skip

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Model, Params
    monkeypatch.setitem(sys.modules, "vllm", module)
    result = run_throughput(
        ThroughputArgs(engine_args={"model": "m"}, dataset=DATASET, num_prompts=4, n=3, backend="vllm")
    )
    assert (result.num_requests, result.peak_pages) == (4, {})
    assert result.num_output_tokens % 3 == 0


def test_what_is_not_there_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match='backend="vllm": it is not installed'):
        run_throughput(ThroughputArgs(engine_args={"model": "m"}, backend="vllm"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"backend": "none"}, "backend='none' is not known"),
        ({"backend": "hf", "async_engine": True}, "only lamella is run so"),
        ({"n": 0}, "n=0"),
        ({"n": 2, "temperature": 0.0}, "greedy samples are all the same"),
        ({"plot": "a.pdf"}, "plots are PNG files"),
    ],
)
def test_contradictions_are_refused_before_loading(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        ThroughputArgs(engine_args={"model": "m"}, **arguments)


class AsyncFake:
    """An AsyncEngine that answers each request with its tokens, one at a time."""

    def __init__(self, **engine_args):
        self.engine = FakeLLM(**engine_args).engine
        self.engine.model_config = SimpleNamespace(vocab_size=100)
        self.engine.get_tokenizer = None
        self.ids = []

    async def generate(self, prompt, params, request_id):
        self.ids.append(request_id)
        for count in range(1, params.max_tokens + 1):
            completion = CompletionOutput(0, "", [7] * count, finish_reason="length")
            yield RequestOutput(
                request_id=request_id, prompt=None, prompt_token_ids=prompt, outputs=[completion],
                finished=count == params.max_tokens,
            )  # fmt: skip

    def close(self):
        self.is_closed = True


def test_async_requests_are_streams_of_their_own(monkeypatch):
    made = []
    monkeypatch.setattr(backends, "AsyncEngine", lambda **given: made.append(AsyncFake(**given)) or made[0])
    result = run_throughput(
        ThroughputArgs(engine_args={"model": "m"}, dataset=DATASET, num_prompts=4, num_warmups=1, async_engine=True)
    )
    (engine,) = made
    assert engine.is_closed
    assert len(set(engine.ids)) == 5
    assert len(result.times.ttft) == 4
    assert len(result.times.itl) == result.num_output_tokens - 4


def test_percentiles_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    times = RequestTimes()
    for index in range(100):
        times.add(10.0, 10.0 + (index + 1) / 100, 12.0 + index / 100, 1 if index == 0 else 11)
    found = times.to_json()
    first = [(index + 1) / 100 for index in range(100)]
    assert found["p90_ttft_ms"] == pytest.approx(1e3 * np.percentile(first, 90))
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * (2.0 - 0.01) / 10)
    assert len(times.tpot) == 99
    assert not any("itl" in name for name in found)
    plot_times(times, "a title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="does not say when tokens came"):
        plot_times(RequestTimes(), "a title", tmp_path / "other.png")
