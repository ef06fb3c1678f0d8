"""Tile sizes per kernel, architecture and head dimension: data, in tuning.json."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.errors import ConfigError

TABLE_PATH = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m: most rows (query heads of one KV head, times tokens) of a program; block_n: keys it reads at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def launch_options(self) -> dict[str, Any]:
        """What the compiler is told. Fused multiply-add is spelled out: its default differs between versions."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE_PATH.read_text(encoding="utf-8"))


def choose_tile(kernel: str, arch: str, *, head_dim: int, itemsize_bytes: int) -> Tile:
    """The tile of `kernel` ("decode" or "prefill") on `arch` ("sm_90", "gfx942", ...; one that the table lacks gets
    "default"'s) for heads of `head_dim`, the larger of K's and V's. itemsize_bytes: of what is multiplied, or 1 for
    pages of fp8 that are multiplied in 16 bits; for these, the table has rows where they need other tiles.

    Raises ConfigError for heads wider than any in the table.
    """
    archs = _table()[kernel]
    tables = archs.get(arch, archs["default"])
    rows = tables["16-bit"] if itemsize_bytes == 1 and "8-bit" not in tables else tables[f"{8 * itemsize_bytes}-bit"]
    for row in rows:
        if head_dim <= row["max_head_dim"]:
            return Tile(row["block_m"], row["block_n"], row["num_warps"], row["num_stages"])
    raise ConfigError(
        f"head dimension {head_dim} has no {kernel} tile on {arch}; the triton kernels take up to "
        f"{rows[-1]['max_head_dim']}, attention_backend='torch' takes any"
    )
