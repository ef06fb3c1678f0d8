"""The KV cache's boundary: whatever others want of it, they ask a BlockManager.

    rows (RowTables)       which pages each running request has             data
    supply (PageSupply)    where pages come from and go: arena, compaction, eviction, copies
    chunks (ChunkPages)    pages that only the step needs which computes a chunk
    windows (RowWindows)   which pages rows let go once a window has moved on, and which they leave for their ends
    commits (RowCommits)   what rows give to the prefix tree, and which places to resume are kept
    occupancy              who moves into a row, and what it leaves behind
    finder (PromptFinder)  what need not be computed of a prompt
    outlook                what one request more, or one less, would mean for memory
    pins (PinnedPrefixes)  what is never evicted
    transfers              prefixes that leave the cache, or come in from elsewhere
    tree (PrefixTree)      what is cached
    arena (Arena)          which memory is lent to which group
    step pages (StepPages) what a step borrows for its own time

A *row* is a running request's place in all tables. Its life is begin, (grow, commit_ahead, plan_step, end_step, commit,
slide)*, release. Token positions count from the prompt's first token. A step is first planned, then in flight until its
results are taken in (`end_step`); it may fail (`fail_steps`). While it is in flight one more may be planned: *ahead*.
docs/kv_cache.md has a glossary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lamella.kv_cache.arena import Arena
from lamella.kv_cache.chunk_pages import ChunkPages
from lamella.kv_cache.counters import CacheEvents, GroupUsage, HitCounters, KVCacheCounters, SlabUse
from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.gathered_tables import GatheredTables
from lamella.kv_cache.inspection import Inspection
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.memory_outlook import Demand, ExpectedPrefixes, MemoryOutlook, Stake
from lamella.kv_cache.page_supply import PageSupply
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.pinned_prefixes import PinnedPrefix, PinnedPrefixes, PinOrder
from lamella.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from lamella.kv_cache.prefix_transfers import PrefixPages, PrefixTransfers, WritePages
from lamella.kv_cache.prefix_tree import PrefixTree, Salt
from lamella.kv_cache.prompt_finder import PromptFinder
from lamella.kv_cache.replay import MAX_REPLAY_SHARE, ReplayRule
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.row_commits import RowCommits
from lamella.kv_cache.row_occupancy import RowOccupancy
from lamella.kv_cache.row_tables import RowTables
from lamella.kv_cache.row_windows import RowWindows
from lamella.kv_cache.settings import CacheSettings
from lamella.kv_cache.spec import ceil_div
from lamella.kv_cache.step_memory import GroupPlan, StepMemory, TableVersions
from lamella.kv_cache.step_pages import StepPages


class BlockManager:
    """KV memory for up to `num_rows` running requests of up to `max_model_len` tokens each.

    What is public here is the whole contract; nobody outside of this package looks behind it. After each call the
    invariants of `invariants.check` hold. If a call raises what its docstring does not name, the state is undefined
    until `clear`.

    layout, settings: what it was made with; they never change.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_slabs: int,
        num_rows: int,
        max_model_len: int,
        interval_tokens: int,
        enable_prefix_caching: bool = True,
        retention: RetentionPolicy | None = None,
        slab_quota: tuple[int, ...] | None = None,
        windowed_replay: bool = True,
        skips_prompts: bool = False,
        step_pages_bytes: int = 0,
        max_pinned_bytes: int | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        """See CacheSettings. Raises ConfigError for quotas that do not fit the layout or the arena."""
        self.layout = layout
        self.settings = CacheSettings(
            num_slabs=num_slabs,
            num_rows=num_rows,
            max_model_len=max_model_len,
            interval_tokens=interval_tokens,
            enable_prefix_caching=enable_prefix_caching,
            retention=RetentionPolicy() if retention is None else retention,
            slab_quota=slab_quota,
            windowed_replay=windowed_replay,
            skips_prompts=skips_prompts,
            step_pages_bytes=step_pages_bytes,
            max_pinned_bytes=max_pinned_bytes,
            num_draft_tokens=num_draft_tokens,
        )
        self._page_tokens = layout.page_tokens
        self._caches_prefixes = enable_prefix_caching
        self._has_windows = any(group.spec.is_windowed for group in layout.groups)
        self._replay = ReplayRule(layout)
        self._begin_empty(None)

    def _begin_empty(self, before: Inspection | None) -> None:
        """Make all parts anew. before: the parts they replace; totals and stamps go on from theirs. None: from 0."""
        layout, settings, replay = self.layout, self.settings, self._replay
        max_blocks = ceil_div(settings.max_model_len, layout.page_tokens)
        first_stamp = 0 if before is None else before.rows.next_stamp
        rows = RowTables(len(layout.groups), settings.num_rows, max_blocks, first_stamp=first_stamp)
        arena = Arena(layout, settings.num_slabs, slab_quota=settings.slab_quota)
        step_pages = StepPages(layout, settings.num_slabs, settings.step_pages_bytes)
        tree = PrefixTree(
            tuple(group.spec for group in layout.groups),
            page_tokens=layout.page_tokens,
            free_page=arena.free,
            keep_spare=settings.enable_prefix_caching and settings.retention.keeps_spare,
        )
        first_step_page = step_pages.first_page
        supply = PageSupply(layout, settings, replay, rows, tree, arena, first_step_page=first_step_page)
        if before is not None:
            tree.continue_totals(before.tree)
            supply.continue_totals(before.supply)
        chunks = ChunkPages(layout, settings, rows, supply, step_pages)
        windows = RowWindows(layout.page_tokens, settings, rows, tree, supply)
        commits = RowCommits(
            layout.page_tokens, settings.retention, replay, rows, tree, supply, first_step_page=first_step_page
        )
        self._occupancy = RowOccupancy(
            layout.page_tokens,
            replay,
            rows,
            tree,
            supply,
            chunks,
            windows,
            caches_prefixes=settings.enable_prefix_caching,
        )
        pins = PinnedPrefixes(layout, settings, tree, None if before is None else before.pins.orders)
        self._finder = PromptFinder(layout, settings, replay, tree, pins)
        self._outlook = MemoryOutlook(layout, settings, rows, tree, supply, chunks, pins)
        self._transfers = PrefixTransfers(layout, tree, supply)
        self._gathered = GatheredTables(rows)
        self._chunks, self._windows, self._commits = chunks, windows, commits
        self._rows, self._tree, self._supply, self._pins = rows, tree, supply, pins
        # This line comes last: if `clear` is interrupted before it, the next `clear` still finds the old totals here.
        self._parts = Inspection(rows, tree, arena, supply, step_pages, chunks, commits, pins)

    # Prompts that wait

    def match(self, token_ids: np.ndarray, salt: Salt = None, boundaries: tuple[int, ...] = ()) -> PrefixMatch:
        """What need not be computed of this prompt (int32 [n]): what the cache has, and what no later token depends on.
        At least its last token is left to compute. Changes nothing. The answer holds until the next call that changes
        anything.

        salt: prompts of different salts share nothing. boundaries: positions in the prompt, ascending, each from 1 to
        n, where other prompts will part from it. Whoever begins with this match keeps places to resume there, which go
        after others when memory is wanted."""
        if self._pins.awaited:
            boundaries = tuple(sorted({*boundaries, *self._pins.awaited_ends(token_ids, salt)}))
        return self._finder.match(token_ids, salt, boundaries)

    def expect(self, token_ids: np.ndarray, salt: Salt, rank: int) -> Expectation | None:
        """A request waits with this prompt (int32 [n]): keep what the cache has of it longer than what nobody waits
        for. Returns None if the cache has nothing. `withdraw` the expectation when the request waits no more.

        rank: requests of lower rank run sooner."""
        return self._finder.expect(token_ids, salt, rank)

    def rerank(self, expectation: Expectation, rank: int) -> None:
        """The waiting request will run sooner or later than was thought. Not to be called after `withdraw`."""
        self._tree.resume_points.rerank(expectation, rank)

    def withdraw(self, expectation: Expectation) -> None:
        """The request waits no more: what it expected ages like anything else. A second call changes nothing."""
        self._tree.resume_points.withdraw(expectation)

    def expected(self, match: PrefixMatch = NO_MATCH) -> ExpectedPrefixes:
        """What waiting requests count on. The bytes leave out what is kept for the place where `match` ends."""
        return self._outlook.expected(match)

    def demand(self, num_tokens: int, match: PrefixMatch, growing: Sequence[tuple[int, int]]) -> Demand:
        """The most that all rows would hold together with one more request, of `num_tokens` tokens, that finds `match`.

        growing: (row, number of tokens it will have) for each row that will take more than it has now."""
        return self._outlook.demand(num_tokens, match, growing)

    def prefill_room(self, least_share: float) -> int:
        """The most prompt tokens that the next step may compute: those whose sliding KV fits into step pages or into
        idle memory, whichever holds more. Where there are no step pages, the share `least_share` of the arena counts in
        their place."""
        return self._outlook.prefill_room(least_share)

    def limit_replays(self, chunk_tokens: int) -> None:
        """From now on no replay computes more tokens than a step's largest chunk, or than MAX_REPLAY_SHARE of the arena
        holds the sliding KV of. Told once, when the chunk size is known."""
        most_bytes = self._supply.total_bytes * MAX_REPLAY_SHARE
        self._replay.most_tokens = min(chunk_tokens, self._outlook.sliding_tokens(most_bytes))

    # Rows

    def may_begin_ahead(self, match: PrefixMatch) -> bool:
        """Whether a request can `begin` with this match while a step is in flight. It can if pages are all it needs (no
        copy, no replay, nothing skipped) and no step has yet to compute a block that it finds."""
        return match.is_plain and self._tree.pending.isdisjoint(match.path)

    def begin(self, row: int, match: PrefixMatch, salt: Salt = None, *, parting_tokens: int = 0) -> bool:
        """Give an empty row the cached prefix of `match`: lock its nodes, and plan a copy of a partial block into pages
        that the row owns. Where the match is to be replayed, the row also owns windowed pages for the tokens that are
        replayed. Room for what is to be computed is made by `grow`.

        Needs a match that was made since the last change, for a prompt of this salt. Returns False when there is no
        memory for what the row must own; then nothing has changed but evictions and moves.

        parting_tokens: how many first tokens this prompt shares with a waiting one (0: with none). A place to resume
        will be kept there, unless the match already shows a place where another prompt parted.
        """
        if not self._occupancy.begin(row, match, salt, parting_tokens):
            return False
        if match.boundaries:
            self._rows.boundaries[row] = match.boundaries
            self._commits.keep_boundaries(row)
        return True

    def grow(
        self,
        row: int,
        num_computed: int,
        num_new: int,
        *,
        is_prefill: bool,
        num_processed: int | None = None,
        prompt_tokens: int = 0,
    ) -> bool:
        """Make room for the tokens [num_computed, num_computed + num_new). Before that, let go what no query from
        num_processed on can see, as `slide` does. Moves and evicts as needed. False: there is no memory; the row keeps
        what it had.

        num_processed: how far the row is by the steps that are taken in; less than num_computed where a step in flight
        computes the tokens between. None: num_computed.
        is_prefill: the step computes a chunk of the prompt: slide without waiting for the interval, and use step pages.
        While a step is in flight no step pages can be had: then False where the chunk should have some.
        prompt_tokens: see `slide`."""
        if num_processed is None:
            num_processed = num_computed
        windows = self._windows
        lowest_resume = windows.lowest_resume(row, num_processed, num_computed)
        lowest_owned = num_processed
        if prompt_tokens or self._rows.boundaries:
            lowest_owned = windows.lowest_owned(row, num_processed, prompt_tokens)
        windows.slide(row, lowest_owned, lowest_resume, at_once=is_prefill)
        end = num_computed + num_new
        if is_prefill and self._has_windows:
            if not self._supply.in_flight:
                return self._chunks.extend(row, num_computed, end)
            if self._chunks.wants_step_pages(row, num_computed, end):
                return False
        return self._supply.extend(row, ceil_div(end, self._page_tokens))

    def next_due(self, row: int) -> int:
        """The first position that the row has no page for: `grow` before it is computed."""
        return self._rows.num_blocks_at[row] * self._page_tokens

    def slide(self, rows: Iterable[int], num_computed: Iterable[int], prompt_tokens: Iterable[int]) -> bool:
        """Let go what no query of each row sees from its position `num_computed` on, without waiting for the interval.
        Of that, `num_blocks_more` blocks below the window stay in the tree for the row's end, until memory is wanted.
        Returns whether rows own fewer pages now: those are free, or can be evicted.

        prompt_tokens: the length of the row's prompt while it is being computed, else 0. It is known where a prompt
        ends. So what the resume point there will hold, the window and `num_blocks_more` blocks, stays the row's own
        until then."""
        windows, before = self._windows, sum(self._supply.num_owned)
        for row, position, length in zip(rows, num_computed, prompt_tokens, strict=True):
            lowest_resume = windows.lowest_resume(row, position, position)
            windows.slide(row, windows.lowest_owned(row, position, length), lowest_resume, at_once=True)
        return sum(self._supply.num_owned) < before

    def stake(self, row: int, num_computed: int) -> Stake:
        """What it would cost, and what it would free, to preempt the row, which has computed `num_computed` tokens."""
        return self._outlook.stake(row, num_computed)

    def release(self, row: int, token_ids: np.ndarray, num_computed: int, *, keep: bool = True) -> None:
        """A request ends, for good or until it resumes. With `keep`, what it computed is cached, its last partial block
        included; blocks that a step was yet to compute are forgotten first, as by `roll_back`. Afterwards the row is
        empty.

        token_ids: int32 [>= num_computed].
        """
        if keep and self._caches_prefixes:
            if self._rows.num_committed_at[row] * self._page_tokens > num_computed:
                num_computed = self._occupancy.roll_back(row, num_computed)
            self._commits.commit_end(row, token_ids, num_computed)
            if self._pins.awaited:
                self._pins.settle()
        self._occupancy.leave(row)

    # Steps

    def begin_step(self, *, is_ahead: bool) -> bool:
        """A step is to be planned. Returns False, with nothing changed, where none can be planned ahead because the
        step in flight moves pages. If the plan is given up, what rows have taken for it serves the next one.

        is_ahead: the step before is still in flight. As long as it is, no page moves, and pages that it may read do not
        become free."""
        if is_ahead and self._supply.moves:
            return False
        self._supply.in_flight = is_ahead
        return True

    def commit_ahead(self, row: int, token_ids: np.ndarray, num_tokens: int) -> None:
        """Enter the blocks that the step in preparation completes (those below `num_tokens`) in the tree, as pending,
        so that a request admitted to the same step can share them. Not to be called while a step is in flight.

        token_ids: int32 [>= num_tokens]."""
        if self._caches_prefixes:
            self._commits.commit_ahead(row, token_ids, num_tokens)

    def plan_step(self, rows: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray) -> StepMemory:
        """What a step reads and writes, and which pages it must move and copy first. Needs room (`grow`) for all of its
        tokens. The arrays hold until two more steps have been planned; nobody may write to them.

        rows: int64 [R], each once. positions: int64 [T], where the new tokens are; row_of_token: int64 [T], in which
        rows."""
        tables, page_tokens = self._rows, self._page_tokens
        blocks = positions // page_tokens
        offsets = positions - blocks * page_tokens
        read_only = self._replayed(row_of_token, positions) if tables.replay_end else None
        groups = []
        gathered = zip(
            self._tree.specs,
            tables.pages,
            self._gathered.gather(rows),
            tables.first_keys,
            self._supply.planned_copies(),
            strict=True,
        )
        for spec, pages, (block_tables, first_blocks), first_keys, copies in gathered:
            slot_mapping = pages[row_of_token, blocks] * page_tokens + offsets
            if read_only is not None and not spec.is_windowed:
                slot_mapping[read_only] = -1
            groups.append(GroupPlan(block_tables, first_blocks, first_keys.take(rows), slot_mapping, copies))
        first_step_slot = self._parts.step_pages.first_page * page_tokens
        versions = TableVersions(rows, tables.stamps.take(rows, axis=1))
        return StepMemory(tuple(groups), versions, tuple(self._supply.moves), first_step_slot)

    def _replayed(self, row_of_token: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which tokens are replayed (bool [T]): their full-attention KV is in the cache."""
        ends = np.zeros(self._rows.num_rows, dtype=np.int64)
        ends[list(self._rows.replay_end)] = list(self._rows.replay_end.values())
        is_replayed: np.ndarray = positions < ends[row_of_token]
        return is_replayed

    def end_step(self, *, in_flight: bool = False) -> None:
        """The oldest step has run. Its copies are done, its pending blocks have their contents, its step pages are
        nobody's, and pages that were given up while it was in flight are free.

        A row that had step pages has no pages there now: `commit` it, then `slide` it past them.

        in_flight: another step is in flight."""
        self._supply.in_flight = in_flight
        self._supply.free_given_up()
        self._tree.end_pending()
        self._supply.moves.clear()
        self._chunks.drop_all()
        for row in list(self._supply.copies):
            self._supply.drop_copies(row)

    def commit(
        self, rows: np.ndarray, token_ids: np.ndarray, num_computed: np.ndarray, *, ends_prompt: np.ndarray
    ) -> None:
        """Enter the blocks of each row (int64 [R]) that are complete at its `num_computed` (int64 [R]) in the tree, and
        keep places to resume. To be called after `end_step`. A row with no new block costs nothing.

        token_ids: int32 [num_rows, n], by row. ends_prompt: bool [R], the rows whose prompts this step finished: the
        ends of those become resume points."""
        if not self._caches_prefixes:
            return
        has_events = num_computed // self._page_tokens > self._rows.num_filled[rows]
        has_events |= ends_prompt
        events = has_events.nonzero()[0]
        columns = rows[events].tolist(), num_computed[events].tolist(), ends_prompt[events].tolist()
        for row, position, ends in zip(*columns, strict=True):
            self._commits.commit(row, token_ids[row], position, ends_prompt=ends)
        if len(events) and self._pins.awaited:
            self._pins.settle()

    def fail_steps(self) -> bool:
        """All planned steps failed; none is in flight any more. Returns whether they were to move pages.

        If so, nobody knows which contents arrived, and no KV can be trusted: `release` all rows without `keep`, then
        `end_step`, then `reset_prefix_cache`. If not, `roll_back` each row that was in a failed step, or `release` it
        without `keep` where that step was its first; then `end_step`."""
        self._supply.in_flight = False
        return bool(self._supply.moves)

    def roll_back(self, row: int, num_computed: int) -> int:
        """A step failed: forget the blocks that it was to complete in the row, and the row's copies.

        A partial block goes too. Returns how many tokens of the row are still computed. That is 0 where the row had not
        finished its replay: then nothing of it can be kept, and it is to be released. All rows of the failed step must
        be rolled back or released, for they may share pending blocks.
        """
        return self._occupancy.roll_back(row, num_computed)

    # The cache as a whole

    def clear(self) -> None:
        """Begin anew, with all rows and the cache empty, whatever state an exception left behind. Totals and stamps go
        on from where they were. If this call is interrupted, it must be repeated before any other."""
        self._begin_empty(self._parts)

    def pin(self, name: str, token_ids: np.ndarray, salt: Salt = None) -> PinnedPrefix:
        """Keep a prefix (int32 [n], n >= 1) in the cache until `unpin`: from now on, if it can be found whole, or as
        soon as a request has computed it.

        Raises RequestError for a name that is in use and where the settings keep no prefixes, and CapacityError, with
        nothing changed, where pinned prefixes would keep more than `max_pinned_bytes`, or leave too little for one
        request of max_model_len."""
        return self._pins.order(PinOrder(name, np.array(token_ids, dtype=np.int32), salt))

    def unpin(self, name: str) -> None:
        """Undo `pin`: what is cached of the prefix ages like any other. Raises RequestError for a name of no pin."""
        self._pins.cancel(name)

    def pinned(self) -> list[PinnedPrefix]:
        """All pinned prefixes, in the order in which they were pinned."""
        return self._pins.states()

    def export_prefix(self, token_ids: np.ndarray, salt: Salt = None) -> list[PrefixPages]:
        """Where the KV of a prefix (int32 [n], n >= 1) lies, per group: in windowed groups what a resume at its end
        needs, and one block more where that is there. Holds until the next call that changes anything; first the caller
        makes the moves of `take_moves`. Changes nothing. Raises RequestError where the cache has not all of it."""
        return self._transfers.give(token_ids, salt)

    def import_prefix(self, token_ids: np.ndarray, salt: Salt, first_tokens: Sequence[int], write: WritePages) -> bool:
        """Enter the KV of a prefix (int32 [n], n >= 1) that was computed elsewhere, as a place to resume that goes
        after others. Evicts as needed. False, and `write` is not called, where the cache has all of it.

        first_tokens: per group, from which token on there is KV. write: called once, with moves to make first and with
        the pages to fill. If it raises, pages are free again, and moves that it did not make are lost: `clear`.
        Raises, with nothing changed but evictions and moves, RequestError where a window is incomplete or the settings
        keep no prefixes, and CapacityError where there is no memory."""
        self._pins.require_kept()
        is_new = self._transfers.take(token_ids, salt, first_tokens, write)
        if self._pins.awaited:
            self._pins.settle()
        return is_new

    def take_moves(self) -> list[PageMoves]:
        """What compaction has moved and no step has copied yet: the caller must copy it at once, and no step will.
        While a step is in flight there is nothing: it does so first."""
        return self._supply.take_moves()

    def reset_prefix_cache(self, *, pinned: bool = False) -> bool:
        """Forget every cached prefix that no running request uses. Returns whether no cached page is left.

        pinned: also what is pinned; those prefixes are pinned again when they have been computed anew. Otherwise it
        stays, and does not count as left."""
        if pinned:
            self._pins.forget()
        while self._tree.evict_for_end() or self._tree.evict_one():
            pass
        cached = [usage.cached for usage in self.usage().values()]
        return cached == self._pins.num_unowned(NO_MATCH)

    def usage(self) -> dict[str, GroupUsage]:
        """Pages of each group, by its name, now."""
        report = {}
        for index, group in enumerate(self.layout.groups):
            lent = self._parts.arena.num_lent_slabs[index] * group.pages_per_slab
            used = self._parts.arena.num_used[index]
            # A page that was given up is still in use as long as a step is in flight.
            owned = self._supply.num_owned[index] + sum(one == index for one, _ in self._supply.given_up)
            report[group.name] = GroupUsage(owned=owned, cached=used - owned, free=lent - used)
        return report

    def peak_pages(self) -> dict[str, int]:
        """The most pages of each group, by its name, that running requests have held at once since the start."""
        return {group.name: peak for group, peak in zip(self.layout.groups, self._supply.peak_owned, strict=True)}

    def counters(self, hits: HitCounters) -> KVCacheCounters:
        """What the cache has done since the start. hits: what the scheduler counted."""
        tree = self._tree
        return KVCacheCounters(
            pages=self.usage(),
            num_slab_moves=self._supply.num_slab_moves,
            num_moved_pages=self._supply.num_moved_pages,
            num_evicted_resume_points=tree.num_evicted_resume_points,
            num_evicted_spare_pages=tree.num_evicted_spare_pages,
            num_tombstones=tree.num_tombstones,
            num_dead_full_pages=tree.num_dead_full_pages,
            hits=hits,
        )

    def events(self) -> CacheEvents:
        """What has happened, for those who look after every step."""
        tree, supply = self._tree, self._supply
        return CacheEvents(
            tuple(self._parts.arena.num_used),
            tuple(supply.num_owned),
            self._windows.num_slides,
            supply.num_slab_moves,
            tree.num_evicted_resume_points,
            tree.num_evicted_spare_pages,
            tree.num_dead_full_pages,
        )

    def slab_use(self) -> SlabUse:
        """Which group and which row has each slab now. Takes time that grows with the pages of all rows."""
        tables, num_slabs = self._rows, self.settings.num_slabs
        of_slabs = np.full(num_slabs, -1, dtype=np.int32)
        rows = tables.in_use()
        width = int(tables.num_blocks[rows].max(initial=0))
        for pages in tables.pages:
            slabs = pages[rows, :width] // self.layout.slab_units
            place, block = ((slabs > 0) & (slabs < num_slabs)).nonzero()
            of_slabs[slabs[place, block]] = rows[place]
        return SlabUse(self._parts.arena.slab_group.copy(), of_slabs)

    def inspect(self) -> Inspection:
        """The parts, for `invariants`, tests and tools to look at; no engine asks for them."""
        return self._parts
