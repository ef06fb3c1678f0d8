"""How long one batch takes, over and over: vLLM's `bench latency`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella import LLM, SamplingParams
from lamella.argument_checks import WholeRange
from lamella.benchmark.datasets import NUM_TOKENS
from lamella.errors import ConfigError
from lamella.output_path import check_output_path

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyArgs:
    """engine_args: fields of EngineConfig. A batch is batch_size random prompts of input_len tokens, each continued n
    times by output_len tokens; the prompts of each repetition are new, so that none is found in the cache."""

    engine_args: Mapping[str, Any]
    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    num_iters_warmup: int = 10
    num_iters: int = 30
    output_json: str | None = None

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            NUM_TOKENS.check(name, getattr(self, name), ConfigError)
        for name, least in (("batch_size", 1), ("n", 1), ("num_iters_warmup", 0), ("num_iters", 1)):
            WholeRange(least, 10**6).check(name, getattr(self, name), ConfigError)
        check_output_path("output_json", self.output_json)


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Seconds of each repetition."""

    latencies: list[float]

    def percentiles(self) -> dict[int, float]:
        return {share: float(np.percentile(self.latencies, share)) for share in PERCENTAGES}

    def to_json(self) -> dict[str, Any]:
        """vLLM's keys."""
        return {
            "avg_latency": float(np.mean(self.latencies)),
            "latencies": self.latencies,
            "percentiles": {str(share): value for share, value in self.percentiles().items()},
        }

    def report(self) -> str:
        lines = [f"Avg latency: {np.mean(self.latencies)} seconds"]
        lines += [f"{share}% percentile latency: {value} seconds" for share, value in self.percentiles().items()]
        return "\n".join(lines)


def run_latency(args: LatencyArgs, llm_factory: Callable[..., LLM] = LLM) -> LatencyResult:
    """Load the model, run the batch `num_iters_warmup` times without a clock and `num_iters` times with one."""
    latencies: list[float] = []
    with llm_factory(**args.engine_args) as llm:
        rng = np.random.default_rng(args.engine_args.get("seed") or 0)
        params = SamplingParams(n=args.n, temperature=1.0, max_tokens=args.output_len, ignore_eos=True)
        for index in range(args.num_iters_warmup + args.num_iters):
            shape = (args.batch_size, args.input_len)
            prompts = rng.integers(0, llm.model_config.vocab_size, size=shape).tolist()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if index >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - start)
    result = LatencyResult(latencies)
    if args.output_json is not None:
        Path(args.output_json).write_text(json.dumps(result.to_json(), indent=4) + "\n", encoding="utf-8")
    return result
