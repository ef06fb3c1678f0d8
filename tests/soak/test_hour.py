"""The soak of an hour in small: that it runs and finds nothing wrong, and that it would."""

from __future__ import annotations

import pytest

from tests.soak.hour import Soak, draw_plot


@pytest.mark.slow
def test_a_few_seconds_of_it(tmp_path):
    soak = Soak(tmp_path, seed=1)
    soak.run(2.5)
    assert soak.wrong == []
    assert soak.happened["requests ended"] > 10
    draw_plot(soak.samples, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    soak.answers = [[*answer[:-1], answer[-1] + 1] for answer in soak.answers]
    soak.run(0.5)
    assert soak.wrong
