"""Request traces through schedulers and KV managers, without a model: what each gets out of the same memory.

    python benchmarks/benchmark_kv_replay.py --trace agentic --trace-dir TRACES --requests 300 --scale 0.25 \\
        --max-total 20480 --sessions 25 --layout gpt-oss-20b --layout gemma-3-27b --budget-requests 8 \\
        --budget-requests 32 --systems lamella,split:0.8,hybrid-off --output-json results.json --plot results.png
    python benchmarks/benchmark_kv_replay.py --trace documents --systems lamella,hinted --budget-requests 8
    python benchmarks/benchmark_kv_replay.py --decode-only 256 --context 8192 --steps 1000 --layout gpt-oss-20b
    python benchmarks/benchmark_kv_replay.py --decode-only 256 --systems lamella,viewed,profiled --repeats 5
    python benchmarks/benchmark_kv_replay.py --prompt-cost 10000 --layout gpt-oss-20b
    python benchmarks/benchmark_kv_replay.py --prompt-cost 1000 --siblings 100 --siblings 1000 --siblings 10000

Options that may be given several times make the table larger: every combination is run.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from kv_replay.host_report import decode_report, prompt_report
from kv_replay.host_table import DecodeSizes, HostTable, PromptSizes, decode_jobs, prompt_jobs
from kv_replay.jobs import Job, run_jobs
from kv_replay.layouts import LAYOUTS
from kv_replay.plot import plot_replays
from kv_replay.replay_table import ReplayTable, replay_jobs
from kv_replay.report import replay_report
from kv_replay.results import Refusal, Result, budget_name
from kv_replay.systems import Limits, parse_system
from kv_replay.traces import DOCUMENTS, TRACES
from lamella.engine.scheduling.waiting_queue import SCHEDULING_POLICIES
from lamella.errors import ConfigError, LamellaError
from lamella.plot_path import check_plot_path


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--trace", "traces", type=click.Choice(TRACES), multiple=True, default=("agentic",))
@click.option("--trace-dir", type=click.Path(), help="folder of the trace files")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=300, help="how many of each trace")
@click.option("--skip-requests", type=click.IntRange(min=0), default=0,
              help="leave out so many first ones, of those that --max-total lets through")  # fmt: skip
@click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=1.0, help="multiplies all lengths")
@click.option("--max-total", type=int, help="longest prompt and output together, in tokens; the rest is left out")
@click.option("--sessions", type=click.IntRange(min=1), default=25, help="sessions at a time")
@click.option("--layout", "layouts", type=click.Choice(LAYOUTS), multiple=True, default=("gpt-oss-20b",))
@click.option("--budget-requests", "budgets", type=float, multiple=True, default=(32.0,),
              help="memory: full-attention KV of so many mean requests")  # fmt: skip
@click.option("--policy", "policies", type=click.Choice(SCHEDULING_POLICIES), multiple=True, default=("fcfs",),
              help="lamella's; vLLM is always fcfs")  # fmt: skip
@click.option("--systems", default="lamella",
              help="of lamella, hinted, viewed, profiled, split:RATIO, hybrid-off, vllm, vllm:INTERVAL, "
                   "vllm-dense")  # fmt: skip
@click.option("--vllm-python", type=click.Path(), help="an interpreter that has vLLM, for system vllm")
@click.option("--page-size", type=click.IntRange(min=1), default=16, help="tokens")
@click.option("--interval", "intervals", type=click.IntRange(min=1), multiple=True,
              help="lamella's eviction interval in tokens  [default: a page]")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=256)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192)
@click.option("--decode-only", type=click.IntRange(min=1), help="no trace: so many requests decode in ample memory")
@click.option("--context", type=click.IntRange(min=1), default=8192, help="prompt tokens of --decode-only")
@click.option("--steps", type=click.IntRange(min=1), default=1000, help="steps of --decode-only")
@click.option("--prompt-cost", type=click.IntRange(min=1),
              help="no trace: host time of taking in prompts of so many tokens, 20 of them, one by one")  # fmt: skip
@click.option("--siblings", type=click.IntRange(min=0), multiple=True,
              help="of --prompt-cost: so many cached prompts that begin with the same token")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=1,
              help="runs of each system in --decode-only and --prompt-cost, in turns with the others")  # fmt: skip
@click.option("--jobs", "num_processes", type=click.IntRange(min=1), default=1,
              help="replays at a time, each in its own process; host times are then longer and noisy, all other "
                   "figures the same")  # fmt: skip
@click.option("--output-json", type=click.Path(), help="file for a list of one object per run")
@click.option("--plot", "plot_file", type=click.Path(), help="PNG file for a plot of the replays")
def main(traces, trace_dir, num_requests, skip_requests, scale, max_total, sessions, layouts, budgets, policies,
         systems, vllm_python, page_size, intervals, max_num_seqs, max_num_batched_tokens, decode_only, context, steps,
         prompt_cost, siblings, repeats, num_processes, output_json, plot_file) -> None:  # fmt: skip
    is_replay = decode_only is None and prompt_cost is None
    if decode_only is not None and prompt_cost is not None:
        raise click.UsageError("--decode-only and --prompt-cost are runs of their own; give one of them")
    if is_replay and trace_dir is None and set(traces) != {DOCUMENTS}:
        raise click.UsageError("--trace-dir is needed: the folder that holds the trace files")
    if is_replay and repeats > 1:
        raise click.UsageError("--repeats is for --decode-only and --prompt-cost: a replay's figures do not vary")
    if siblings and prompt_cost is None:
        raise click.UsageError("--siblings is for --prompt-cost")
    if not is_replay and num_processes > 1:
        raise click.UsageError("--jobs is for replays: host times are of use only where nothing else runs")
    if not is_replay and plot_file is not None:
        raise click.UsageError("--plot is for replays")
    variants = tuple(
        Limits(
            page_tokens=page_size,
            max_num_seqs=max(max_num_seqs, decode_only or 1),
            max_num_batched_tokens=max_num_batched_tokens,
            interval_tokens=interval,
            policy=policy,
        )
        for policy in _distinct(policies)
        for interval in _distinct(intervals or (page_size,))
    )
    try:
        _check_json_path(output_json)
        check_plot_path(plot_file)
        shared = {
            "layouts": _distinct(layouts),
            "systems": _distinct(parse_system(name) for name in systems.split(",")),
            "variants": variants,
            "vllm_python": vllm_python,
        }
        if decode_only is not None:
            sizes = DecodeSizes(num_requests=decode_only, context_tokens=context, num_steps=steps)
            jobs, report = decode_jobs(HostTable(repeats=repeats, **shared), sizes), decode_report
        elif prompt_cost is not None:
            table = HostTable(repeats=repeats, **shared)
            sizes = [PromptSizes(num_prompt_tokens=prompt_cost, num_siblings=one) for one in siblings or (0,)]
            jobs, report = [job for one in sizes for job in prompt_jobs(table, one)], prompt_report
        else:
            table = ReplayTable(
                traces=_distinct(traces), trace_dir=trace_dir, num_requests=num_requests, skip_requests=skip_requests,
                scale=scale, max_total_tokens=max_total, num_sessions=sessions, budgets=_distinct(budgets), **shared,
            )  # fmt: skip
            jobs, report = replay_jobs(table), replay_report
        results = _run(jobs, num_processes, output_json)
        click.echo(report(results))
        if plot_file is not None:
            plot_replays(results, plot_file)
    except LamellaError as error:
        raise click.ClickException(str(error)) from error


def _run(jobs: list[Job], num_processes: int, output_json: str | None) -> list[Result]:
    results: list[Result] = []
    for result in run_jobs(jobs, num_processes):
        results.append(result)
        cell = result.cell
        state = "refused" if isinstance(result.outcome, Refusal) else "done"
        names = [cell.trace, cell.layout, budget_name(cell.budget_requests), cell.system, cell.policy]
        if cell.interval_tokens is not None:
            names.append(f"interval {cell.interval_tokens}")
        click.echo(f"{len(results)}/{len(jobs)} {', '.join(names)}: {state}", err=True)
        if output_json is not None:  # after each, so that a long run that is stopped leaves what it has
            objects = [one.to_json() for one in results]
            Path(output_json).write_text(json.dumps(objects, indent=4) + "\n", encoding="utf-8")
    return results


def _check_json_path(path: str | None) -> None:
    """Raise ConfigError now rather than after the run."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"output_json={path!r}: its folder does not exist; create it first")


def _distinct(values) -> tuple:
    return tuple(dict.fromkeys(values))


if __name__ == "__main__":
    main()
