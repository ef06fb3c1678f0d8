"""Who holds which pages: one block table per group and running request, over the arena and the tree.

A request in a *row* owns what its row names, and nothing else:

    block          0 ...... first kept ............. commit frontier ........ blocks grown
    full group     [shared with or committed to the tree, locked ][ private            ]
    windowed       [ null, slid ][ committed to the tree, locked ][ private            ]
                                          [ step pages: nobody's, for the time of a step ]

"Locked" blocks carry a node in `nodes`; their pages belong to the tree. Private blocks (node NO_NODE)
own their pages. Sliding and release treat both alike: unlock the node, or free the page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.expectations import Expectation
from lamella.kv_cache.prefix_match import NO_MATCH, PrefixMatch
from lamella.kv_cache.prefix_tree import Salt
from lamella.kv_cache.row_commits import CommittingRows, block_key
from lamella.kv_cache.spec import ceil_div

_NO_PAGES = np.zeros(0, dtype=np.int64)


class GroupUsage(NamedTuple):
    """Pages of one group by state; they add up to the pages of the slabs lent to it."""

    owned: int  # private, or referenced by a request
    cached: int  # in the tree, nobody uses it now
    free: int


class HybridBlockManager(CommittingRows):
    """Block tables of up to `num_rows` running requests of up to `max_model_len` tokens.

    interval_tokens: how many tokens must have left a window before decode slides it.
    windowed_replay: resume where only full-attention KV is cached, if that costs less than half (see `replay`).
    step_pages_bytes: of the region behind the last slab (see `step_pages`).
    After each call the invariants of `invariants.check` hold.
    """

    # Admission

    def match(self, token_ids: np.ndarray, salt: Salt = None) -> PrefixMatch:
        """What need not be computed of this prompt (int32 [n]): what the cache has, and what no later token depends on.
        At least its last token is left to compute."""
        match = self._find(token_ids, salt)
        if not self.skips_prompts or self.retention.keeps_block_ends:
            return match
        start = self.replay.skip(len(token_ids), match.num_tokens)
        if start is None:
            return match
        path = list(match.whole_path[: start // self.page_tokens])
        known = len(path) * self.page_tokens
        skipped = [
            block_key(token_ids[block : block + self.page_tokens]) for block in range(known, start, self.page_tokens)
        ]
        return match._replace(
            num_tokens=start,
            path=path,
            tail_node=NO_NODE,
            num_replayed_tokens=0,
            num_skipped_tokens=start - match.num_tokens,
            skipped_blocks=skipped if self.enable_prefix_caching else (),
        )

    def _find(self, token_ids: np.ndarray, salt: Salt) -> PrefixMatch:
        """What the cache has of this prompt."""
        if not self.enable_prefix_caching:
            return NO_MATCH
        match = self.tree.match(token_ids, salt, len(token_ids) - 1)
        if not self.windowed_replay:
            return match
        num_blocks = min(len(match.whole_path), (len(token_ids) - 1) // self.page_tokens)
        start = self.replay.plan(num_blocks * self.page_tokens, match.num_tokens, self.max_replay_tokens)
        if start is None:
            return match
        return match._replace(
            num_tokens=start,
            path=list(match.whole_path[:num_blocks]),
            tail_node=NO_NODE,
            num_replayed_tokens=num_blocks * self.page_tokens - start,
        )

    def expect(self, token_ids: np.ndarray, salt: Salt, rank: int) -> Expectation | None:
        """Keep what the cache has of a waiting request's prompt (int32 [n]) longer than what nobody waits for;
        None if it has nothing. rank: requests of lower rank run sooner. `settle` when it waits no more."""
        tree = self.tree
        if tree.windowed_groups and not self.retention.keeps_ends:
            return None
        match = self._find(token_ids, salt)
        if not match.num_tokens:
            return None
        path = match.path if match.tail_node == NO_NODE else [*match.path, match.tail_node]
        if not tree.pending.isdisjoint(path):
            return None  # the step that will compute it may fail
        held = []
        num_bytes = 0
        for group, spec in enumerate(tree.specs):
            if spec.is_windowed and match.num_replayed_tokens:
                continue
            if spec.is_windowed:
                first = min(spec.first_needed(match.num_tokens) // self.page_tokens, len(match.path))
                held += [(group, node) for node in path[first:]]
            else:  # what other prefixes and running requests share with it is there anyway
                shared = np.flatnonzero((tree.num_children[path] > 1) | (tree.refs[group, path] > 0))
                first = int(shared[-1]) + 1 if len(shared) else 0
            num_bytes += (len(path) - first) * self.layout.groups[group].page_bytes
        held = list(dict.fromkeys([*held, *tree.resume_points.held(path[-1])]))
        tree.add_resume_point(path[-1], held)
        expectation = Expectation(path[-1], rank, match.num_tokens, num_bytes)
        tree.resume_points.expect(expectation)
        return expectation

    def rerank(self, expectation: Expectation, rank: int) -> None:
        """The waiting request will run sooner or later than was thought."""
        self.tree.resume_points.rerank(expectation, rank)

    def settle(self, expectation: Expectation) -> None:
        """The request waits no more."""
        self.tree.resume_points.settle(expectation)

    def begin(self, row: int, match: PrefixMatch, salt: Salt = None, *, parting_tokens: int = 0) -> bool:
        """Give an empty row the cached prefix of `match`: lock its nodes, own a copy of a partial block.

        parting_tokens: where a waiting prompt will part from this one (0: none), kept unless another was seen to part.
        Where the match is to be replayed, own the windowed pages of the tokens that are replayed.
        False, and nothing changed but evictions, when there is no memory for what the row must own.
        """
        assert self.frontier[row] == NO_NODE, f"row {row} is in use"
        tree = self.tree
        path = match.path
        frontier = path[-1] if path else tree.root(salt)
        if match.skipped_blocks:
            path = [*path, *tree.insert_chain(frontier, list(match.skipped_blocks)).tolist()]
            frontier = path[-1]
        tree.pin(frontier)
        self.frontier[row] = frontier
        for group in range(self.num_groups):
            self._stamp(group, row)
        num_whole = len(path)
        self.nodes[row, :num_whole] = path
        if match.num_skipped_tokens:
            self._begin_after(row, match.num_tokens)
            return True
        self.num_blocks[row] = self.num_committed[row] = self.num_settled[row] = num_whole
        self._resume_block[row] = num_whole
        for group, spec in enumerate(tree.specs):
            first = min(spec.first_needed(match.num_tokens) // self.page_tokens, num_whole)
            if match.num_replayed_tokens and spec.is_windowed:
                first = num_whole
            self.first_kept[group, row] = self.first_left[group, row] = first
            if spec.is_windowed and self.num_blocks_more:
                self._leave_found(group, row, match)
            for block in range(first, num_whole):
                node = match.path[block]
                self._count_owned(group, +int(tree.refs_at[group][node] == 0))
                self._pages_at[group][row][block] = tree.lock(group, node)
        junction = match.num_structural_tokens // self.page_tokens * self.page_tokens
        if junction <= match.num_tokens < parting_tokens and tree.windowed_groups:  # with the block they part in
            junction = ceil_div(parting_tokens, self.page_tokens) * self.page_tokens
        self._junction[row] = junction if junction > match.num_tokens else -1
        if match.num_replayed_tokens and not self._begin_replay(row, match):
            self._drop_row(row)
            return False
        if match.tail_node != NO_NODE and not self._copy_tail(row, match):
            self._drop_row(row)
            return False
        tree.pass_by(match.path[:-1])
        tree.touch(frontier)
        tree.touch(match.tail_node)
        return True

    def _leave_found(self, group: int, row: int, match: PrefixMatch) -> None:
        """Of the blocks below the window, leave those for the row's end that it will need, should it come soon, to be
        kept with a block more."""
        last_whole = match.num_tokens // self.page_tokens * self.page_tokens
        lowest_resume = max(0, last_whole - self.num_blocks_more * self.page_tokens)
        first = self.tree.specs[group].first_needed(lowest_resume) // self.page_tokens
        kept = int(self.first_kept[group, row])
        for block in range(first, kept):
            self.tree.want_for_end(group, match.path[block])
        self.first_left[group, row] = min(first, kept)

    def _begin_after(self, row: int, start: int) -> None:
        """Nothing before the block boundary `start` is computed or read: no windowed KV exists there. What follows is
        the row's own until it is exact."""
        num_blocks = start // self.page_tokens
        self.num_blocks[row] = num_blocks
        if self.enable_prefix_caching:
            self.num_committed[row] = self.num_settled[row] = self._resume_block[row] = num_blocks
        self._junction[row] = -1
        self.first_kept[:, row] = self.first_left[:, row] = num_blocks
        self.first_keys[:, row] = start
        self.scratch_end[:, row] = [ceil_div(exact, self.page_tokens) for exact in self.replay.exact_from(start)]

    def _begin_replay(self, row: int, match: PrefixMatch) -> bool:
        """Own scratch pages for the windowed KV of the tokens that are replayed; the full KV is locked already."""
        start, end = match.num_tokens // self.page_tokens, len(match.path)
        groups = self.tree.windowed_groups
        self._leave_nothing(row)
        if not self._own_pages(row, [(group, start, end) for group in groups]):
            return False
        self.first_kept[groups, row] = self.first_left[groups, row] = start
        self.first_keys[groups, row] = match.num_tokens
        self.scratch_end[groups, row] = end
        self.num_settled[row] = end - 1  # so that `commit` is called when the replay is done
        self.replaying[row] = end * self.page_tokens
        return True

    def _copy_tail(self, row: int, match: PrefixMatch) -> bool:
        """Own the block that the hit ends in, in every group, and plan to copy its first part."""
        source = match.tail_node
        for group in range(self.num_groups):
            self._count_owned(group, +int(self.tree.refs_at[group][source] == 0))
            self.tree.lock(group, source)
        block = len(match.path)
        if not self._extend(row, block + 1):
            for group in range(self.num_groups):
                self._unlock(group, source)
            return False
        self.copies[row] = [(group, source, pages[row][block]) for group, pages in enumerate(self._pages_at)]
        return True

    def planned_copies(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per group (source pages, target pages) to copy before the next step; `end_step` when they have run. While a
        step is in flight, those that there are are that step's."""
        if not self.copies or self.in_flight:
            return [(_NO_PAGES, _NO_PAGES)] * self.num_groups
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self.num_groups)]
        for copies in self.copies.values():
            for group, source, target in copies:
                pairs[group].append((self.tree.page_at[group][source], target))
        arrays = (np.array(one, dtype=np.int64).reshape(-1, 2) for one in pairs)
        return [(array[:, 0], array[:, 1]) for array in arrays]

    # Growing and sliding

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
        """Make room for the tokens [num_computed, num_computed + num_new), after sliding what no query
        from num_processed on can see (None: num_computed; less where a step in flight computes the tokens between),
        as `slide` does. Evicts as needed. False: no memory; the row keeps what it had.

        is_prefill: the step computes a chunk of the prompt: slide at once, and use step pages. While a step is in
        flight there are none: False where the chunk should have any. prompt_tokens: as `slide` has it."""
        if num_processed is None:
            num_processed = num_computed
        lowest_resume = self._lowest_resume(row, num_processed, num_computed)
        self._slide(row, self._lowest_owned(num_processed, prompt_tokens), lowest_resume, at_once=is_prefill)
        if is_prefill and self.in_flight and self._needs_step_pages(row, num_computed, num_computed + num_new):
            return False
        if is_prefill and self.tree.windowed_groups and not self.in_flight:
            return self._extend_for_chunk(row, num_computed, num_computed + num_new)
        return self._extend(row, ceil_div(num_computed + num_new, self.page_tokens))

    def slide(self, row: int, num_computed: int, *, prompt_tokens: int = 0) -> None:
        """Let go what no query from num_computed on can see, without waiting for the interval. `num_blocks_more` blocks
        stay in the tree for the row's end, until memory is wanted.

        prompt_tokens: how long the prompt is, while it is being computed, else 0. Where it ends is known, so what will
        be kept there, with `num_blocks_more` blocks, stays the row's own until it is."""
        lowest_resume = self._lowest_resume(row, num_computed, num_computed)
        self._slide(row, self._lowest_owned(num_computed, prompt_tokens), lowest_resume, at_once=True)

    def _lowest_owned(self, num_processed: int, prompt_tokens: int) -> int:
        """The lowest position from which on the row must be able to go on, or a later prompt from the end of its own:
        inside the last block of that, too."""
        if not prompt_tokens or not self.num_blocks_more:
            return num_processed
        last_whole = prompt_tokens // self.page_tokens * self.page_tokens
        return max(0, min(num_processed, last_whole - self.num_blocks_more * self.page_tokens))

    def _lowest_resume(self, row: int, num_processed: int, num_computed: int) -> int:
        """The lowest position at which a prompt may resume that parts from the row's tokens inside the last block
        before their end, wherever the row will end: a block below the end of its last whole block. The row that has a
        decode in flight may end where it was before; one with a chunk in flight, at a whole block (see `roll_back`)."""
        if not self.num_blocks_more:
            return num_processed
        page_tokens = self.page_tokens
        has_pending_blocks = self._num_committed_at[row] * page_tokens > num_processed
        last_whole = (num_processed if has_pending_blocks else num_computed) // page_tokens * page_tokens
        return max(0, min(num_processed, last_whole) - self.num_blocks_more * page_tokens)

    def next_due(self, row: int) -> int:
        """The position that needs `grow` before it is computed."""
        return self._num_blocks_at[row] * self.page_tokens

    # Ending

    def end_step(self) -> None:
        """The step has run: its copies are done, its pending blocks have their contents, its step pages are nobody's,
        and pages that were given up while it was in flight are free.

        Where step pages were, the row has no pages now; `commit` it, then `slide` it past them."""
        for group, page in self.given_up:
            self.arena.free(group, page)
        self.given_up.clear()
        self.tree.end_pending()
        self.moves.clear()
        for row in {*self.step_blocks, *self.num_passing}:
            self._drop_step_pages(row)
        for row in list(self.copies):
            self._unlock_copy_sources(row)

    def roll_back(self, row: int, num_computed: int) -> int:
        """The step in preparation failed: forget the blocks it was to complete, and its copies.

        A partial block goes too. Returns how many tokens the row still has computed. All rows of the failed
        step must be rolled back or released: they may share pending blocks.
        """
        self._unlock_copy_sources(row)
        self._drop_step_pages(row)
        complete = num_computed // self.page_tokens
        for block in range(int(self.num_blocks[row]) - 1, complete - 1, -1):
            for group in range(self.num_groups):
                self._release_block(group, row, block)
        frontier = node = int(self.frontier[row])
        for _ in range(int(self.num_committed[row]) - complete):
            node = int(self.tree.parent[node])
        for group in range(self.num_groups):
            self._stamp(group, row)
        self.nodes[row, complete:] = NO_NODE
        self.num_blocks[row] = min(int(self.num_blocks[row]), complete)
        self.num_committed[row] = min(int(self.num_committed[row]), complete)
        self.frontier[row] = node
        self.tree.pin(node)
        self.tree.unpin(frontier)
        return complete * self.page_tokens

    def release(self, row: int, token_ids: np.ndarray, num_computed: int, *, keep: bool = True) -> None:
        """End of a request, for good or until it resumes: what it computed becomes cached (with `keep`),
        its last partial block included, and the row is empty.

        token_ids: int32 [>= num_computed].
        """
        if keep and self.enable_prefix_caching and not num_computed < self.replaying.get(row, 0):
            self.commit(row, token_ids, num_computed)
            complete = num_computed // self.page_tokens
            if num_computed % self.page_tokens:
                self._commit_block(row, complete, block_key(token_ids[complete * self.page_tokens : num_computed]))
            if num_computed:
                self._add_resume_point(row, int(self.num_committed[row]), since=num_computed)
        self._drop_row(row)

    def _drop_row(self, row: int) -> None:
        self._unlock_copy_sources(row)  # a copy that has not run must not, into a page that is no longer ours
        self._drop_step_pages(row)
        self._leave_nothing(row)
        num_blocks = int(self.num_blocks[row])
        # Last block first: an ancestor can go only after its descendants.
        for block in range(num_blocks - 1, -1, -1):
            for group in range(self.num_groups):
                self._release_block(group, row, block)
        frontier = int(self.frontier[row])
        self.frontier[row] = NO_NODE
        self.tree.unpin(frontier)
        self.nodes[row, :num_blocks] = NO_NODE
        self.first_kept[:, row] = self.first_left[:, row] = self.first_keys[:, row] = self.scratch_end[:, row] = 0
        self.replaying.pop(row, None)
        for group in range(self.num_groups):
            self._stamp(group, row)
        self.num_blocks[row] = self.num_committed[row] = self.num_settled[row] = 0
        self._junction[row] = self._prompt_tail[row] = -1

    # Reports

    def usage(self) -> dict[str, GroupUsage]:
        report = {}
        for index, group in enumerate(self.layout.groups):
            lent = self.arena.num_lent_slabs[index] * group.pages_per_slab
            used = self.arena.num_used[index]
            # A page that was given up is still in use as long as a step is in flight.
            owned = self.num_owned[index] + sum(one == index for one, _ in self.given_up)
            report[group.name] = GroupUsage(owned=owned, cached=used - owned, free=lent - used)
        return report

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running request uses. True: nothing cached is left."""
        while self.tree.evict_for_end() or self.tree.evict_one():
            pass
        return not any(self.usage()[group.name].cached for group in self.layout.groups)
