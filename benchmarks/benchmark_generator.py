"""What prompts from a generator cost: processor time of each and memory, where there are few and where there are many.

    OMP_NUM_THREADS=1 python benchmarks/benchmark_generator.py --prompts 1000 --prompts 20000 --rounds 3 \\
        --plot generator_memory.png

Prompts come from a generator and outputs from `LLM.stream`, which are dropped. Each run is a process of its own. The
model has random weights and next to nothing to compute, so that what is measured is the work around it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from benchmark_many_prompts import PROMPT_TOKENS, VOCAB_SIZE, write_tiny_model
from lamella import LLM, SamplingParams
from lamella.plot_path import check_plot_path
from markdown_tables import table

NUM_SAMPLES = 200  # of memory, over a run


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--prompts", "counts", type=click.IntRange(min=1), multiple=True, default=(1000, 20_000))
@click.option("--output-len", type=click.IntRange(min=1), default=2, help="tokens of each output")
@click.option("--lookahead-prompts", type=click.IntRange(min=1), default=4096)
@click.option("--in-order", is_flag=True, help="outputs in the order of the prompts")
@click.option("--rounds", type=click.IntRange(min=1), default=3, help="runs of each, in turns; the median counts")
@click.option("--plot", type=click.Path(), help="draw memory over finished prompts into this PNG")
@click.option("--one-run", type=click.IntRange(min=1), hidden=True)
def main(counts, output_len, lookahead_prompts, in_order, rounds, plot, one_run) -> None:
    if one_run is not None:
        click.echo(json.dumps(run(one_run, output_len, lookahead_prompts, in_order)))
        return
    check_plot_path(plot)
    found: dict[int, list[dict]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            options = ["--output-len", output_len, "--lookahead-prompts", lookahead_prompts]
            options += ["--in-order"] if in_order else []
            command = [sys.executable, __file__, "--one-run", *map(str, [count, *options])]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ)
            found[count].append(json.loads(done.stdout))
            click.echo(f"{count}: {found[count][-1]['seconds']:.2f} s", err=True)
    fewest = statistics.median(one["seconds"] for one in found[min(counts)]) / min(counts)
    rows = []
    for count, runs in found.items():
        micros = 1e6 * statistics.median(one["seconds"] for one in runs) / count
        first = statistics.median(one["first_at"] for one in runs)
        grown = statistics.median(growth(one) for one in runs)
        rows.append([f"{count:,}", f"{micros:.0f}", f"{micros / fewest / 1e6:.2f}", f"{first:,.0f}",
                     f"{grown:+.1f}"])  # fmt: skip
    columns = ("prompts", "µs of processor time each", f"over that of {min(counts):,}", "taken at the first output",
               "MB grown from a third of the run on")  # fmt: skip
    click.echo(table(columns, rows))
    if plot is not None:
        draw(found[max(counts)], plot)


def run(count: int, output_len: int, lookahead_prompts: int, in_order: bool) -> dict:
    """One stream. seconds: of processor time, from the first prompt to the last output. memory: (finished prompts,
    resident MB). first_at: prompts that were taken when the first output came."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    num_taken, memory, first_at = 0, [], 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_taken
        rng = np.random.default_rng(0)
        for _ in range(count):
            num_taken += 1
            yield rng.integers(3, VOCAB_SIZE, PROMPT_TOKENS).tolist()

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        with LLM(folder, load_format="dummy", max_model_len=64, kv_cache_memory_bytes=2**25) as llm:
            start = time.process_time()
            outputs = llm.stream(prompts(), params, in_order=in_order, lookahead_prompts=lookahead_prompts)
            for finished, output in enumerate(outputs, start=1):
                assert len(output.outputs[0].token_ids) == output_len
                first_at = first_at or num_taken
                if finished % max(1, count // NUM_SAMPLES) == 0:
                    memory.append((finished, resident_mb()))
            seconds = time.process_time() - start
    assert finished == count
    return {"seconds": seconds, "memory": memory, "first_at": first_at}


def growth(one: dict) -> float:
    memory = [megabytes for _, megabytes in one["memory"]]
    return memory[-1] - memory[len(memory) // 3]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def draw(runs: list[dict], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(runs, start=1):
        axes.plot(*zip(*one["memory"], strict=True), label=f"run {number}")
    axes.set(xlabel="finished prompts", ylabel="resident memory [MB]", title="A stream of prompts from a generator")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
