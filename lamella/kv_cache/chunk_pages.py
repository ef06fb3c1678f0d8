"""Pages for the chunk of a prompt that a step computes: which of its blocks only that step needs, and where they go."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_supply import PageSupply, Span
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.settings import CacheSettings
from lamella.kv_cache.spec import ceil_div
from lamella.kv_cache.step_pages import StepPages


class ChunkPages:
    """Gives a chunk its pages. A *passing* block is one that a chunk writes and nobody needs after the step.

    step_blocks: row -> the blocks for which it has step pages.
    num_passing: row -> how many pages of each group it took for passing blocks, because memory was idle.
    Both hold for the time of a step: `drop` undoes what `extend` has noted there.
    """

    def __init__(
        self, layout: KVLayout, settings: CacheSettings, rows: RowTables, supply: PageSupply, step_pages: StepPages
    ) -> None:
        self.step_pages = step_pages
        self.step_blocks: dict[int, list[Span]] = {}
        self.num_passing: dict[int, list[int]] = {}
        self._layout, self._rows, self._supply = layout, rows, supply
        self._page_tokens = layout.page_tokens
        self._specs = [group.spec for group in layout.groups]
        self._windowed_groups = [group for group, spec in enumerate(self._specs) if spec.is_windowed]
        retention = settings.retention
        self._kept_block_ends = retention if retention.keeps_block_ends and settings.enable_prefix_caching else None

    def extend(self, row: int, num_computed: int, end: int) -> bool:
        """Make room for the tokens [num_computed, end), like `PageSupply.extend`, all or nothing.

        If so much memory idles that pages for all blocks drive nothing out of the cache that is kept on purpose, all
        get pages of the arena, which serve as cache afterwards. Otherwise passing blocks get step pages as far as there
        are any. False: there is no memory."""
        num_blocks = ceil_div(end, self._page_tokens)
        passing = self.passing_blocks(row, num_computed, end)
        if not passing:
            return self._supply.extend(row, num_blocks)
        if self._fits_into_idle_memory(row, num_blocks) and self._give(row, num_blocks, passing, []):
            return True
        given = [
            (group, first, self.step_pages.take(group, min(last - first, self.step_pages.num_left(group))))
            for group, first, last in passing
        ]
        if self._give(row, num_blocks, passing, given):
            return True
        for group, _, pages in given:
            self.step_pages.give_back(group, len(pages))
        return False

    def wants_step_pages(self, row: int, num_computed: int, end: int) -> bool:
        """Whether `extend` would give step pages to blocks of the chunk [num_computed, end): some are passing, and too
        little memory idles for all to have pages of the arena."""
        if not self.step_pages.num_tokens or not self.passing_blocks(row, num_computed, end):
            return False
        return not self._fits_into_idle_memory(row, ceil_div(end, self._page_tokens))

    def passing_blocks(self, row: int, num_computed: int, end: int) -> list[Span]:
        """The passing blocks of the chunk [num_computed, end) in windowed groups. What stays are the windows at the
        chunk's last block end and at each place in the chunk where a resume point will be, boundaries among them, each
        with one block more (see `RowCommits.add_resume_point`)."""
        rows, page_tokens = self._rows, self._page_tokens
        old = rows.num_blocks_at[row]
        last_end = end // page_tokens * page_tokens
        block_ends = [last_end]
        if num_computed < rows.junction_at[row] < last_end:
            block_ends.append(rows.junction_at[row])
        if self._kept_block_ends is not None:
            blocks = range(num_computed // page_tokens + 1, end // page_tokens)
            every = (block * page_tokens for block in blocks)
            block_ends += [one for one in every if self._kept_block_ends.keeps_block_end(one, page_tokens)]
        # (the lowest position to keep a window for, the end of the blocks to keep) of each place
        places = [(one - page_tokens, one) for one in block_ends]
        if row in rows.boundaries:
            # A place in the chunk's last block is kept with the window at its end.
            inside = [one for one in rows.boundaries[row] if one <= last_end]
            places += [(one - page_tokens, ceil_div(one, page_tokens) * page_tokens) for one in inside]
        places.sort()
        passing = []
        for group in self._windowed_groups:
            start = max(old, rows.first_kept_at[group][row])
            for lowest, kept_end in places:
                kept = self._specs[group].first_needed(max(0, lowest)) // page_tokens
                if start < kept:
                    passing.append((group, start, kept))
                start = max(start, kept_end // page_tokens)
        return passing

    def drop(self, row: int) -> None:
        """The step has run, or the row is not in it after all: the row has step pages no more."""
        self.num_passing.pop(row, None)
        for group, first, last in self.step_blocks.pop(row, ()):
            self._rows.pages[group, row, first:last] = NULL_PAGE
            self._rows.stamp(group, row)
        if not self.step_blocks:
            self.step_pages.reset()

    def drop_all(self) -> None:
        """`drop` every row that has anything for the time of the step."""
        for row in {*self.step_blocks, *self.num_passing}:
            self.drop(row)

    def _give(
        self, row: int, num_blocks: int, passing: Sequence[Span], given: Sequence[tuple[int, int, list[int]]]
    ) -> bool:
        """Put the step pages `given` (group, first block, pages) into the row's tables, and own pages of the arena for
        its other blocks up to `num_blocks`. False, and the row has what it had: there is no memory."""
        rows = self._rows
        old = rows.num_blocks_at[row]
        spans = []
        for group, kept in enumerate(rows.first_kept_at):
            start = max(old, kept[row])
            for owner, first, pages in given:
                if owner == group and pages:
                    spans.append((group, start, first))
                    start = first + len(pages)
            spans.append((group, start, num_blocks))
        if not self._supply.own_pages(row, [span for span in spans if span[1] < span[2]]):
            return False
        rows.num_blocks_at[row] = num_blocks
        num_passing = [0] * len(self._specs)
        for group, first, last in passing:
            num_passing[group] += last - first
        for group, first, pages in given:
            if pages:
                rows.pages[group, row, first : first + len(pages)] = pages
                self.step_blocks.setdefault(row, []).append((group, first, first + len(pages)))
                num_passing[group] -= len(pages)
        self.num_passing[row] = num_passing
        return True

    def _fits_into_idle_memory(self, row: int, num_blocks: int) -> bool:
        old = self._rows.num_blocks_at[row]
        num_bytes = sum(
            (num_blocks - max(old, kept[row])) * group.page_bytes
            for group, kept in zip(self._layout.groups, self._rows.first_kept_at, strict=True)
        )
        return num_bytes <= self._supply.idle_bytes()
