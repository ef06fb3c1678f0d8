"""What runs the requests of a benchmark: lamella, lamella's AsyncEngine, transformers' generate, or an installed vLLM.

A backend is opened with engine arguments, and is a context manager. `run` takes all requests at once.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from lamella import LLM, AsyncEngine, SamplingParams
from lamella.benchmark.request_times import RequestTimes
from lamella.benchmark.requests import BenchmarkRequest
from lamella.errors import ConfigError, LamellaError

BACKENDS = ("lamella", "transformers", "hf", "vllm")


class RunSettings(NamedTuple):
    """How tokens are chosen, and how many samples each prompt gets."""

    temperature: float
    n: int


class RunCounts(NamedTuple):
    """What one run did. seconds: from the first request given to the last answer had."""

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    times: RequestTimes


class Backend(Protocol):
    """vocab_size, max_model_len: the model's. load_seconds: what opening took."""

    vocab_size: int
    max_model_len: int
    load_seconds: float

    def encode(self, text: str) -> list[int]: ...

    def run(self, requests: Sequence[BenchmarkRequest], settings: RunSettings) -> RunCounts: ...

    def peak_pages(self) -> dict[str, int]:
        """Most pages owned at once, per KV group; empty where nothing is known of pages."""
        ...

    def close(self) -> None: ...


class LLMBackend:
    """lamella's LLM, or vLLM's, which has the same methods."""

    def __init__(self, llm: Any, params_type: Any, vocab_size: int, max_model_len: int, load_seconds: float) -> None:
        self._llm, self._params_type = llm, params_type
        self.vocab_size, self.max_model_len, self.load_seconds = vocab_size, max_model_len, load_seconds

    @classmethod
    def lamella(cls, engine_args: Mapping[str, Any], llm_factory: Callable[..., LLM]) -> LLMBackend:
        llm = llm_factory(**engine_args)
        return cls(llm, SamplingParams, llm.model_config.vocab_size, llm.engine.max_model_len, llm.load_seconds)

    @classmethod
    def vllm(cls, engine_args: Mapping[str, Any]) -> LLMBackend:
        vllm = _installed("vllm", "vllm")
        start = time.perf_counter()
        llm = vllm.LLM(**engine_args)
        seconds = time.perf_counter() - start
        config = llm.llm_engine.model_config
        return cls(llm, vllm.SamplingParams, config.get_vocab_size(), config.max_model_len, seconds)

    def encode(self, text: str) -> list[int]:
        return list(self._llm.get_tokenizer().encode(text))

    def run(self, requests: Sequence[BenchmarkRequest], settings: RunSettings) -> RunCounts:
        is_lamella = self._params_type is SamplingParams
        prompts = [
            request.prompt_token_ids if is_lamella else {"prompt_token_ids": request.prompt_token_ids}
            for request in requests
        ]
        params = [
            self._params_type(
                n=settings.n, temperature=settings.temperature, max_tokens=request.output_len, ignore_eos=True
            )
            for request in requests
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=True)
        seconds = time.perf_counter() - start
        return _counts(seconds, outputs, RequestTimes.of_outputs(outputs) if is_lamella else RequestTimes())

    def peak_pages(self) -> dict[str, int]:
        return dict(self._llm.engine.stats().peak_pages) if self._params_type is SamplingParams else {}

    def close(self) -> None:
        if self._params_type is SamplingParams:
            self._llm.__exit__(None, None, None)


