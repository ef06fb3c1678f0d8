"""Request traces through N simulated replicas: which routing finds what, and how many replicas a latency takes.

    python benchmarks/benchmark_replicas.py measure MODEL --output steps.json
    python benchmarks/benchmark_replicas.py compare --costs steps.json --trace agentic --trace-dir TRACES \\
        --scale 0.25 --max-total 20480 --requests 3000 --sessions 100 --replicas 8 --budget-requests 16
    python benchmarks/benchmark_replicas.py plan --costs steps.json --trace conversation --trace-dir TRACES \\
        --arrivals timed --budget-requests 4 --budget-requests 16 --first-token 2 --quantile p90

Schedulers and block managers are the engine's own, without a model; time is virtual.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from kv_replay.capacity_plan import Target, fewest_replicas
from kv_replay.layouts import LAYOUTS, layer_specs
from kv_replay.measured_steps import measure_steps
from kv_replay.replay_table import budget_in_bytes
from kv_replay.replica_routing import POLICIES, PREFIX, ROUND_ROBIN
from kv_replay.replicas_report import comparison_report, costs_report, plan_report
from kv_replay.simulated_replicas import ARRIVALS, CLOSED, Cluster, ClusterResult, Traffic, simulate
from kv_replay.step_cost_model import fit_and_check, read_steps, write_steps
from kv_replay.systems import Limits
from kv_replay.traces import DOCUMENTS, TRACES, load_trace
from lamella.engine.scheduling.waiting_queue import SCHEDULING_POLICIES
from lamella.errors import ConfigError, LamellaError

ONE = "one replica"  # with all the memory

_OPTIONS = (
    click.option("--costs", "costs_file", type=click.Path(), required=True, help="measured steps, from `measure`"),
    click.option("--trace", type=click.Choice(TRACES), default="agentic"),
    click.option("--trace-dir", type=click.Path(), help="folder of the trace files"),
    click.option("--requests", "num_requests", type=click.IntRange(min=1), default=300, help="how many of the trace"),
    click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=1.0, help="multiplies all lengths"),
    click.option("--max-total", type=int, help="longest prompt and output together, in tokens; the rest is left out"),
    click.option("--arrivals", type=click.Choice(ARRIVALS), default=CLOSED,
                 help="closed sessions, the trace's own times, or all at the beginning"),
    click.option("--sessions", type=click.IntRange(min=1), default=25, help="of the whole cluster, if closed"),
    click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0,
                 help="of the trace's times: 2 is twice the load"),
    click.option("--layout", type=click.Choice(LAYOUTS), default="gpt-oss-20b"),
    click.option("--key-blocks", type=click.IntRange(min=1), default=4,
                 help="prefix routing: prompts that begin with the same so many pages go together"),
    click.option("--scheduling-policy", type=click.Choice(SCHEDULING_POLICIES), default="fcfs"),
    click.option("--page-size", type=click.IntRange(min=1), default=16, help="tokens"),
    click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, help="of a replica"),
    click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=8192, help="of a replica"),
    click.option("--output-json", type=click.Path(), help="file for the figures"),
)  # fmt: skip


def _simulation_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class _Group(click.Group):
    """Commands whose errors of lamella's are told without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LamellaError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"show_default": True}, help=__doc__.splitlines()[0])
def main() -> None:
    pass


