"""Time per token with and without a grammar's mask, greedy and sampled.

    OMP_NUM_THREADS=1 python benchmarks/benchmark_structured_outputs.py --model demo:gemma-3-270m

The form allows every text, so both write as many tokens, and all that differs is the mask.
"""

from __future__ import annotations

import time
from statistics import median

import click

from lamella import LLM, SamplingParams
from lamella.errors import LamellaError
from markdown_tables import table

ANY_TEXT = {"regex": r"(.|\n)*"}
ANY_OBJECT = {"json_object": True}


def milliseconds_per_token(llm: LLM, params: SamplingParams, num_requests: int) -> float:
    prompts = [[2, 500 + index, 600] for index in range(num_requests)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    num_tokens = max(len(output.outputs[0].token_ids) for output in outputs)
    return (time.perf_counter() - started) * 1e3 / num_tokens


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--model", default="demo:gemma-3-270m", help="folder, .gguf file or demo model")
@click.option("--quantization", default="none", help="form of the weights")
@click.option("--num-tokens", type=click.IntRange(min=2), default=48)
@click.option("--requests", "batches", type=click.IntRange(min=1), multiple=True, default=(1, 8))
@click.option("--rounds", type=click.IntRange(min=1), default=5)
def main(model: str, quantization: str, num_tokens: int, batches: tuple[int, ...], rounds: int) -> None:
    rows = []
    try:
        with LLM(model, quantization=quantization, max_model_len=512, kv_cache_memory_bytes=2**28) as llm:
            for num_requests in batches:
                for temperature in (0.0, 1.0):
                    found: dict[str, list[float]] = {"none": [], "any text": [], "any JSON object": []}
                    for _ in range(rounds):
                        for name, form in zip(found, (None, ANY_TEXT, ANY_OBJECT), strict=True):
                            params = SamplingParams(
                                temperature=temperature, seed=1, max_tokens=num_tokens, structured_outputs=form
                            )
                            found[name].append(milliseconds_per_token(llm, params, num_requests))
                    kind = "greedy" if temperature == 0 else "sampled"
                    rows.append([str(num_requests), kind, *(f"{median(times):.1f}" for times in found.values())])
    except LamellaError as error:
        raise click.ClickException(str(error)) from error
    click.echo(table(["requests", "", "no mask, ms", "any text, ms", "any JSON object, ms"], rows))


if __name__ == "__main__":
    main()
