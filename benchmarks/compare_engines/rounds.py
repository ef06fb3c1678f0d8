"""The rounds of a comparison: in each, every engine in turn does all workloads in a fresh process.

One engine's process is alive at a time. Kept alive, idle engines would hold gigabytes (weights, KV memory) that the
running one lacks, their OpenMP threads may spin on its cores, and their prefix caches would know the prompts of the
round before. The price is a start per engine and round, which is measured: it is a figure of its own. Rounds begin
with another engine each, so that none is always the first on a machine that is still cool, or the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from compare_engines.engines import EngineSetup
from compare_engines.machine import describe_machine
from compare_engines.results import Comparison, EngineFacts, Failure, Measured
from compare_engines.worker import Worker, WorkerError
from compare_engines.workloads import FIRST_TOKEN, WARM_UP, Workload


def round_order(names: Sequence[str], round_index: int) -> list[str]:
    """`names` from the one whose turn it is to begin round `round_index`, and around."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


def compare(
    engines: Sequence[EngineSetup],
    workloads: Sequence[Workload],
    *,
    vocab_size: int,
    num_rounds: int,
    seed: int = 0,
    timeout_seconds: float = 3600.0,
    say: Callable[[str], None] = lambda line: None,
    after_engine: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """All engines on all workloads, `num_rounds` times; the first engine is what the others are compared with.

    An engine that fails is noted and left out from then on; what it measured before stays. say: told what goes on.
    after_engine: given the comparison so far, each time an engine is through with a round.
    """
    setups = {engine.name: engine for engine in engines}
    runs = [(workload, workload.prompts(vocab_size, seed)) for workload in (FIRST_TOKEN, WARM_UP, *workloads)]
    starts: dict[str, list[float]] = {name: [] for name in setups}
    comparison = Comparison(
        base=engines[0].name,
        engines={one.name: EngineFacts(one.precision, one.told_settings()) for one in engines},
        measured=[Measured(name, workload, starts[name]) for name in setups for workload in workloads],
        failures=[],
        num_rounds=num_rounds,
        machine=describe_machine(),
    )
    for index in range(num_rounds):
        for name in round_order(list(setups), index):
            if any(failure.engine == name for failure in comparison.failures):
                continue
            say(f"round {index + 1}/{num_rounds}, {name}")
            try:
                _run_engine(setups[name], runs, comparison, starts[name], timeout_seconds, say)
            except WorkerError as error:
                comparison.failures.append(Failure(name, index + 1, str(error)))
                say(str(error))
            after_engine(comparison)
    return comparison


def _run_engine(
    setup: EngineSetup,
    runs: Sequence[tuple[Workload, list[list[int]]]],
    comparison: Comparison,
    starts: list[float],
    timeout_seconds: float,
    say: Callable[[str], None],
) -> None:
    with Worker(setup.name, setup.command, setup.full_environment(), timeout_seconds=timeout_seconds) as worker:
        loaded = worker.ask({"load": setup.settings}, "loading the model")
        facts = comparison.engines[setup.name]
        facts.versions = loaded.get("versions", {})
        facts.settings.update(loaded.get("settings", {}))
        for workload, prompts in runs:
            seconds, output = _run(worker, workload, prompts)
            if workload is FIRST_TOKEN:
                starts.append(time.perf_counter() - worker.start_time)
                say(f"  start to first token: {starts[-1]:.1f} s")
            elif workload is not WARM_UP:
                (one,) = (m for m in comparison.measured if (m.engine, m.workload) == (setup.name, workload))
                one.seconds.append(seconds)
                one.output_token_ids = output
                say(f"  {workload.name}: {seconds:.2f} s")


def _run(worker: Worker, workload: Workload, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """(seconds, token ids per request). Raises WorkerError where these are not the tokens that were asked for."""
    question = {"prompts": prompts, "output_tokens": workload.output_tokens, "shared_tokens": workload.shared_tokens}
    answer = worker.ask(question, f"running {workload.name}")
    seconds, output = answer.get("seconds"), answer.get("output_token_ids")
    if not isinstance(seconds, float) or not seconds > 0 or not _are_token_lists(output):
        raise WorkerError(f"{worker.name}: {workload.name} was answered without seconds and output_token_ids")
    wanted = [workload.output_tokens] * workload.num_requests
    counts = [len(tokens) for tokens in output]
    if counts != wanted:
        raise WorkerError(
            f"{worker.name}: {workload.name} gave {sum(counts)} output tokens for {len(counts)} requests, "
            f"{min(counts, default=0)} to {max(counts, default=0)} each, instead of {workload.output_tokens} for each "
            f"of {workload.num_requests}; its time is not comparable"
        )
    return seconds, output


def _are_token_lists(output: Any) -> TypeGuard[list[list[int]]]:
    return isinstance(output, list) and all(isinstance(tokens, list) for tokens in output)