@main.command(help="Time steps of a model on this machine, and fit a cost model to them.")
@click.argument("model")
@click.option("--requests", "num_requests", type=click.IntRange(min=4), default=40)
@click.option("--max-model-len", type=click.IntRange(min=64), default=2048)
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=16)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=512)
@click.option("--output", type=click.Path(), required=True, help="JSON file for the steps")
def measure(model, num_requests, max_model_len, max_num_seqs, max_num_batched_tokens, output) -> None:
    steps = measure_steps(
        model, num_requests=num_requests, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    write_steps(steps, output)
    click.echo(f"{len(steps)} steps: {costs_report(*fit_and_check(steps))}")


@main.command(help="The policies beside each other, and beside one replica with all the memory.")
@_simulation_options
@click.option("--replicas", "counts", type=click.IntRange(min=1), multiple=True, default=(8,))
@click.option("--budget-requests", "budgets", type=float, multiple=True, default=(4.0,),
              help="each replica's memory: full-attention KV of so many mean requests")  # fmt: skip
@click.option("--policies", default=f"{PREFIX},{ROUND_ROBIN}", help=f"of {', '.join(POLICIES)}")
@click.option("--one/--no-one", "has_one", default=True, help="also one replica with all the memory")
def compare(counts, budgets, policies, has_one, output_json, **options) -> None:
    names = policies.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r} is not known; use {', '.join(POLICIES)}")
    cluster_of, traffic = _setting(**options)
    results: list[ClusterResult] = []

    def note(result: ClusterResult) -> None:
        results.append(result)
        click.echo(f"{result.policy}, {result.num_replicas}: {result.hit_share:.1%}", err=True)
        _write(output_json, [asdict(one) for one in results])

    for count in counts:
        for budget in budgets:
            cluster = cluster_of(count, budget)
            if has_one:
                note(simulate(cluster.as_one(), traffic, ROUND_ROBIN, name=ONE))
            for name in names:
                note(simulate(cluster, traffic, name))
    click.echo(comparison_report(results))


@main.command(help="The fewest replicas that meet a latency, for each size of a replica's memory.")
@_simulation_options
@click.option("--budget-requests", "budgets", type=float, multiple=True, default=(4.0, 8.0, 16.0),
              help="each replica's memory: full-attention KV of so many mean requests")  # fmt: skip
@click.option("--policy", type=click.Choice(POLICIES), default=PREFIX)
@click.option("--most-replicas", type=click.IntRange(min=1), default=64, help="tried")
@click.option("--first-token", type=click.FloatRange(min=0, min_open=True), help="seconds, of the quantile")
@click.option("--answer", type=click.FloatRange(min=0, min_open=True), help="seconds, of the quantile")
@click.option("--quantile", type=click.Choice(("p50", "p90", "p99")), default="p90")
def plan(budgets, policy, most_replicas, first_token, answer, quantile, output_json, **options) -> None:
    if first_token is None and answer is None:
        raise click.UsageError("say which latency: --first-token or --answer, in seconds")
    target = Target(quantile, first_token, answer)
    cluster_of, traffic = _setting(**options)
    choices = []
    for budget in budgets:

        def run(count: int, budget: float) -> ClusterResult:
            result = simulate(cluster_of(count, budget), traffic, policy)
            click.echo(f"x{budget:g}, {count} replicas: {getattr(result.answer, quantile):.3g} s", err=True)
            return result

        budget_bytes = cluster_of(1, budget).budget_bytes
        choices.append(
            fewest_replicas(partial(run, budget=budget), target, budget_bytes=budget_bytes, most_replicas=most_replicas)
        )
        _write(output_json, [asdict(one) for one in choices])
    click.echo(plan_report(choices, target))


def _setting(
    costs_file, trace, trace_dir, num_requests, scale, max_total, arrivals, sessions, speed, layout, key_blocks,
    scheduling_policy, page_size, max_num_seqs, max_num_batched_tokens,
) -> tuple[Callable[[int, float], Cluster], Traffic]:  # fmt: skip
    if trace_dir is None and trace != DOCUMENTS:
        raise click.UsageError("--trace-dir is needed: the folder that holds the trace files")
    costs, error = fit_and_check(read_steps(costs_file))
    click.echo(costs_report(costs, error) + "\n")
    requests = load_trace(trace, trace_dir, num_requests=num_requests, scale=scale, max_total_tokens=max_total)
    if not requests:
        raise ConfigError(f"trace {trace!r} has no request within max_total={max_total}; allow longer ones")
    limits = Limits(
        page_tokens=page_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        policy=scheduling_policy,
    )  # fmt: skip

    def cluster_of(count: int, budget: float) -> Cluster:
        return Cluster(
            num_replicas=count, layout=layout, budget_bytes=budget_in_bytes(budget, requests, layer_specs(layout)),
            limits=limits, costs=costs, key_blocks=key_blocks,
        )  # fmt: skip

    return cluster_of, Traffic(requests=requests, arrivals=arrivals, num_sessions=sessions, speed=speed)


def _write(path: str | None, objects: list[dict[str, Any]]) -> None:
    if path is not None:  # after each, so that a long run that is stopped leaves what it has
        Path(path).write_text(json.dumps(objects, indent=4) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
