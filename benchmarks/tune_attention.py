"""Tile sizes of the Triton attention kernels for the GPU at hand, into the tuning table.

    python benchmarks/tune_attention.py
    python benchmarks/tune_attention.py --kernel decode --head-dim 128 --bits 16 --dry-run

For each kernel, width of elements and class of head dimensions: tiles that do not compile, spill registers or give
other results than the reference are dropped, the others timed on a sliding and a full layer. Only the rows of the GPU's
own architecture change; the table is written after each class, so that a run may be stopped.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch

from lamella.errors import ConfigError


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--kernel", "kernels", type=click.Choice(["decode", "prefill"]), multiple=True, help="[default: both]")
@click.option("--head-dim", "head_dims", type=click.Choice(["64", "128", "192", "256", "512"]), multiple=True,
              help="class: heads as wide as this and narrower  [default: all]")  # fmt: skip
@click.option("--bits", type=click.Choice(["16", "32"]), multiple=True, help="of an element  [default: both]")
@click.option("--device", default="cuda")
@click.option("--repeats", "num_repeats", type=click.IntRange(min=1), default=9)
@click.option("--table", "table_path", type=click.Path(dir_okay=False, path_type=Path), help="[default: the package's]")
@click.option("--dry-run", is_flag=True, help="print, write nothing")
def main(kernels, head_dims, bits, device, num_repeats, table_path, dry_run) -> None:
    # These import triton.
    from gpu_attention.comparison import check_device, machine_line
    from gpu_attention.tile_choice import (
        HEAD_DIM_CLASSES,
        KERNELS,
        candidates,
        choose,
        format_table,
        with_tile,
    )
    from gpu_attention.tile_trials import try_tiles
    from gpu_attention.timing import Timer
    from lamella.attention.triton.backend import device_arch
    from lamella.attention.triton.tuning import TABLE_PATH, choose_tile

    device = torch.device(device)
    try:
        check_device(device)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    arch = device_arch(device)
    path = table_path or TABLE_PATH
    table = json.loads(path.read_text(encoding="utf-8"))
    timer = Timer(device, num_warmups=3, num_repeats=num_repeats)
    click.echo(f"{machine_line(device)}: {arch}")
    for kernel in kernels or KERNELS:
        for itemsize_bytes in (int(width) // 8 for width in bits or ("16", "32")):
            for head_dim in map(int, head_dims or HEAD_DIM_CLASSES):
                shape = {"head_dim": head_dim, "itemsize_bytes": itemsize_bytes}
                now = choose_tile(kernel, arch, **shape)
                tiles = [now, *(tile for tile in candidates(kernel, **shape) if tile != now)]
                with torch.inference_mode():
                    trials = try_tiles(kernel, tiles, **shape, target=arch, timer=timer)
                title = f"{kernel}, {8 * itemsize_bytes} bits, heads of {head_dim}"
                try:
                    tile = choose(trials)
                except ConfigError as error:
                    click.echo(f"{title}: {error}")
                    continue
                times = {trial.tile: trial.seconds for trial in trials if trial.problem is None}
                for one, name in ((now, "now"), (tile, "best")):
                    figures = ", ".join(f"{seconds * 1e6:,.1f} µs" for seconds in times.get(one, ()))
                    click.echo(f"{title}: {name} {one}: {figures or 'cannot be used'}")
                click.echo(f"{title}: {len(times)} of {len(trials)} tiles timed")
                table = with_tile(table, kernel, arch, **shape, tile=tile)
                if not dry_run:
                    path.write_text(format_table(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
