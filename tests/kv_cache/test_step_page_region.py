"""The region of step pages: how many bytes hold how many tokens, and where each page lies."""

from __future__ import annotations

import pytest

from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.step_pages import StepPages, can_have_step_pages, region_bytes, region_tokens
from tests.helpers.simulation import chunked, full, sliding

# A block of 4 tokens is 16 B in each layer, so a unit is 16 B: pages of 1 and 2 units, 2 and 1 to a slab of 2.
HYBRID = [full(), sliding(9), sliding(9)]


class TestRegion:
    def test_bytes_counted_by_hand(self):
        """Two sliding layers of 16 B a block: k blocks take k + 1 layer pages. With 7 B over nothing more fits."""
        layout = build_layout(HYBRID, page_tokens=4)
        assert [region_bytes(layout, count) for count in (0, 3, 4, 7, 8, 20)] == [0, 0, 32, 32, 48, 96]
        assert [region_tokens(layout, size) for size in (0, 31, 32, 47, 48, 96, 103)] == [0, 0, 4, 4, 8, 20, 20]

    def test_groups_use_the_same_bytes(self):
        """Blocks of 16, 32 and 48 B in one layer; three layers of the second, one of the third: five blocks take
        4 * 32 + 96 = 224 B and 240 B, the larger."""
        specs = [full(), sliding(5, 2), sliding(5, 2), sliding(5, 2), sliding(7, 3)]
        layout = build_layout(specs, page_tokens=4)
        assert region_bytes(layout, 20) == 240
        assert region_tokens(layout, 240) == 20
        assert region_tokens(layout, 239) == 16

    @pytest.mark.parametrize(
        ("kv_sharing", "expected"),
        [
            ({}, [False, True, True, True]),
            ({5: 3}, [False, True, True, True]),  # layer 4, full attention, writes in between
            ({5: 1}, [False, False, True, True]),  # so does layer 2, windowed, into the same bytes
            ({6: 2}, [False, True, False, True]),
            ({5: 3, 6: 2}, [False, True, False, True]),  # 3 writes before 6 reads 2
        ],
    )
    def test_whose_kv_is_read_after_others_have_written_has_none(self, kv_sharing, expected):
        specs = [full(), sliding(5), sliding(7), chunked(8), full(), chunked(8), sliding(7)]
        specs[5] = specs[kv_sharing.get(5, 5)]
        layout = build_layout(specs, page_tokens=4, kv_sharing=kv_sharing)
        assert [can_have_step_pages(layout, group) for group in range(4)] == expected
        pages = StepPages(layout, 3, 1000)
        assert [pages.num_left(group) > 0 for group in range(4)] == expected

    def test_no_windows_no_region(self):
        layout = build_layout([full()] * 3, page_tokens=4)
        assert region_bytes(layout, 100) == 0
        assert region_tokens(layout, 10**6) == 0

    def test_addresses(self):
        """Five slabs of two units. A sliding page is two units, its step pages one apart; the last one ends with the
        region: (3 - 1) + 2 units."""
        layout = build_layout(HYBRID, page_tokens=4)
        pages = StepPages(layout, 5, region_bytes(layout, 12))
        assert pages.num_bytes == 4 * 16
        assert (pages.num_left(0), pages.num_left(1)) == (0, 3)
        assert pages.take(1, 2) == [10, 11]
        assert pages.num_left(1) == 1
        assert pages.take(1, 1) == [12]
        assert pages.num_left(1) == 0
        pages.reset()
        assert pages.take(1, 3) == [10, 11, 12]

    def test_every_group_starts_at_the_same_place(self):
        """Units of 16 B, 16 of them. Pages of two layers of one unit, of one layer of two, of one layer of one."""
        layout = build_layout([full(), sliding(5), sliding(5), sliding(7, 2), chunked(8)], page_tokens=4)
        first = 3 * layout.slab_units
        pages = StepPages(layout, 3, 16 * 16)
        assert [pages.num_left(group) for group in range(4)] == [0, 15, 8, 16]
        assert pages.take(2, 3) == [first, first + 2, first + 4]
        assert pages.take(3, 2) == [first, first + 1]
        assert pages.take(1, 2) == [first, first + 1]
        assert pages.take(1, 1) == [first + 2]
        pages.give_back(1, 2)
        assert pages.take(1, 1) == [first + 1]
        assert [pages.num_left(group) for group in range(4)] == [0, 13, 5, 14]
