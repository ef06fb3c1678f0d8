"""How many tokens a second the engine makes of a batch of requests."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lamella import LLM, SamplingParams
from lamella.argument_checks import WholeRange, shown
from lamella.benchmark.backends import BACKENDS, RunSettings, open_backend
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.request_times import RequestTimes, plot_times
from lamella.benchmark.requests import NUM_PROMPTS, BenchmarkRequest, DrawContext, draw_requests
from lamella.errors import ConfigError
from lamella.output_path import check_output_path
from lamella.plot_path import check_plot_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputArgs:
    """One benchmark run.

    engine_args: fields of EngineConfig; their seed also draws the prompts. num_warmups: random prompts,
    as long as the first of the run, to generate before the clock starts. output_json: file for the result.
    n: samples of each prompt. backend: what runs them, one of BACKENDS; async_engine: lamella's AsyncEngine.
    hf_max_batch_size: prompts at a time of transformers. plot: PNG file for the latencies.
    """

    engine_args: Mapping[str, Any]
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    num_prompts: int = 1000
    num_warmups: int = 0
    temperature: float = 1.0
    output_json: str | None = None
    n: int = 1
    backend: str = "lamella"
    async_engine: bool = False
    hf_max_batch_size: int = 16
    plot: str | None = None

    def __post_init__(self) -> None:
        NUM_PROMPTS.check("num_prompts", self.num_prompts, ConfigError)
        WholeRange(0, NUM_PROMPTS.most).check("num_warmups", self.num_warmups, ConfigError)
        SamplingParams(temperature=self.temperature)  # raises where it is out of range
        for name in ("n", "hf_max_batch_size"):
            WholeRange(1, 10**6).check(name, getattr(self, name), ConfigError)
        if self.n > 1 and not self.temperature:
            raise ConfigError(f"n={self.n} with temperature=0: greedy samples are all the same; raise the temperature")
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend={shown(self.backend)} is not known; choose one of {', '.join(BACKENDS)}")
        if self.async_engine and self.backend != "lamella":
            raise ConfigError(f"async_engine=True with backend={self.backend!r}: only lamella is run so; leave one out")
        check_plot_path(self.plot)
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
    times: RequestTimes = field(default_factory=RequestTimes)

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
            **self.times.to_json(),
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
        ]
        if self.peak_pages:
            pages = ", ".join(f"{name} {n}" for name, n in self.peak_pages.items())
            lines.append(f"Peak pages per group:     {pages}")
        lines += self.times.report()
        if self.num_skipped:
            lines.append(f"Skipped requests:         {self.num_skipped} (longer than max_model_len)")
        return "\n".join(lines)


def run_throughput(args: ThroughputArgs, llm_factory: Callable[..., LLM] = LLM) -> ThroughputResult:
    """Load the model, draw the requests, generate for all of them at once, and write `args.output_json`.

    Raises ConfigError where the data set's options contradict each other (before anything is loaded)
    or its requests do not fit the model.
    """
    dataset, settings = args.dataset.dataset(), RunSettings(args.temperature, args.n)
    with open_backend(
        args.backend,
        args.engine_args,
        is_async=args.async_engine,
        max_batch_size=args.hf_max_batch_size,
        llm_factory=llm_factory,
    ) as backend:
        context = DrawContext(
            num_prompts=args.num_prompts,
            vocab_size=backend.vocab_size,
            max_model_len=backend.max_model_len,
            seed=args.engine_args.get("seed") or 0,
            encode=backend.encode,
        )
        drawn = draw_requests(dataset, context)
        if args.num_warmups:
            backend.run(_warmup_requests(drawn.requests[: args.num_warmups], context), settings)
        counts = backend.run(drawn.requests, settings)
        result = ThroughputResult(
            model_id=args.engine_args["model"],
            elapsed_seconds=counts.seconds,
            load_seconds=backend.load_seconds,
            num_requests=counts.num_requests,
            num_skipped=drawn.num_skipped,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_output_tokens=counts.num_output_tokens,
            peak_memory_bytes=_peak_memory_bytes(),
            peak_pages=backend.peak_pages(),
            times=counts.times,
        )
    if args.plot is not None:
        plot_times(result.times, f"{result.model_id}: {result.num_requests} requests", args.plot)
    if args.output_json is not None:
        Path(args.output_json).write_text(json.dumps(result.to_json(), indent=4) + "\n", encoding="utf-8")
    return result


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