class AsyncBackend:
    """lamella's AsyncEngine: every request a task that reads its own stream."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        self._engine = AsyncEngine(**engine_args)
        self.load_seconds = time.perf_counter() - start
        inner = self._engine.engine
        self.vocab_size, self.max_model_len = inner.model_config.vocab_size, inner.max_model_len
        self._num_runs = 0

    def encode(self, text: str) -> list[int]:
        return list(self._engine.engine.get_tokenizer().encode(text))

    def run(self, requests: Sequence[BenchmarkRequest], settings: RunSettings) -> RunCounts:
        self._num_runs += 1
        return asyncio.run(self._run_all(requests, settings))

    async def _run_all(self, requests: Sequence[BenchmarkRequest], settings: RunSettings) -> RunCounts:
        times = RequestTimes()

        async def one(index: int, request: BenchmarkRequest) -> Any:
            params = SamplingParams(
                n=settings.n, temperature=settings.temperature, max_tokens=request.output_len, ignore_eos=True
            )
            request_id = f"run-{self._num_runs}-{index}"
            arrived, came, output = time.monotonic(), [], None
            async for latest in self._engine.generate(request.prompt_token_ids, params, request_id):
                output = latest
                came.append(time.monotonic())
            if output is not None and came:
                times.add(arrived, came[0], came[-1], max(len(each.token_ids) for each in output.outputs))
                times.itl.extend(later - before for before, later in itertools.pairwise(came))
            return output

        start = time.perf_counter()
        outputs = await asyncio.gather(*(one(index, request) for index, request in enumerate(requests)))
        return _counts(time.perf_counter() - start, outputs, times)

    def peak_pages(self) -> dict[str, int]:
        return dict(self._engine.engine.stats().peak_pages)

    def close(self) -> None:
        self._engine.close()


class TransformersBackend:
    """transformers' own `generate`, `max_batch_size` prompts at a time, padded to the longest of them."""

    def __init__(self, engine_args: Mapping[str, Any], max_batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        foreign = sorted(set(engine_args) - {"model", "tokenizer", "dtype", "max_model_len", "seed", "device"})
        if foreign:
            raise ConfigError(
                f"{foreign[0]}={engine_args[foreign[0]]!r} says nothing to transformers' generate; leave it out"
            )
        start = time.perf_counter()
        dtype = getattr(torch, str(engine_args.get("dtype") or "float32").replace("auto", "float32"))
        self._torch, self._max_batch_size = torch, max_batch_size
        # As lamella reads folders: no code of theirs, no pickled weights, nothing from a hub.
        trusted: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        self._model = AutoModelForCausalLM.from_pretrained(
            engine_args["model"], dtype=dtype, use_safetensors=True, **trusted
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(engine_args.get("tokenizer") or engine_args["model"], **trusted)
        torch.manual_seed(engine_args.get("seed") or 0)
        self.load_seconds = time.perf_counter() - start
        config = self._model.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.max_model_len = engine_args.get("max_model_len") or config.max_position_embeddings

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def run(self, requests: Sequence[BenchmarkRequest], settings: RunSettings) -> RunCounts:
        start = time.perf_counter()
        for first in range(0, len(requests), self._max_batch_size):
            self._run_batch(requests[first : first + self._max_batch_size], settings)
        seconds = time.perf_counter() - start
        num_output_tokens = settings.n * sum(request.output_len for request in requests)
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return RunCounts(seconds, len(requests), num_prompt_tokens, 0, num_output_tokens, RequestTimes())

    def _run_batch(self, requests: Sequence[BenchmarkRequest], settings: RunSettings) -> None:
        torch, longest = self._torch, max(len(request.prompt_token_ids) for request in requests)
        padding = [longest - len(request.prompt_token_ids) for request in requests]
        rows = [[0] * pad + request.prompt_token_ids for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        num_new = max(request.output_len for request in requests)
        sampling = {"do_sample": True, "temperature": settings.temperature} if settings.temperature else {}
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                num_return_sequences=settings.n,
                pad_token_id=0,
                **sampling,
            )

    def peak_pages(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        del self._model


@dataclass(frozen=True, slots=True)
class OpenBackend:
    """A backend, closed at the end of the block."""

    backend: Backend

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close()


def open_backend(
    name: str, engine_args: Mapping[str, Any], *, is_async: bool, max_batch_size: int, llm_factory: Callable[..., LLM]
) -> OpenBackend:
    """Load the model into a backend of BACKENDS. Raises ConfigError where that is not installed."""
    if name in ("transformers", "hf"):
        return OpenBackend(TransformersBackend(engine_args, max_batch_size))
    if name == "vllm":
        return OpenBackend(LLMBackend.vllm(engine_args))
    if is_async:
        return OpenBackend(AsyncBackend(engine_args))
    return OpenBackend(LLMBackend.lamella(engine_args, llm_factory))


def _installed(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'backend="{name}": it is not installed; run: pip install {package}') from error


def _counts(seconds: float, outputs: Sequence[Any], times: RequestTimes) -> RunCounts:
    """Raises LamellaError where a request ended with an error."""
    for output in outputs:
        problem = getattr(output, "error", None)
        for completion in output.outputs:
            if completion.finish_reason == "error":
                problem = problem or completion.stop_reason
        if problem is not None:
            raise LamellaError(f"request {output.request_id} failed, so the time is of no use: {problem}")
    return RunCounts(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens or 0 for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        times,
    )
