"""Who runs a model: native layers, transformers' layers on lamella's attention and KV cache, and transformers alone.

    python benchmarks/benchmark_model_impls.py --model demo:smollm2-135m --requests 1 --requests 16 --rounds 3

All ways are loaded in one process and take turns, each round beginning with another one, so that what slows the machine
down slows all of them. In a run all prompts are computed in one step, and then each step gives every request a token:
the time up to the first tokens and the time from there are the two figures. transformers alone is its `generate`, one
static batch. Weights are float32 but for `blocks`, the file's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from compare_engines.machine import describe_machine
from compare_engines.results import Spread, agreement, ratios
from compare_engines.rounds import round_order
from lamella import Engine, SamplingParams
from lamella.model_executor.models.transformers_backend.model_weights import load_model
from lamella.model_executor.models.transformers_backend.text_config import RunBy, class_for, read_configs
from lamella.model_executor.weights.gguf_split import read_gguf_model
from lamella.model_executor.weights.model_source import resolve_model
from markdown_tables import table

WAYS = {
    "native": "native layers, float32",
    "blocks": "native layers, the file's blocks",
    "transformers": "transformers' layers",
    "generate": "transformers alone",
}
# Of one run; prompts: all of them, as token ids.
Run = Callable[[list[list[int]], int], "Timed"]


class Timed(NamedTuple):
    prompt_seconds: float
    decode_seconds: float
    output_token_ids: list[list[int]]


class Figures(NamedTuple):
    """One entry per round, in their order."""

    prompt_seconds: list[float]
    decode_seconds: list[float]


def engine_run(model: str, max_requests: int, request_tokens: int, **arguments: Any) -> Run:
    """request_tokens: of one request, prompt and output."""
    engine = Engine(
        model=model,
        dtype="float32",
        enable_prefix_caching=False,
        max_model_len=request_tokens,
        max_num_seqs=max_requests,
        max_num_batched_tokens=max_requests * request_tokens,
        kv_cache_memory_bytes=1 << 30,
        **arguments,
    )
    run_index = 0

    def run(prompts: list[list[int]], output_tokens: int) -> Timed:
        nonlocal run_index
        run_index += 1
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        names = [f"{run_index}/{place}" for place in range(len(prompts))]
        start = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        tokens: dict[str, list[int]] = {}
        first = start
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if first == start and len(tokens) == len(prompts):
                first = time.perf_counter()
        return Timed(first - start, time.perf_counter() - first, [tokens[name] for name in names])

    return run


def read_run_by(model: str) -> RunBy:
    source = resolve_model(model)
    header = None if source.gguf_path is None else read_gguf_model(source.gguf_path)
    return class_for(*read_configs(source.folder, header))


def generate_run(model: str) -> Run:
    run_by = read_run_by(model)
    hf_model = load_model(resolve_model(model), run_by, run_by.config, torch.float32)
    hf_model.generation_config.eos_token_id = None
    hf_model.generation_config.pad_token_id = 0
    hf_model.generation_config.do_sample = False

    def run(prompts: list[list[int]], output_tokens: int) -> Timed:
        seconds: list[float] = []

        def note(token_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Called behind every token; ends nothing."""
            seconds.append(time.perf_counter())
            return torch.zeros(len(token_ids), dtype=torch.bool)

        ids = torch.tensor(prompts)  # [num_requests, prompt_tokens]
        start = time.perf_counter()
        with torch.inference_mode():
            output = hf_model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens, stopping_criteria=[note]
            )
        return Timed(seconds[0] - start, seconds[-1] - seconds[0], output[:, ids.shape[1] :].tolist())

    return run


def opened(way: str, model: str, max_requests: int, request_tokens: int) -> Run:
    if way == "generate":
        return generate_run(model)
    if way == "transformers":
        return engine_run(model, max_requests, request_tokens, model_impl="transformers")
    quantization = "gguf" if way == "blocks" else "none"
    return engine_run(model, max_requests, request_tokens, model_impl="native", quantization=quantization)


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option("--model", required=True, help="folder, GGUF file or demo model")
@click.option("--ways", default=",".join(WAYS), help="comma-separated; the first is what the others are compared with")
@click.option("--requests", "request_counts", type=click.IntRange(min=1), multiple=True, default=(1, 16))
@click.option("--input-tokens", type=click.IntRange(min=1), default=128)
@click.option("--output-tokens", type=click.IntRange(min=2), default=33)
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=3)
@click.option("--threads", type=click.IntRange(min=1), default=1)
def main(
    model: str,
    ways: str,
    request_counts: Sequence[int],
    input_tokens: int,
    output_tokens: int,
    num_rounds: int,
    threads: int,
) -> None:
    names = ways.split(",")
    if unknown := [name for name in names if name not in WAYS]:
        raise click.ClickException(f"ways={ways!r}: {unknown[0]!r} is not known; choose of {', '.join(WAYS)}")
    torch.set_num_threads(threads)
    runs = {name: opened(name, model, max(request_counts), input_tokens + output_tokens) for name in names}
    vocab_size = read_run_by(model).text_config.vocab_size
    rows = []
    for count in request_counts:
        prompts = np.random.default_rng(count).integers(10, vocab_size, (count, input_tokens)).tolist()
        figures = {name: Figures([], []) for name in names}
        tokens: dict[str, list[list[int]]] = {}
        for name in names:
            runs[name]([prompt[:8] for prompt in prompts], 2)  # warms up
        for index in range(num_rounds):
            for name in round_order(names, index):
                timed = runs[name](prompts, output_tokens)
                figures[name].prompt_seconds.append(timed.prompt_seconds)
                figures[name].decode_seconds.append(timed.decode_seconds)
                tokens[name] = timed.output_token_ids
                click.echo(
                    f"{count} requests, {name}: {timed.prompt_seconds:.2f} + {timed.decode_seconds:.2f} s", err=True
                )
        for name in names:
            equal = agreement(tokens[name], tokens[names[0]])
            rows.append(
                [
                    str(count),
                    WAYS[name],
                    *_cells(figures[name], figures[names[0]], count, input_tokens, output_tokens - 1),
                    f"{equal:.2f}",
                ]
            )
    click.echo(
        f"{model}: prompts of {input_tokens} tokens, {output_tokens} out; {num_rounds} rounds; {describe_machine()}"
    )
    columns = [
        "requests",
        "run by",
        "prompt tokens/s",
        "of the first",
        "decode tokens/s",
        "of the first",
        "tokens as the first's",
    ]
    click.echo(table(columns, rows))


def _cells(own: Figures, base: Figures, num_requests: int, input_tokens: int, decode_tokens: int) -> list[str]:
    """Tokens/s and how many times the base's they are, of prompts and of decodes."""
    cells = []
    for seconds, base_seconds, num_tokens in (
        (own.prompt_seconds, base.prompt_seconds, num_requests * input_tokens),
        (own.decode_seconds, base.decode_seconds, num_requests * decode_tokens),
    ):
        cells.append(Spread.of([num_tokens / each for each in seconds]).text(1))
        cells.append(f"{1 / statistics.median(ratios(seconds, base_seconds)):.2f}")
    return cells


if __name__ == "__main__":
    main()
