"""How many tokens a second the engine makes of a batch of requests."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lamella import LLM, SamplingParams
from lamella.argument_checks import WholeRange
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.requests import NUM_PROMPTS, BenchmarkRequest, DrawContext, draw_requests
from lamella.errors import ConfigError, LamellaError
from lamella.output_path import check_output_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputArgs:
    """One benchmark run.

    engine_args: fields of EngineConfig; their seed also draws the prompts. num_warmups: random prompts,
    as long as the first of the run, to generate before the clock starts. output_json: file for the result.
    """

    engine_args: Mapping[str, Any]
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    num_prompts: int = 1000
    num_warmups: int = 0
    temperature: float = 1.0
    output_json: str | None = None

    def __post_init__(self) -> None:
        NUM_PROMPTS.check("num_prompts", self.num_prompts, ConfigError)
        WholeRange(0, NUM_PROMPTS.most).check("num_warmups", self.num_warmups, ConfigError)
        SamplingParams(temperature=self.temperature)  # raises where it is out of range
        check_output_path("output_json", self.output_json)  # found out now rather than after the run


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """What one run measured. Rates are per second of `generate`; loading and warm-up are outside of it.

    prefix_hit_share: prompt tokens served from the prefix cache / prompt tokens. peak_memory_bytes: the
    process's largest resident size, loading included. peak_pages: most pages owned at once, per KV group.
    """

    model_id: str
    elapsed_seconds: float
    load_seconds: float
    num_requests: int
    num_skipped: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    peak_memory_bytes: int
    peak_pages: dict[str, int]

    @property
    def num_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def prefix_hit_share(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens

    def to_json(self) -> dict[str, Any]:
        """The result as JSON: vLLM's keys, then lamella's own."""
        return {
            "model_id": self.model_id,
            "elapsed_time": self.elapsed_seconds,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_total_tokens,
            "requests_per_second": self.num_requests / self.elapsed_seconds,
            "tokens_per_second": self.num_total_tokens / self.elapsed_seconds,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed_seconds,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "load_seconds": self.load_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "prefix_hit_share": self.prefix_hit_share,
            "peak_pages": self.peak_pages,
        }

    def report(self) -> str:
        """Lines for people; the first three are vLLM's, to the character."""
        elapsed = self.elapsed_seconds
        lines = [
            f"Throughput: {self.num_requests / elapsed:.2f} requests/s, "
            f"{self.num_total_tokens / elapsed:.2f} total tokens/s, "
            f"{self.num_output_tokens / elapsed:.2f} output tokens/s",
            f"Total num prompt tokens:  {self.num_prompt_tokens}",
            f"Total num output tokens:  {self.num_output_tokens}",
            f"Time to load:             {self.load_seconds:.2f} s",
            f"Peak memory:              {self.peak_memory_bytes / 2**20:.0f} MiB",
            f"Prefix-hit share:         {100 * self.prefix_hit_share:.1f} %",
            f"Peak pages per group:     {', '.join(f'{name} {n}' for name, n in self.peak_pages.items())}",
        ]
        if self.num_skipped:
            lines.append(f"Skipped requests:         {self.num_skipped} (longer than max_model_len)")
        return "\n".join(lines)


def run_throughput(args: ThroughputArgs, llm_factory: Callable[..., LLM] = LLM) -> ThroughputResult:
    """Load the model, draw the requests, generate for all of them at once, and write `args.output_json`.

    Raises ConfigError where the data set's options contradict each other (before anything is loaded)
    or its requests do not fit the model.
    """
    dataset = args.dataset.dataset()
    with llm_factory(**args.engine_args) as llm:
        context = DrawContext(
            num_prompts=args.num_prompts,
            vocab_size=llm.model_config.vocab_size,
            max_model_len=llm.engine.max_model_len,
            seed=args.engine_args.get("seed") or 0,
            encode=lambda text: list(llm.get_tokenizer().encode(text)),
        )
        drawn = draw_requests(dataset, context)
        if args.num_warmups:
            _generate(llm, _warmup_requests(drawn.requests[: args.num_warmups], context), args.temperature)
        elapsed_seconds, outputs = _generate(llm, drawn.requests, args.temperature)
        result = ThroughputResult(
            model_id=args.engine_args["model"],
            elapsed_seconds=elapsed_seconds,
            load_seconds=llm.load_seconds,
            num_requests=len(outputs),
            num_skipped=drawn.num_skipped,
            num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
            num_output_tokens=sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
            peak_memory_bytes=_peak_memory_bytes(),
            peak_pages=dict(llm.engine.stats().peak_pages),
        )
    if args.output_json is not None:
        Path(args.output_json).write_text(json.dumps(result.to_json(), indent=4) + "\n", encoding="utf-8")
    return result


def _generate(llm: LLM, requests: tuple[BenchmarkRequest, ...], temperature: float) -> tuple[float, list[Any]]:
    """(seconds, outputs) of one call to generate. Raises LamellaError where a request ended with an error."""
    prompts = [request.prompt_token_ids for request in requests]
    params = [
        SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True) for request in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=True)
    elapsed_seconds = time.perf_counter() - start
    for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise LamellaError(
                    f"request {output.request_id} failed, so the time is of no use: {completion.stop_reason}"
                )
    return elapsed_seconds, outputs


def _warmup_requests(requests: tuple[BenchmarkRequest, ...], context: DrawContext) -> tuple[BenchmarkRequest, ...]:
    """Random prompts as long as those of the given requests, whose own prompts would fill the prefix cache before the
    run."""
    rng = np.random.default_rng((context.seed, 2))
    return tuple(
        BenchmarkRequest(
            rng.integers(0, context.vocab_size, size=len(request.prompt_token_ids)).tolist(), request.output_len
        )
        for request in requests
    )


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere but on macOS
