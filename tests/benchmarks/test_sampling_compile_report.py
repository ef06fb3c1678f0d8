"""The kernels compile for GPUs that are not there, in processes of their own: here they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sampling_launches import launches
from tests.pins import compiled

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sampling_compile_report.py"
SHARED_BYTES = 48 << 10  # what a program gets everywhere without asking


def check_target(target: str, wanted: str = "") -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), target, wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in measured] == [launch.name for launch in launches() if wanted in launch.name] != []
    for one in measured:
        assert one["spilled"] == 0, one
        assert 0 < one["registers"] <= 128, one  # two programs of 256 threads share 64 Ki registers
        assert one["shared_bytes"] <= SHARED_BYTES, one
    compiled.require_pinned(compiled.of_sampling(target, measured))


def test_the_kernels_that_draw_compile() -> None:
    check_target("sm_90", "draws, bf16")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles(target: str) -> None:
    check_target(target)


def test_a_launch_names_every_argument_and_gives_the_constants() -> None:
    for launch in launches(262_144):
        assert list(launch.signature) == launch.kernel.arg_names
        constants = {name for name, kind in launch.signature.items() if kind == "constexpr"}
        assert constants == set(launch.constants) == {name for name in launch.kernel.arg_names if name.isupper()}
        assert launch.constants.get("BLOCKS_PADDED", 128) * launch.constants["BLOCK"] == 262_144
