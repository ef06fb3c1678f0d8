"""The operators' kernels compile for GPUs that are not there, in processes of their own: here they are interpreted."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import operator_compile_report as compile_report
from attention_compile_report import SHARED_LIMITS
from operator_compile_report import Measured, launches, main
from tests.pins import compiled

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def report(cache: Path, *arguments: str) -> tuple[int, list[list[str]], str]:
    """(exit code, cells of the table's rows, everything printed). cache: an empty folder, so that all is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, compile_report.__file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    return done.returncode, rows[2:], done.stdout + done.stderr


def check(rows: list[list[str]]) -> None:
    for target, kernel, _, warps, registers, spilled, shared, _ in rows:
        assert int(spilled) == 0
        assert 0 < int(registers) <= 128, f"{kernel}: {registers} registers, so few warps fit a processor"
        assert int(warps) <= 16
        assert int(shared) <= min(8 << 10, SHARED_LIMITS[target])


def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    code, rows, printed = report(tmp_path, "--targets", *TARGETS, "--shapes", "gemma-3-270m")
    assert code == 0, printed
    assert {(row[0], row[1]) for row in rows} == {
        (target, kernel) for target in TARGETS for kernel in ("norm", "add_norm", "heads", "gated")
    }
    check(rows)
    compiled.require_pinned(compiled.of_operators(rows))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_every_shape(target: str, tmp_path: Path) -> None:
    code, rows, printed = report(tmp_path, "--targets", target)
    assert code == 0, printed
    assert len(rows) == len(list(launches()))
    check(rows)
    compiled.require_pinned(compiled.of_operators(rows))


def test_what_must_not_be_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fine = Measured(registers=40, spilled=0, shared_bytes=16)

    def measured(launch: compile_report.Launch, target: str) -> Measured:
        return dataclasses.replace(fine, spilled=8) if launch.kernel == "heads" else fine

    monkeypatch.setattr(compile_report, "compile_launch", measured)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["--targets", "sm_90", "--shapes", "gemma-3-1b"]) == 0
    assert main(["--targets", "sm_90", "--shapes", "80"]) == 1
    assert "not as it must be: sm_90 heads, 32 heads of 80: 8 spilled" in capsys.readouterr().out


def test_an_interpreted_process_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        main(["--targets", "sm_90"])
