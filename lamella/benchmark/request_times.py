"""When the requests of a run got their tokens, and the percentiles of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lamella.errors import ConfigError
from lamella.plot_path import check_plot_path

PERCENTAGES = (50, 90, 95, 99)
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


@dataclass(slots=True)
class RequestTimes:
    """Seconds, one entry a request, but for `itl`, which has one for each pair of outputs that follow each other and is
    known only where outputs are streamed."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2el: list[float] = field(default_factory=list)

    @classmethod
    def of_outputs(cls, outputs: Sequence[Any]) -> RequestTimes:
        """From what finished RequestOutputs say of themselves; empty where they say nothing."""
        times = cls()
        for output in outputs:
            found = getattr(output, "metrics", None)
            if found is not None and found.first_token_time is not None and found.finished_time is not None:
                longest = max(len(completion.token_ids) for completion in output.outputs)
                times.add(found.arrival_time, found.first_token_time, found.finished_time, longest)
        return times

    def add(self, arrived: float, first_token: float, finished: float, num_tokens: int) -> None:
        self.ttft.append(first_token - arrived)
        self.e2el.append(finished - arrived)
        if num_tokens > 1:
            self.tpot.append((finished - first_token) / (num_tokens - 1))

    def to_json(self) -> dict[str, float]:
        """Milliseconds, under the keys of vLLM's `bench serve`."""
        found: dict[str, float] = {}
        for name in NAMES:
            values = getattr(self, name)
            if values:
                found[f"mean_{name}_ms"] = 1e3 * float(np.mean(values))
                found |= {f"p{share}_{name}_ms": 1e3 * float(np.percentile(values, share)) for share in PERCENTAGES}
        return found

    def report(self) -> list[str]:
        """A line for each that is known."""
        lines = []
        for name, text in NAMES.items():
            values = getattr(self, name)
            if values:
                shares = ", ".join(f"P{share} {1e3 * np.percentile(values, share):.1f}" for share in PERCENTAGES)
                lines.append(f"{text.capitalize() + ' (ms):':<26}{shares}")
        return lines


def plot_times(times: RequestTimes, title: str, path: str | Path) -> None:
    """Write a PNG: for each of the times, the share of requests up to it. Raises ConfigError as `check_plot_path` does,
    and where nothing is known."""
    check_plot_path(path)
    known = [name for name in NAMES if getattr(times, name)]
    if not known:
        raise ConfigError(f"plot={str(path)!r}: this backend does not say when tokens came; leave the plot out")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(known), 3.6), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(known))), known, strict=True):
        values = np.sort(getattr(times, name)) * 1e3
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
        axes.set_xlabel(f"{NAMES[name]} (ms)")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of requests")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r} cannot be written: {error}") from error
