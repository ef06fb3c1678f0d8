"""The smallest usable ratio, hits against ratio, and ratios that models carry."""

import pytest

from lamella.errors import ConfigError
from lamella.planner.plan import RATIOS, PlanOptions
from tests.helpers.plans import lines_of, plan_of


def test_the_smallest_ratio_is_window_interval_and_page_over_the_mean_length():
    options = PlanOptions(memory_bytes=80 << 30, context_tokens=32768, interval_tokens=64, mean_tokens=8192)
    plan = plan_of("mimo-v2-flash", options)
    assert plan.smallest_ratio.ratio == (129 + 64 + 16) / 8192
    assert "r_min = (W + I + P) / mean length = (129 + 64 + 16) / 8,192 = 0.0255" in plan.report()


def test_hits_are_the_share_of_cached_prefixes_that_have_a_window():
    """Counted by hand at r_min / 4: a quarter as many windows as prefixes, but for whole ones."""
    plan = plan_of("mimo-v2-flash", PlanOptions(memory_bytes=80 << 30, context_tokens=32768))
    least = plan.smallest_ratio
    quarter, half, whole = (least.hits(cell) for cell in plan.small_cells)
    # 80 GiB / (9 * 2,560 B + 39 * 5,120 B * 161 / 32,768 / 4) = 3,689,000 tokens of full layers.
    assert quarter == (112, 28, 0.25)
    assert half[2] == pytest.approx(0.5, abs=0.01)
    assert whole[2] == 1.0
    assert all(least.hits(cell)[2] == 1.0 for cell in plan.cells)
    assert ["r=0.00123", "112", "28", "25.0%"] in lines_of(plan.report())


def test_models_of_one_kind_have_no_smallest_ratio():
    plan = plan_of("mistral-7b")
    assert plan.smallest_ratio is None
    assert "r_min" not in plan.report()


@pytest.mark.parametrize(("name", "ratios"), [("deepseek-v4", (0.1,)), ("inkling", (0.1,)), ("gpt-oss-20b", RATIOS)])
def test_a_models_own_ratio_is_used_where_none_is_given(name, ratios):
    memory = {"memory_bytes": 80 << 30, "context_tokens": 8192}
    assert tuple(cell.ratio for cell in plan_of(name, PlanOptions(**memory)).cells) == ratios
    assert [cell.ratio for cell in plan_of(name, PlanOptions(ratios=(0.4,), **memory)).cells] == [0.4]


def test_the_mean_length_is_a_number_of_tokens():
    with pytest.raises(ConfigError, match="mean_tokens=0"):
        PlanOptions(memory_bytes=1 << 30, context_tokens=1024, mean_tokens=0)
