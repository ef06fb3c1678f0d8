"""What the compilers make of every kernel: registers, spills and shared memory, for each release of Triton.

Reports say it as tests of theirs compile: the tables of attention and of the operators, and lines of JSON for sampling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from tests.pins.places import ATTENTION_REPORT, OPERATORS_REPORT, SAMPLING_REPORT
from tests.pins.stored import MAKE, load, require_equal

NAME = "compiled"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def of_attention(rows: Iterable[Sequence[str]]) -> dict[str, str]:
    """Rows of the table that the attention report prints -> kernel -> what is pinned of it."""
    return {
        f"{target} / attention / {kernel}, {shape}": _line(registers, spilled, shared)
        for target, kernel, shape, registers, spilled, shared, _ in rows
    }


def of_operators(rows: Iterable[Sequence[str]]) -> dict[str, str]:
    return {
        f"{target} / operators / {kernel}, {shape}": _line(registers, spilled, shared)
        for target, kernel, shape, _, registers, spilled, shared, _ in rows
    }


def of_sampling(target: str, measured: Iterable[dict[str, Any]]) -> dict[str, str]:
    return {
        f"{target} / sampling / {one['name']}": _line(one["registers"], one["spilled"], one["shared_bytes"])
        for one in measured
    }


def require_pinned(found: dict[str, str]) -> None:
    """Raises AssertionError where a kernel differs from what this release of Triton made of it, or was never pinned. Of
    releases without pins there is nothing to say here: the limits that the tests set hold for all."""
    assert found, "no kernel was compiled"
    pinned = load(NAME).get(version("triton"))
    if pinned is not None:
        require_equal(NAME, {key: pinned.get(key, "nothing") for key in found}, found)


def compile_all() -> dict[str, Any]:
    """What is pinned, with all kernels as the Triton that is installed compiles them."""
    with tempfile.TemporaryDirectory() as cache:
        found = of_attention(_rows(cache, ATTENTION_REPORT, "--targets", *TARGETS))
        # What several shapes have in common comes once, in the sample perhaps with another shape's name.
        found |= of_attention(_rows(cache, ATTENTION_REPORT, "--targets", *TARGETS, "--sample"))
        found |= of_operators(_rows(cache, OPERATORS_REPORT, "--targets", *TARGETS))
        for target in TARGETS:
            lines = _run(cache, SAMPLING_REPORT, target, "").splitlines()
            found |= of_sampling(target, [json.loads(line) for line in lines])
    return load(NAME) | {version("triton"): dict(sorted(found.items()))}


def _line(registers: object, spilled: object, shared_bytes: object) -> str:
    return f"{registers} registers, {spilled} spilled, {shared_bytes} shared bytes"


def _rows(cache: str, *command: str) -> list[list[str]]:
    lines = [line for line in _run(cache, *command).splitlines() if "|" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def _run(cache: str, *command: str) -> str:
    """What it prints, in a process that compiles. cache: Triton's, a folder that begins empty."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = cache
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}; `{MAKE} {NAME}` stopped")
    return done.stdout
