"""How much of an arena lies free where the group that needs it cannot take it, under request-shaped load.

    python benchmarks/benchmark_fragmentation.py --slabs 60 --slabs 150 --slabs 600 --seeds 4

Demand is 110 % of the arena; phases of few long requests alternate with phases of many short ones. Shares are of the
arena: "unusable" at each allocation that fails with nothing left to evict; "idle" lies in lent slabs but in no page,
on average over the ticks. "moved" and "evicted" are bytes per byte allocated.
"""

from __future__ import annotations

import click
import numpy as np

from fragmentation import COMPACT, Fragmentation, FragmentationRun, Traffic
from kv_replay.layouts import LAYOUTS, layer_specs
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.report import format_table

HEADER = ["layout", "slabs", "compact", "failures", "unusable p50", "p99", "max", "idle", "moved", "evicted"]


def table_row(results: list[Fragmentation]) -> list[str]:
    unusable = np.concatenate([result.unusable for result in results])
    allocated = sum(result.num_allocated_units for result in results)
    return [
        f"{len(unusable):,}",
        *(f"{share:.2%}" for share in (*np.percentile(unusable, [50, 99]), unusable.max())),
        f"{np.concatenate([result.idle for result in results]).mean():.2%}",
        f"{sum(result.num_moved_units for result in results) / allocated:.4f}",
        f"{sum(result.num_evicted_units for result in results) / allocated:.4f}",
    ]


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--layout", "layouts", type=click.Choice(LAYOUTS), multiple=True,
              default=("mimo-v2-flash", "gemma-3-27b"))  # fmt: skip
@click.option("--slabs", type=click.IntRange(min=20), multiple=True, default=(60, 150, 600), help="lendable slabs")
@click.option("--compact", "modes", type=click.Choice(COMPACT), multiple=True, default=COMPACT)
@click.option("--ticks", type=click.IntRange(min=1), default=960, help="a phase is 60")
@click.option("--seeds", type=click.IntRange(min=1), default=2, help="runs per line")
@click.option("--page-size", type=click.IntRange(min=1), default=16, help="tokens")
def main(layouts, slabs, modes, ticks, seeds, page_size) -> None:
    rows = []
    for name in layouts:
        layout = build_layout(layer_specs(name), page_tokens=page_size)
        for num_slabs in slabs:
            for mode in modes:
                results = [
                    FragmentationRun(layout, num_slabs, Traffic(compact=mode), seed=seed).run(ticks)
                    for seed in range(seeds)
                ]
                rows.append([name, f"{num_slabs:,}", mode, *table_row(results)])
    click.echo(format_table(HEADER, rows))


if __name__ == "__main__":
    main()
