"""Choosing tiles: what is tried, what is dropped, what the table becomes. Times need a GPU; here they are given."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gpu_attention import tile_trials
from gpu_attention.tile_choice import (
    HEAD_DIM_CLASSES,
    KERNELS,
    Trial,
    candidates,
    choose,
    format_table,
    with_tile,
)
from gpu_attention.tile_trials import named_shape, trial_workloads
from lamella.attention.contract import AttentionParams
from lamella.attention.torch_backend import TorchBackend
from lamella.attention.triton.backend import SEGMENT_TOKENS
from lamella.attention.triton.tuning import TABLE_PATH, Tile
from lamella.errors import ConfigError
from lamella.kv_cache.spec import KVCacheSpec, SlidingWindowSpec
from tests.helpers.triton_cases import make_spec

CPU = torch.device("cpu")
TILES = [Tile(16, 16, 4, 1), Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(16, 64, 4, 3)]
ROOT = Path(__file__).parents[3]


def test_the_fastest_over_all_workloads_is_chosen() -> None:
    times = [(1.0, 100.0), (2.0, 40.0), (4.0, 30.0), (0.5, 300.0)]  # products 100, 80, 120, 150; sums differ in order
    trials = [Trial(tile, seconds) for tile, seconds in zip(TILES, times, strict=True)]
    assert choose(trials) == TILES[1]
    assert choose(trials[::-1]) == TILES[1]


def test_of_equals_the_first_is_chosen() -> None:
    assert choose([Trial(tile, (3.0, 5.0)) for tile in TILES]) == TILES[0]


def test_a_tile_with_a_problem_is_not_chosen_however_fast() -> None:
    trials = [Trial(TILES[0], (1.0,), "spills 8"), Trial(TILES[1], problem="wrong"), Trial(TILES[2], (9.0,))]
    assert choose(trials) == TILES[2]
    with pytest.raises(ConfigError, match=r"none of 2 tiles can be used .*spills 8.*; the table keeps what it has"):
        choose(trials[:2])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", HEAD_DIM_CLASSES)
@pytest.mark.parametrize("itemsize_bytes", [2, 4])
def test_candidates_are_tiles_that_the_kernels_take(kernel: str, head_dim: int, itemsize_bytes: int) -> None:
    tiles = candidates(kernel, head_dim=head_dim, itemsize_bytes=itemsize_bytes)
    assert len(set(tiles)) == len(tiles) >= 8
    for tile in tiles:
        assert SEGMENT_TOKENS % tile.block_n == 0
        assert min(tile.block_m, tile.block_n) >= 16  # what a matrix unit takes
        assert tile.num_stages * tile.block_n * 2 * head_dim * itemsize_bytes <= 256 * 1024


def test_a_row_is_replaced_and_nothing_else() -> None:
    table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    before = copy.deepcopy(table)
    new = with_tile(table, "prefill", "sm_90", itemsize_bytes=2, head_dim=128, tile=Tile(128, 16, 4, 3))
    assert table == before
    row = {"max_head_dim": 128, "block_m": 128, "block_n": 16, "num_warps": 4, "num_stages": 3}
    rows = new["prefill"]["sm_90"]["16-bit"]
    assert [one["max_head_dim"] for one in rows] == [
        one["max_head_dim"] for one in before["prefill"]["sm_90"]["16-bit"]
    ]
    assert rows[1] == row
    rows[1] = before["prefill"]["sm_90"]["16-bit"][1]
    assert new == before


def test_a_class_that_the_table_lacks_is_put_in_its_place() -> None:
    table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    new = with_tile(table, "decode", "sm_90", itemsize_bytes=2, head_dim=64, tile=TILES[0])
    before = table["decode"]["sm_90"]["16-bit"]
    assert new["decode"]["sm_90"]["16-bit"][1:] == before
    assert new["decode"]["sm_90"]["16-bit"][0]["max_head_dim"] == 64


def test_a_new_architecture_has_tiles_for_every_width() -> None:
    table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    new = with_tile(table, "decode", "sm_89", itemsize_bytes=4, head_dim=256, tile=TILES[3])
    sections = copy.deepcopy(table["decode"]["default"])
    sections["32-bit"][1] = {"max_head_dim": 256, "block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3}
    assert new["decode"]["sm_89"] == sections
    assert "sm_89" not in new["prefill"]
    again = with_tile(new, "decode", "sm_89", itemsize_bytes=4, head_dim=512, tile=TILES[0])
    assert again["decode"]["sm_89"]["32-bit"][1] == sections["32-bit"][1]  # not from "default" once more
    assert again["decode"]["default"] == table["decode"]["default"]


def test_the_table_is_written_as_it_was_read() -> None:
    text = TABLE_PATH.read_text(encoding="utf-8")
    assert format_table(json.loads(text)) + "\n" == text


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_workload_is_described_to_the_compiler_as_it_is(kernel: str) -> None:
    sliding, full = trial_workloads(kernel, 192, 2)
    assert (sliding.num_new == 1) == (full.num_new == 1) == (kernel == "decode")
    shape = named_shape(sliding, torch.bfloat16).shape
    assert (shape.num_kv_heads * shape.group, shape.k_dim, shape.v_dim) == (32, 192, 128)
    assert (shape.rule, shape.reach, shape.dtype) == (1, 1024, torch.bfloat16)
    shape = named_shape(full, torch.float32).shape
    assert (shape.rule, shape.reach, shape.dtype) == (0, 0, torch.float32)


def tiny_specs(head_dim: int, itemsize_bytes: int, window_tokens: int) -> tuple[KVCacheSpec, ...]:
    return make_spec("window", window_tokens), make_spec("full")


class OneKeyShort(TorchBackend):
    """In place of a tile that gives wrong results: its window is one key too short."""

    def __init__(self, tile: Tile) -> None:
        del tile

    def decode(self, params: AttentionParams, *arguments: Any) -> None:
        super().decode(one_key_short(params), *arguments)

    def prefill(self, params: AttentionParams, *arguments: Any) -> None:
        super().prefill(one_key_short(params), *arguments)


def one_key_short(params: AttentionParams) -> AttentionParams:
    assert isinstance(params.spec, SlidingWindowSpec)
    spec = dataclasses.replace(params.spec, window_tokens=params.spec.window_tokens - 1)
    return dataclasses.replace(params, spec=spec)


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_held_against_the_reference(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_trials, "specs", tiny_specs)  # as small as the interpreter asks for

    def problem() -> str | None:
        return tile_trials.result_problem(kernel, Tile(64, 32, 4, 1), head_dim=16, itemsize_bytes=4, device=CPU)

    assert problem() is None
    monkeypatch.setattr(tile_trials, "TritonBackend", OneKeyShort)
    assert (problem() or "").startswith("outputs differ from the reference's by ")


COMPILE = """
import torch
from lamella.attention.triton.tuning import Tile
from gpu_attention.tile_trials import compile_problem, named_shape, trial_workloads

def problem(kernel, head_dim, tile):
    return compile_problem(kernel, named_shape(trial_workloads(kernel, head_dim, 2)[1], torch.bfloat16), tile, "sm_80")

print(problem("decode", 64, Tile(16, 32, 4, 2)))
print(problem("prefill", 64, Tile(128, 64, 4, 2)))
print(problem("decode", 512, Tile(16, 64, 16, 4)))
print(problem("prefill", 64, Tile(64, 48, 4, 1)))
"""


def test_tiles_that_spill_or_do_not_fit_or_compile_are_named(tmp_path: Path) -> None:
    """For a GPU that need not be there; in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    good, spilling, large, odd = done.stdout.splitlines()
    assert good == "None"
    assert spilling.startswith("spills ")
    assert "bytes of shared memory, sm_80 has 166,912" in large
    assert odd.startswith("does not compile (")


def test_without_a_gpu_the_script_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = runpy.run_path(str(ROOT / "benchmarks" / "tune_attention.py"))["main"]
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1
    assert "sees no such GPU" in result.output
