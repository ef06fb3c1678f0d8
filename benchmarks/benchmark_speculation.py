"""Tokens per step and time with and without speculation, on four tasks: code edits, summaries, chat and JSON.

    OMP_NUM_THREADS=2 python benchmarks/benchmark_speculation.py --model qwen2.5-coder-0.5b.gguf --quantization w8a8
    OMP_NUM_THREADS=2 python benchmarks/benchmark_speculation.py --model qwen2.5-coder-0.5b.gguf --quantization w8a8 \\
        --task "code edit" --batch-size 1 --rounds 30

Both engines are in one process and take turns; every round checks that the tokens are the same.
"""

from __future__ import annotations

import json
from statistics import median

import click

from lamella import LLM
from lamella.errors import LamellaError
from markdown_tables import table
from speculation.rounds import Comparison, code_in, compare, edit_distance
from speculation.tasks import make_tasks

TASKS = ("code edit", "summary", "chat", "JSON")
NUM_PROMPTS = 30


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--model", required=True, help="chat model: folder, .gguf file or demo model")
@click.option("--quantization", default="none", help="form of the weights")
@click.option("--task", "tasks", type=click.Choice(TASKS), multiple=True, default=TASKS)
@click.option("--batch-size", "batch_sizes", type=click.IntRange(min=1), multiple=True, default=(1, 4, 16))
@click.option("--rounds", type=click.IntRange(min=1), default=7)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0)
@click.option("--speculative-config", default='{"method": "suffix"}', help="JSON")
@click.option("--kv-memory", type=click.IntRange(min=1), default=2**30, help="bytes of each engine")
def main(model, quantization, tasks, batch_sizes, rounds, temperature, speculative_config, kv_memory) -> None:
    made = make_tasks(NUM_PROMPTS)
    arguments = {
        "model": model, "quantization": quantization, "max_model_len": 4096, "kv_cache_memory_bytes": kv_memory,
        "max_num_seqs": max(batch_sizes),
    }  # fmt: skip
    try:
        with LLM(**arguments) as plain, LLM(**arguments, speculative_config=json.loads(speculative_config)) as fast:
            found = []
            for task in tasks:
                for batch_size in batch_sizes:
                    found.append(compare(plain, fast, made[task], batch_size, rounds, temperature))
                    click.echo(_progress(found[-1]), err=True)
    except LamellaError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_report(found))
    for comparison in found:
        if comparison.task.name == "code edit":
            click.echo("\n" + _edit_report(comparison))


def _progress(found: Comparison) -> str:
    return f"{found.task.name}, {found.batch_size} at once: {found.median_ratio:.2f} x"


def _report(found: list[Comparison]) -> str:
    rows = []
    for one in found:
        drafts, accepted = (
            sum(run.num_drafts for run in one.with_drafts),
            sum(run.num_accepted for run in one.with_drafts),
        )
        rows.append(
            [
                one.task.name,
                str(one.batch_size),
                f"{one.tokens_per_step(one.without):.2f}",
                f"{one.tokens_per_step(one.with_drafts):.2f}",
                f"{median(run.seconds for run in one.without):.2f}",
                f"{median(run.seconds for run in one.with_drafts):.2f}",
                f"{one.median_ratio:.2f} ({min(one.ratios):.2f}-{max(one.ratios):.2f})",
                f"{drafts:,}",
                f"{accepted:,} ({accepted / max(1, drafts):.0%})",
            ]
        )
    header = [
        "task",
        "requests",
        "tokens/step without",
        "with",
        "seconds without",
        "with",
        "faster",
        "drafted",
        "accepted",
    ]
    return table(header, rows)


def _edit_report(found: Comparison) -> str:
    rows = []
    for number, (plain, fast) in enumerate(zip(found.without, found.with_drafts, strict=True)):
        for place, text in enumerate(fast.texts):
            source = found.task.sources[(number * found.batch_size + place) % len(found.task.sources)]
            edited = code_in(text)
            rows.append(
                [
                    str(number * found.batch_size + place),
                    str(source.count("\n")),
                    str(len(fast.token_ids[place])),
                    str(edit_distance(source.splitlines(), edited.splitlines())),
                    str(edit_distance(list(source), list(edited))),
                    f"{fast.num_drafts:,}",
                    f"{fast.num_accepted:,}",
                    f"{plain.seconds:.2f}",
                    f"{fast.seconds:.2f}",
                    f"{plain.seconds / fast.seconds:.2f}",
                ]
            )
    header = [
        "edit",
        "lines",
        "tokens",
        "distance in lines",
        "in characters",
        "drafted",
        "accepted",
        "without, s",
        "with, s",
        "faster",
    ]
    return f"Code edits, {found.batch_size} at once\n\n{table(header, rows)}"


if __name__ == "__main__":
    main()
