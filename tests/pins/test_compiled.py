"""The pins of what is compiled are those of every report; the tests that compile compare with them."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.pins import compiled, stored

CONSTRAINTS = Path(__file__).parents[2] / "constraints-cpu.txt"


def test_a_release_of_triton_that_is_allowed_is_pinned() -> None:
    """Of the newest that `make test` may install, which the range in the constraints says."""
    limits = re.search(r"^triton>=[\d.]+,<(\d+)\.(\d+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert limits is not None
    newest = f"{limits[1]}.{int(limits[2]) - 1}."
    assert any(release.startswith(newest) for release in stored.load("compiled")), (
        f"no Triton {newest}* is in tests/pins/compiled.json: install it and run `{stored.MAKE} compiled`"
    )


def test_every_report_and_target_is_pinned() -> None:
    for pinned in stored.load("compiled").values():
        reports = {tuple(key.split(" / ")[:2]) for key in pinned}
        assert reports == {
            (target, report) for target in compiled.TARGETS for report in ("attention", "operators", "sampling")
        }
        pattern = r"\d+ registers, \d+ spilled, \d+ shared bytes"
        assert all(re.fullmatch(pattern, value) for value in pinned.values())


def test_another_register_or_an_unknown_kernel_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["sm_90", "decode", "a shape", "79", "0", "512", "-"], ["sm_90", "merge", "a shape", "20", "0", "0", "-"]]
    found = compiled.of_attention(rows)
    assert found["sm_90 / attention / decode, a shape"] == "79 registers, 0 spilled, 512 shared bytes"
    monkeypatch.setattr(compiled, "load", lambda name: {version("triton"): dict(found)})
    compiled.require_pinned(found)
    rows[0][3] = "80"
    with pytest.raises(AssertionError, match=r"decode, a shape: pinned 79 registers, .*, now 80 registers"):
        compiled.require_pinned(compiled.of_attention(rows))
    rows[1][1] = "new"
    with pytest.raises(AssertionError, match=r"new, a shape: pinned nothing, now 20 registers"):
        compiled.require_pinned(compiled.of_attention(rows))
