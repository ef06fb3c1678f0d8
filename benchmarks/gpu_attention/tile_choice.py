"""Which tile is best, by measured times, and the tuning table with it."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lamella.attention.triton.tuning import Tile
from lamella.errors import ConfigError

KERNELS = ("decode", "prefill")
HEAD_DIM_CLASSES = (64, 128, 192, 256, 512)  # a tile serves heads as wide as its class and narrower
MAX_STAGED_BYTES = 256 << 10  # of K and V in shared memory: no GPU has more for one program


@dataclass(frozen=True, slots=True)
class Trial:
    """A tile with its seconds per workload, or the problem that rules it out."""

    tile: Tile
    seconds: tuple[float, ...] = ()
    problem: str | None = None


def candidates(kernel: str, *, head_dim: int, itemsize_bytes: int) -> list[Tile]:
    """Tiles worth compiling. Decode's rows are the query heads of one KV head: more of them than 64 are rare."""
    block_ms = (16, 64) if kernel == "decode" else (16, 32, 64, 128)
    tiles = []
    for block_m, block_n, num_warps, num_stages in itertools.product(block_ms, (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        staged_bytes = 2 * block_n * head_dim * itemsize_bytes * num_stages
        if staged_bytes <= MAX_STAGED_BYTES:
            tiles.append(Tile(block_m, block_n, num_warps, num_stages))
    return tiles


def choose(trials: Sequence[Trial]) -> Tile:
    """The tile with the lowest geometric mean of its times, the earlier of equals: every workload weighs alike,
    however long it takes.

    Raises ConfigError where no trial was timed.
    """
    timed = [trial for trial in trials if trial.problem is None]
    if not timed:
        problems = "; ".join(f"{trial.tile}: {trial.problem}" for trial in trials[:3])
        raise ConfigError(f"none of {len(trials)} tiles can be used ({problems}); the table keeps what it has")
    return min(timed, key=lambda trial: math.fsum(map(math.log, trial.seconds))).tile


def with_tile(
    table: dict[str, Any], kernel: str, arch: str, *, itemsize_bytes: int, head_dim: int, tile: Tile
) -> dict[str, Any]:
    """`table` (the contents of tuning.json) with the tile of one class on `arch`; all else is as it was. An
    architecture that the table lacks starts from "default", so that it has tiles for every width."""
    table = copy.deepcopy(table)
    archs = table[kernel]
    sections = archs.setdefault(arch, copy.deepcopy(archs["default"]))
    key = f"{8 * itemsize_bytes}-bit"
    rows = [row for row in sections[key] if row["max_head_dim"] != head_dim]
    rows.append(
        {
            "max_head_dim": head_dim,
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
    )
    sections[key] = sorted(rows, key=lambda row: row["max_head_dim"])
    return table


def format_table(table: Any, indent: str = "") -> str:
    """JSON as tuning.json has it: a row per line, keys in the table's order. Without a newline at the end."""
    deeper = indent + "  "
    if isinstance(table, dict):
        entries = [f"{deeper}{json.dumps(key)}: {format_table(value, deeper)}" for key, value in table.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + json.dumps(row) for row in table) + f"\n{indent}]"
