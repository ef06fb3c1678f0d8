"""Request traces through schedulers and KV managers, without a model: what each gets out of the same memory.

    python benchmarks/benchmark_kv_replay.py --trace agentic --trace-dir TRACES --requests 300 --scale 0.25 \\
        --max-total 20480 --sessions 25 --layout gpt-oss-20b --layout gemma-3-27b --budget-requests 8 \\
        --budget-requests 32 --systems lamella,split:0.8,hybrid-off --output-json results.json
    python benchmarks/benchmark_kv_replay.py --decode-only 256 --context 8192 --steps 1000 --layout gpt-oss-20b
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from lamella.benchmark.kv_replay.layouts import LAYOUTS
from lamella.benchmark.kv_replay.report import markdown_table, plot
from lamella.benchmark.kv_replay.results import Refusal, Result
from lamella.benchmark.kv_replay.systems import Limits, parse_system
from lamella.benchmark.kv_replay.table import DecodeTable, ReplayTable, check_json_path, run_decodes, run_replays
from lamella.benchmark.kv_replay.traces import FILES
from lamella.engine.waiting_queue import SCHEDULING_POLICIES
from lamella.errors import LamellaError


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--trace", type=click.Choice(list(FILES)), default="agentic")
@click.option("--trace-dir", type=click.Path(), help="folder of the trace files")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=300, help="how many of the trace")
@click.option("--skip-requests", type=click.IntRange(min=0), default=0, help="leave out so many first ones")
@click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=1.0, help="multiplies all lengths")
@click.option("--max-total", type=int, help="longest prompt and output together, in tokens; the rest is left out")
@click.option("--sessions", type=click.IntRange(min=1), default=25, help="sessions at a time")
@click.option("--layout", "layouts", type=click.Choice(LAYOUTS), multiple=True, default=("gpt-oss-20b",))
@click.option("--budget-requests", "budgets", type=float, multiple=True, default=(32.0,),
              help="memory: full-attention KV of so many mean requests")  # fmt: skip
@click.option("--policy", type=click.Choice(SCHEDULING_POLICIES), default="fcfs")
@click.option(
    "--systems", default="lamella", help="of lamella, split:RATIO, hybrid-off, vllm, vllm:INTERVAL, vllm-dense"
)
@click.option("--vllm-python", type=click.Path(), help="an interpreter that has vLLM, for system vllm")
@click.option("--page-size", type=click.IntRange(min=1), default=16, help="tokens")
@click.option("--interval", type=click.IntRange(min=1), help="eviction interval in tokens  [default: a page]")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=256)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192)
@click.option("--decode-only", type=click.IntRange(min=1), help="no trace: so many requests decode in ample memory")
@click.option("--context", type=click.IntRange(min=1), default=8192, help="prompt tokens of --decode-only")
@click.option("--steps", type=click.IntRange(min=1), default=1000, help="steps of --decode-only")
@click.option("--output-json", type=click.Path(), help="file for a list of one object per system, layout and budget")
@click.option("--plot", "plot_file", type=click.Path(), help="PNG file for a plot")
def main(trace, trace_dir, num_requests, skip_requests, scale, max_total, sessions, layouts, budgets, policy, systems,
         vllm_python, page_size, interval, max_num_seqs, max_num_batched_tokens, decode_only, context, steps,
         output_json, plot_file) -> None:  # fmt: skip
    limits = Limits(
        page_tokens=page_size,
        max_num_seqs=max_num_seqs if decode_only is None else max(max_num_seqs, decode_only),
        max_num_batched_tokens=max_num_batched_tokens,
        interval_tokens=interval,
        policy=policy,
    )
    try:
        check_json_path(output_json)
        shared = {
            "layouts": layouts,
            "systems": tuple(parse_system(name) for name in systems.split(",")),
            "limits": limits,
            "vllm_python": vllm_python,
        }
        if decode_only is not None:
            table = DecodeTable(num_requests=decode_only, context_tokens=context, num_steps=steps, **shared)
            runs = run_decodes(table)
        else:
            if trace_dir is None:
                raise click.UsageError("--trace-dir is needed: the folder that holds the trace files")
            runs = run_replays(
                ReplayTable(
                    trace=trace, trace_dir=trace_dir, num_requests=num_requests, skip_requests=skip_requests,
                    scale=scale, max_total_tokens=max_total, num_sessions=sessions, budgets=budgets, **shared,
                )
            )  # fmt: skip
        results: list[Result] = []
        for result in runs:
            results.append(result)
            state = "refused" if isinstance(result.outcome, Refusal) else "done"
            cell = result.cell
            click.echo(f"{cell.layout} {cell.budget_requests} {cell.system}: {state}", err=True)
            if output_json is not None:  # after each, so that a long run that is stopped leaves what it has
                objects = [one.to_json() for one in results]
                Path(output_json).write_text(json.dumps(objects, indent=4) + "\n", encoding="utf-8")
        click.echo(markdown_table(results))
        if plot_file is not None:
            plot(results, plot_file)
    except LamellaError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
