"""The kernels compile for GPUs that are not there, in processes of their own: here they are interpreted."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attention_compile_report
from attention_compile_report import (
    SHAPES,
    SHARED_LIMITS,
    Measured,
    kernels,
    main,
    problem,
)
from attention_roofline import Workload, segment_length
from lamella.attention.triton.backend import MAX_SEGMENTS, SEGMENT_TOKENS
from tests.helpers.triton_cases import make_spec
from tests.pins import compiled

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def report(cache: Path, *arguments: str) -> tuple[int, list[list[str]], str]:
    """(exit code, cells of the table's rows, everything printed). cache: an empty folder, so that all is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, attention_compile_report.__file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    return done.returncode, rows[2:], done.stdout + done.stderr


def check(rows: list[list[str]]) -> None:
    expected = {"sm_80": "mma.sync", "sm_90": "", "sm_100": "", "gfx942": "v_mfma"}
    for target, kernel, shape, registers, spilled, shared, instructions in rows:
        assert 0 < int(registers) <= 512
        assert int(shared) <= SHARED_LIMITS[target]
        if kernel in ("decode", "prefill") and "fp32" not in shape:
            assert expected[target] in instructions
            assert instructions != "-"
        if re.search("gpt-oss|gemma-3-27b|llama|64 dims|128 dims", shape):
            assert int(spilled) == 0
        if re.search("270m|gemma-2", shape):
            assert int(spilled) <= 48


def test_kernels_compile(tmp_path: Path, record_property: Any) -> None:
    """Decode of every second shape for one target, prefill of every fourth of the others, the other kernels for a
    quarter of the shapes."""
    code, rows, printed = report(tmp_path, "--targets", *TARGETS, "--sample")
    assert code == 0, printed
    assert len(rows) >= 44
    for kernel, shapes in (("decode", SHAPES[::2]), ("prefill", SHAPES[1::4])):
        assert sorted(row[2] for row in rows if row[1] == kernel) == sorted(named.name for named in shapes)
    for target in TARGETS:
        assert {row[1] for row in rows if row[0] == target} == {kernel.name for kernel in kernels(SHAPES[0], target)}
    check(rows)
    compiled.require_pinned(compiled.of_attention(rows))
    record_property("kernel_cases", len(rows))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_every_shape(target: str, tmp_path: Path, record_property: Any) -> None:
    code, rows, printed = report(tmp_path, "--targets", target)
    assert code == 0, printed
    assert len({row[2] for row in rows}) == len(SHAPES)
    check(rows)
    compiled.require_pinned(compiled.of_attention(rows))
    record_property("kernel_cases", len(rows))


def test_what_must_not_be_is_reported() -> None:
    gpt_oss = SHAPES[0]
    decode = next(iter(kernels(gpt_oss, "sm_80")))
    assert (decode.name, gpt_oss.shape.k_dim) == ("decode", 64)
    good = Measured(registers=100, spilled=0, shared_bytes=163 << 10, matrix_instructions=("mma.sync",))
    assert problem(decode, gpt_oss, "sm_80", good) is None
    assert "8 spilled" in str(problem(decode, gpt_oss, "sm_80", dataclasses.replace(good, spilled=8)))
    gemma = next(named for named in SHAPES if named.name == "gemma-3-270m window 512")
    assert problem(decode, gemma, "sm_80", dataclasses.replace(good, spilled=48)) is None
    assert "49 spilled, 48 allowed" in str(problem(decode, gemma, "sm_80", dataclasses.replace(good, spilled=49)))
    assert "shared memory" in str(problem(decode, gpt_oss, "gfx942", good))
    without = dataclasses.replace(good, matrix_instructions=())
    assert "no matrix instruction" in str(problem(decode, gpt_oss, "sm_80", without))


def test_an_interpreted_process_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        main(["--targets", "sm_90"])


@pytest.mark.parametrize("rule", [("full", 0), ("window", 7), ("chunk", 5)], ids=str)
@pytest.mark.parametrize("num_new", [1, 11])
def test_the_rooflines_counts(rule: tuple[str, int], num_new: int) -> None:
    """Pair by pair, and byte by byte where nothing but K and V counts."""
    spec = make_spec(*rule, num_kv_heads=2, k_dim=8, v_dim=4, itemsize_bytes=2)
    work = Workload("test", spec, num_heads=6, num_requests=3, num_prior=9, num_new=num_new)
    pairs = [(q, k) for q in range(9, 9 + num_new) for k in range(spec.first_visible(q), q + 1)]
    assert work.num_flops == 3 * 6 * len(pairs) * 2 * (8 + 4)
    keys = {k for _, k in pairs}
    num_bytes = 3 * (len(keys) * 2 * (8 + 4) * 2 + num_new * 6 * (8 + 4) * 2)
    assert work.num_bytes == num_bytes + (3 * 2 * 6 * (4 + 2) * 4 if num_new == 1 else 0)


def test_how_long_segments_are() -> None:
    """By hand: 256 tokens up to 64 of them, then powers of two."""
    lengths = {1: 256, 16_384: 256, 16_385: 512, 32_768: 512, 131_072: 2048, 1_000_000: 16_384}
    for seen_tokens, expected in lengths.items():
        assert segment_length(seen_tokens, segment_tokens=SEGMENT_TOKENS, max_segments=MAX_SEGMENTS) == expected
