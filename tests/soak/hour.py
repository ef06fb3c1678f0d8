"""An hour of everything at once, and what it does to memory and latency.

    python -m tests.soak.hour --minutes 60 --plot soak.png

A small model with random weights serves requests of all kinds, with adapters and without, in bursts. Steps fail at
random calls, devices run out of memory, requests make their steps fail, callers abort, pin, unpin and empty the cache.
Each answer is compared with the one that the same request got before anything went wrong; samples of the process's
memory, the pages in use and the time of steps are taken each second. Wrong is an answer that differs, a page that is
left when nothing runs, or memory that grows: the mean of the last quarter more than 5 % above that of the second.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from lamella import Engine, SamplingParams
from lamella.engine.lora_request import LoRARequest
from lamella.errors import CapacityError, LamellaError
from lamella.plot_path import check_plot_path
from tests.helpers.engine_simulation import INJECTED, AtCall, InjectedError
from tests.helpers.lora_files import save_lora
from tests.helpers.tiny_gemma import save_tiny_gemma

NUM_KINDS = 24
GROWTH_ALLOWED = 1.05
TEXTS = ("the cat sat on the mat", "a window slides over", "once upon a time there was", "pages are lent and come back")


def memory_mib() -> float:
    """Of this process, resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        model = save_tiny_gemma(folder / "model")
        self.adapters = []
        for number in range(1, 4):
            save_lora(folder / f"adapter-{number}", model, seed=number)
            self.adapters.append(LoRARequest(f"adapter-{number}", number, str(folder / f"adapter-{number}")))
        self.engine = Engine(
            model=str(folder / "model"), max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128, page_size=4,
            kv_cache_memory_bytes=2**21, enable_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=16,
            scheduling_policy="prefix",
        )  # fmt: skip
        self.runner = self.engine.inspect().runner
        self._launch = self.runner.launch
        self.kinds = [self._kind(index) for index in range(NUM_KINDS)]
        self.answers = [self._alone(index) for index in range(NUM_KINDS)]
        self.running: dict[str, int] = {}
        self.guilty: set[str] = set()
        self.happened: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[dict[str, float]] = []
        self._number = 0
        self._pins: list[str] = []
        self._num_faults_alone = 0
        self._short_until = 0.0
        self.runner.launch = self._launch_or_fail

    def _kind(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        prompt = " ".join(draw.choice(TEXTS) for _ in range(draw.randint(1, 6)))
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.8]), seed=index, max_tokens=draw.randint(1, 60), ignore_eos=True,
            top_p=draw.choice([1.0, 0.9]), logprobs=draw.choice([None, 2]),
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        )  # fmt: skip
        return {"prompt": prompt, "params": params, "lora_request": draw.choice([None, None, *self.adapters])}

    def _alone(self, index: int) -> list[int]:
        self.engine.add_request("alone", **self.kinds[index])
        outputs = []
        while self.engine.has_unfinished_requests():
            outputs += self.engine.step()
        return list(outputs[-1].outputs[0].token_ids)

    def _launch_or_fail(self, plan: Any) -> Any:
        rows = self.engine.inspect().scheduler.rows.requests
        if any(request is not None and request.request_id in self.guilty for request in rows):
            raise InjectedError("a step with a guilty request")
        if time.monotonic() < self._short_until and len(plan.token_ids) > 4:
            raise MemoryError("the device is short of memory")
        return self._launch(plan)

    def run(self, seconds: float) -> None:
        started = time.monotonic()
        next_sample, times = 0.0, []
        while (now := time.monotonic() - started) < seconds:
            self._meddle()
            begun = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - begun)
            if now >= next_sample:
                pages = self.engine.stats().pages
                self.samples.append(
                    {
                        "seconds": now,
                        "memory_mib": memory_mib(),
                        "owned_pages": sum(usage.owned for usage in pages.values()),
                        "step_ms_median": 1e3 * float(np.median(times)),
                        "step_ms_99": 1e3 * float(np.quantile(times, 0.99)),
                        "requests": self.happened["requests ended"],
                        "failed_steps": self.engine.stats().num_failed_steps,
                    }
                )
                next_sample, times = now + 1, []
        self.guilty.clear()
        self._short_until = 0.0
        while self.engine.has_unfinished_requests():
            self._take(self.engine.step())
        self._check_empty()

    def _meddle(self) -> None:
        draw, engine, what = self.draw, self.engine, self.draw.random()
        if len(self.running) < 30 and what < 0.3:
            for _ in range(draw.choice([1, 1, 12])):  # now and then a burst
                index, request_id = draw.randrange(NUM_KINDS), f"r{self._number}"
                self._number += 1
                engine.add_request(request_id, **self.kinds[index])
                self.running[request_id] = index
                if draw.random() < 0.003:
                    self.guilty.add(request_id)
        elif what < 0.303 and self.running:
            storm = draw.sample(list(self.running), draw.randint(1, len(self.running)))
            self._take(engine.abort(storm))
            self.happened["aborts"] += len(storm)
        elif what < 0.31:
            self._pin_or_unpin()
        elif what < 0.311:
            engine.reset_prefix_cache()
        elif what < 0.3115:
            self._short_until = time.monotonic() + 0.2
            self.happened["times short of memory"] += 1

    def _pin_or_unpin(self) -> None:
        if len(self._pins) > 2:
            self.engine.unpin_prefix(self._pins.pop(0))
            return
        try:
            self._pins.append(self.engine.pin_prefix(self.draw.choice(TEXTS)).name)
            self.happened["pins"] += 1
        except CapacityError:
            self.happened["pins refused"] += 1

    def _step(self) -> None:
        is_alone = bool(self.engine._failures.groups)
        if not is_alone:
            self._num_faults_alone = 0
        if self.draw.random() > 0.002 or (is_alone and self._num_faults_alone):
            self._take(self.engine.step())
            return
        fault = AtCall(int(self.draw.expovariate(1 / 60)), self.draw.choice(INJECTED))
        try:
            with fault:
                outputs = self.engine.step()
        except (InjectedError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            if "injected" not in str(error):
                raise
            outputs = []
        self._num_faults_alone += fault.has_raised
        self.happened["faults"] += fault.has_raised
        self._take(outputs)

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            if not output.finished:
                continue
            index = self.running.pop(output.request_id)
            self.happened["requests ended"] += 1
            (part,) = output.outputs
            expected = self.answers[index][: len(part.token_ids)]
            if output.error is not None:
                self.happened["requests blamed"] += 1
                if output.request_id not in self.guilty:
                    self.wrong.append(f"{output.request_id} has done nothing: {output.error}")
            elif part.finish_reason != "abort" and len(part.token_ids) != len(self.answers[index]):
                self.wrong.append(f"{output.request_id}: {part.finish_reason} after {len(part.token_ids)} tokens")
            if part.token_ids != expected:
                self.wrong.append(f"{output.request_id}: {part.token_ids}, alone it was {expected}")
            self.guilty.discard(output.request_id)

    def _check_empty(self) -> None:
        for name in self._pins:
            self.engine.unpin_prefix(name)
        self.engine.check_invariants()
        owned = {name: usage.owned for name, usage in self.engine.stats().pages.items() if usage.owned}
        if owned or not self.engine.reset_prefix_cache():
            self.wrong.append(f"pages are left: {owned}, or the cache is not empty")
        memory = [sample["memory_mib"] for sample in self.samples]
        quarter = len(memory) // 4
        if quarter >= 15:  # before that there is nothing to compare
            before, after = np.mean(memory[quarter : 2 * quarter]), np.mean(memory[-quarter:])
            if after > GROWTH_ALLOWED * before:
                self.wrong.append(f"memory grew from {before:.1f} to {after:.1f} MiB")


def draw_plot(samples: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    minutes = [sample["seconds"] / 60 for sample in samples]
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    for axis, names, label in zip(
        axes,
        (("memory_mib",), ("owned_pages",), ("step_ms_median", "step_ms_99"), ("failed_steps",)),
        ("resident memory, MiB", "pages that requests own", "time of a step, ms", "failed steps so far"),
        strict=True,
    ):
        for name in names:
            axis.plot(minutes, [sample[name] for sample in samples], linewidth=0.8, label=name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        if len(names) > 1:
            axis.set_ylim(auto=True)
            axis.set_yscale("log")
            axis.legend(["median of a second", "99 of 100"], loc="upper right")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=90)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="A PNG file to draw.")
@click.option("--samples", "samples_path", type=click.Path(path_type=Path), help="A JSON file for what was measured.")
def main(minutes: float, seed: int, plot: Path | None, samples_path: Path | None) -> None:
    """Exits with 1 if something was wrong."""
    logging.disable(logging.CRITICAL)
    try:
        check_plot_path(plot)
    except LamellaError as error:
        raise click.ClickException(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed)
        soak.run(60 * minutes)
    if plot is not None:
        draw_plot(soak.samples, plot)
    if samples_path is not None:
        samples_path.write_text(json.dumps(soak.samples))
    for kind, count in sorted(soak.happened.items()):
        print(f"{count:8d}  {kind}")
    stats = soak.engine.stats()
    print(f"{stats.num_steps:8d}  steps, {stats.num_failed_steps} failed, {stats.num_preemptions} preemptions")
    memory = [sample["memory_mib"] for sample in soak.samples]
    print(f"memory {memory[0]:.1f} MiB at first, {max(memory):.1f} at most, {memory[-1]:.1f} at last")
    for line in soak.wrong[:50]:
        print(line)
    print(f"{minutes:g} minutes, {len(soak.wrong)} wrong")
    raise SystemExit(bool(soak.wrong))


if __name__ == "__main__":
    main()
