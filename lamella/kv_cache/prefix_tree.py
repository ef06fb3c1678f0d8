"""The prefix tree: which blocks of tokens have KV in the cache, per group.

A node is one block. It is found by (parent node, its token ids), so a match is one dictionary
look-up per block and exact: no hash can collide, and requests under different salts start at
different roots and never meet. A node lacks a group's page where that page was dropped; without
the page of a windowed group it is a *tombstone*.

What keeps things alive:

    full-attention page   its node exists
    windowed page         a request references it, or a resume point or a pinned prefix holds it
    node                  it has a child, a resume point, a reference, or a pin: a row goes on there, or a prefix that
                          is never evicted ends there

A *resume point* sits at the end of a node and holds the windowed pages that a request needs to start
there. Resume points are what ages and is evicted, always with all their pages, because part of a window is
of no use. When a node's last reason to exist goes, the node goes with its pages, and so do the ancestors
that only led to it.

With `keep_spare`, a windowed page that loses its last reference or hold is *spare*: it stays in the tree and is
the first to go when memory is wanted. So idle memory serves prefixes that no resume point covers. A page that the
end of a running request will want is *for an end* instead, with `keep_spare` or without. Such pages are taken by
`evict_for_end`, to be called when no page is spare and before any resume point is evicted.

Resume points that are *favoured*, since the application said that prompts part there, go after others. Resume points
that waiting requests *expect* to start from go after all; of these, the one whose request will run last goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE, ChildIndex
from lamella.kv_cache.prefix_match import NO_MATCH, PrefixMatch, longest_resume
from lamella.kv_cache.resume_points import Page, ResumePoints
from lamella.kv_cache.spec import KVCacheSpec

Salt = str | None


class PrefixTree:
    """Nodes are rows of arrays: a node is its index. Calls `free_page(group, page)` for each page that is let go."""

    def __init__(
        self,
        specs: tuple[KVCacheSpec, ...],
        *,
        page_tokens: int,
        free_page: Callable[[int, int], None],
        keep_spare: bool = False,
    ) -> None:
        self.specs = specs
        self.page_tokens = page_tokens
        self.keep_spare = keep_spare
        self._free_page = free_page
        self.full_groups = [group for group, spec in enumerate(specs) if not spec.is_windowed]
        self.windowed_groups = [group for group, spec in enumerate(specs) if spec.is_windowed]
        self._is_windowed = [spec.is_windowed for spec in specs]
        self.num_tombstones = 0
        self.num_evicted_resume_points = self.num_evicted_spare_pages = self.num_dead_full_pages = 0
        self._allocate_rows(256)
        self._free_nodes: list[int] = []
        self._num_rows = 0
        self._roots: dict[Salt, int] = {}
        self._salt_of: dict[int, Salt] = {}
        self._index = ChildIndex(self._is_source)
        # Nodes whose contents a planned step has yet to compute: whole blocks are shared, nothing is copied from them.
        self.pending: set[int] = set()
        self.resume_points = ResumePoints()
        self.expected = self.resume_points.expected
        self.spare: OrderedDict[Page, None] = OrderedDict()  # oldest first
        self.for_ends: OrderedDict[Page, None] = OrderedDict()  # oldest first

    def continue_totals(self, before: PrefixTree) -> None:
        """Go on with the totals of `before`, the tree that this one replaces."""
        self.num_tombstones = before.num_tombstones
        self.num_evicted_resume_points = before.num_evicted_resume_points
        self.num_evicted_spare_pages = before.num_evicted_spare_pages
        self.num_dead_full_pages = before.num_dead_full_pages

    def _allocate_rows(self, capacity: int) -> None:
        num_groups = len(self.specs)
        self.parent = np.full(capacity, NO_NODE, dtype=np.int64)
        self.end = np.zeros(capacity, dtype=np.int64)  # position after the node's last token
        self.num_children = np.zeros(capacity, dtype=np.int64)
        self.pins = np.zeros(capacity, dtype=np.int64)
        self.page = np.full((num_groups, capacity), NULL_PAGE, dtype=np.int64)
        self.refs = np.zeros((num_groups, capacity), dtype=np.int64)
        self.holds = np.zeros((num_groups, capacity), dtype=np.int64)
        self.ends = np.zeros((num_groups, capacity), dtype=np.int64)  # running requests whose end will want the page
        # Views of the same memory whose items are plain ints: reading one is several times faster than from an array.
        self._parent_at, self._end_at = self.parent.data, self.end.data
        self._num_children_at, self._pins_at = self.num_children.data, self.pins.data
        self.page_at = [row.data for row in self.page]
        self.refs_at = [row.data for row in self.refs]
        self._holds_at = [row.data for row in self.holds]
        self._ends_at = [row.data for row in self.ends]

    def _grow_rows(self) -> None:
        old = (self.parent, self.end, self.num_children, self.pins, self.page, self.refs, self.holds, self.ends)
        capacity = len(self.parent)
        self._allocate_rows(2 * capacity)
        new = (self.parent, self.end, self.num_children, self.pins, self.page, self.refs, self.holds, self.ends)
        for source, target in zip(old, new, strict=True):
            target[..., :capacity] = source

    # Finding

    def root(self, salt: Salt) -> int:
        """The root of the salt's prompts, made if there is none. Without a child or a pin it goes when it is pruned."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = self._new_row()
            self._salt_of[node] = salt
        return node

    def child(self, parent: int, tokens: bytes) -> int:
        """The node for a block (its int32 token ids as bytes) under `parent`, or NO_NODE."""
        return self._index.child(parent, tokens)

    def end_of(self, node: int) -> int:
        """The position after the node's last token."""
        return self._end_at[node]

    def nodes(self) -> Iterator[int]:
        """All nodes but the roots."""
        return iter(self._index)

    def roots(self) -> dict[Salt, int]:
        """The root of each salt. Not to be changed."""
        return self._roots

    def match(self, token_ids: np.ndarray, salt: Salt, max_tokens: int) -> PrefixMatch:
        """The longest resume point of at most `max_tokens` tokens. Changes nothing.

        token_ids: int32 [n].
        """
        if salt not in self._roots:
            return NO_MATCH
        page_tokens = self.page_tokens
        raw = token_ids.astype(np.int32, copy=False).tobytes()
        block_bytes = 4 * page_tokens
        node = self._roots[salt]
        path: list[int] = []
        for start in range(0, len(raw) - block_bytes + 1, block_bytes):
            following = self._index.child(node, raw[start : start + block_bytes])
            if following == NO_NODE:
                break
            path.append(following)
            node = following
        num_blocks, whole_tokens = len(path), len(path) * page_tokens
        rest = raw[num_blocks * block_bytes : (num_blocks + 1) * block_bytes]
        closest = self._index.closest(node, rest, max_tokens - whole_tokens)
        structural = whole_tokens + closest.num_common
        # If the windows before the closest child are not whole, no other child is tried: it shares less, and the
        # earlier in the block a resume is, the more of the blocks before it needs.
        num_tokens = whole_tokens + closest.num_usable
        if closest.source != NO_NODE and self._has_windows(path, num_tokens):
            return PrefixMatch(num_tokens, path, closest.source, structural, path)
        limit = min(whole_tokens, max_tokens)
        if limit % page_tokens and path[limit // page_tokens] in self.pending:
            limit -= limit % page_tokens
        num_tokens = self._longest_resume(path, limit)
        num_blocks = num_tokens // page_tokens
        tail_node = path[num_blocks] if num_tokens % page_tokens else NO_NODE
        return PrefixMatch(num_tokens, path[:num_blocks], tail_node, structural, path)

    def _has_windows(self, path: list[int], position: int) -> bool:
        """Whether the blocks of `path` have the windowed pages that a resume at `position` needs, which is in the block
        after them."""
        for group in self.windowed_groups:
            pages = self.page_at[group]
            first = self.specs[group].first_needed(position) // self.page_tokens
            if any(pages[node] == NULL_PAGE for node in path[first:]):
                return False
        return True

    def knows_its_sources(self) -> bool:
        """Whether the index notes rightly, of each node with siblings, if copies may be taken of it. For checks."""
        noted = ((node, self._index.is_noted_source(node)) for node in self._index)
        return all(is_source in (None, self._is_source(node)) for node, is_source in noted)

    def knows_what_to_evict(self) -> bool:
        """Whether every resume point that is set aside is so rightly: letting it go would free nothing. For checks."""
        return not any(
            self.resume_points.is_set_aside(node) and self._keeps_memory(node) for node in self.resume_points
        )

    def _is_source(self, node: int) -> bool:
        """Whether a prompt that shares a part of the node's block may copy that part."""
        return node not in self.pending and all(
            self.page_at[group][node] != NULL_PAGE for group in self.windowed_groups
        )

    def _longest_resume(self, nodes: list[int], limit: int) -> int:
        """The last position up to `limit` where a prompt that begins with the blocks `nodes` can resume."""
        if not nodes:
            return limit
        live = [(self.specs[group], self.page[group, nodes] != NULL_PAGE) for group in self.windowed_groups]
        return longest_resume(live, limit, self.page_tokens)

    # Building

    def insert(self, parent: int, tokens: bytes, *, is_pending: bool = False) -> int:
        """A new node under `parent`, without pages. The caller gives it pages, references or a pin at once.
        is_pending: the step in preparation will compute its contents."""
        node = self._new_row()
        if is_pending:
            self.pending.add(node)
        self._parent_at[node] = parent
        self._end_at[node] = self._end_at[parent] + len(tokens) // 4
        self._num_children_at[parent] += 1
        self._index.add(parent, tokens, node)
        return node

    def insert_chain(self, parent: int, blocks: list[bytes]) -> np.ndarray:
        """`insert` each of `blocks` (at least one, all whole) under the one before, in a fraction of the time. Returns
        the nodes, int64 [len(blocks)].

        `parent` has no child for the first block. The caller gives them pages (`fill_chain`), references and a pin at
        once.
        """
        nodes = self._new_rows(len(blocks))
        rows = np.array(nodes, dtype=np.int64)
        self._index.add_chain(parent, blocks, nodes)
        self.num_children[parent] += 1
        self.num_children[rows[:-1]] = 1
        self.parent[rows[0]] = parent
        self.parent[rows[1:]] = rows[:-1]
        self.end[rows] = self.end[parent] + self.page_tokens * np.arange(1, len(blocks) + 1)
        return rows

    def _new_row(self) -> int:
        if self._free_nodes:
            return self._free_nodes.pop()
        if self._num_rows == len(self.parent):
            self._grow_rows()
        self._num_rows += 1
        return self._num_rows - 1

    def _new_rows(self, count: int) -> list[int]:
        rows = self._free_nodes[-count:]
        del self._free_nodes[-count:]
        num_more = count - len(rows)
        while self._num_rows + num_more > len(self.parent):
            self._grow_rows()
        rows += range(self._num_rows, self._num_rows + num_more)
        self._num_rows += num_more
        return rows

    def fill_chain(self, nodes: np.ndarray, pages: np.ndarray, *, is_pending: bool) -> None:
        """Give new nodes (int64 [n], from `insert_chain`) their pages (int64 [num_groups, n], NULL_PAGE for none), each
        with a reference. is_pending: the step in preparation will compute their contents."""
        if is_pending:
            self.pending.update(nodes.tolist())
        self.page[:, nodes] = pages
        self.refs[:, nodes] = pages != NULL_PAGE
        self._index.note_source(int(nodes[0]))

    def give_page(self, group: int, node: int, page: int) -> None:
        """Give the node the page of `group` that it lacks, with a reference, which is the caller's."""
        assert self.page_at[group][node] == NULL_PAGE, "a page would be lost"
        self.page_at[group][node] = page
        self.refs_at[group][node] = 1
        if self._is_windowed[group]:
            self._index.note_source(node)

    def end_pending(self) -> None:
        """No node is pending any more: what the step was to compute is there, or the nodes are gone."""
        if self.pending:
            nodes = self.pending
            self.pending = set()
            self._index.note_sources(nodes)

    # References

    def lock(self, group: int, node: int) -> int:
        """Add a reference to the node's page of `group` and return the page, which must exist."""
        page = self.page_at[group][node]
        assert page != NULL_PAGE, "only a live page can be locked"
        refs = self.refs_at[group]
        if not refs[node]:
            self._note_kept((group, node))
        refs[node] += 1
        return page

    def unlock(self, group: int, node: int) -> None:
        """Drop one reference. A windowed page that nothing else keeps is freed; so is a node."""
        refs = self.refs_at[group]
        left = refs[node] - 1
        assert left >= 0, "unlock without lock"
        refs[node] = left
        if not left:
            self._release_window_page(group, node)
            self.resume_points.note_unused_page((group, node))
            if not self._num_children_at[node]:
                self.prune(node)

    def pin(self, node: int) -> None:
        """Keep the node: a request will add its next block there, or a pinned prefix ends there."""
        self._pins_at[node] += 1

    def unpin(self, node: int) -> None:
        """Undo one `pin`. The node goes if nothing else keeps it."""
        self._pins_at[node] -= 1
        assert self._pins_at[node] >= 0, "unpin without pin"
        if not self._num_children_at[node]:
            self.prune(node)

    def hold(self, window_nodes: Iterable[Page]) -> None:
        """Keep live windowed pages, each (group, node), beside what requests and resume points keep."""
        for group, node in window_nodes:
            assert self.page_at[group][node] != NULL_PAGE, "only a live page can be held"
            self._holds_at[group][node] += 1
            self._note_kept((group, node))

    def unhold(self, window_nodes: list[Page]) -> None:
        """Undo one `hold`. A page that nothing else keeps is spare, or free."""
        self._let_go(window_nodes)

    def want_for_end(self, group: int, wanted: Iterable[int], unwanted: Iterable[int] = ()) -> None:
        """Count for each node of `wanted` one more running request whose end will want its page of `group`, a windowed
        one, if it is still there; for each of `unwanted` one less. Each of those was wanted before: now the request has
        ended, or its end lies too far on."""
        ends, refs = self._ends_at[group], self.refs_at[group]
        for node in wanted:
            ends[node] += 1
            if not refs[node] and (group, node) in self.spare:
                del self.spare[group, node]
                self.for_ends[group, node] = None
        for node in unwanted:
            left = ends[node] - 1
            ends[node] = left
            if not left and (group, node) in self.for_ends:
                del self.for_ends[group, node]
                self._spare_window_page(group, node)

    def _note_kept(self, page: Page) -> None:
        self.spare.pop(page, None)
        self.for_ends.pop(page, None)

    def _release_window_page(self, group: int, node: int) -> None:
        """If nothing keeps the windowed page any more, make it one for an end, or spare, or free."""
        if self._is_windowed[group] and not self.refs_at[group][node] and not self._holds_at[group][node]:
            if self.page_at[group][node] == NULL_PAGE:
                return
            if self._ends_at[group][node]:
                self.for_ends[group, node] = None
            else:
                self._spare_window_page(group, node)

    def _spare_window_page(self, group: int, node: int) -> None:
        """Make a windowed page that nothing keeps and no end wants spare, or free."""
        if self.keep_spare and node not in self.pending:
            self.spare[group, node] = None
        else:
            self._drop_window_page(group, node)

    def _drop_window_page(self, group: int, node: int) -> None:
        page = self.page_at[group][node]
        self.page_at[group][node] = NULL_PAGE
        self.num_tombstones += 1
        self._free_page(group, page)
        self._index.note_source(node)

    def prune(self, node: int) -> None:
        """Remove the node if it has no reason to exist, then its ancestors likewise."""
        if self._num_children_at[node]:
            return
        while self._parent_at[node] != NO_NODE and not self._is_used(node):  # a root has none
            if node in self.resume_points:
                self.resume_points.note_unused(node)
                return
            for group, pages in enumerate(self.page_at):
                page = pages[node]
                if page != NULL_PAGE:
                    pages[node] = NULL_PAGE
                    self._note_kept((group, node))
                    self.num_dead_full_pages += not self._is_windowed[group]
                    self._free_page(group, page)
            parent = self._index.remove(node)
            self.pending.discard(node)
            self._num_children_at[parent] -= 1
            self._recycle(node)
            node = parent
        if node in self._salt_of and not (self._num_children_at[node] or self._pins_at[node]):
            del self._roots[self._salt_of.pop(node)]
            self._recycle(node)

    def _is_used(self, node: int) -> bool:
        """Whether the node is kept by a child, by a row that goes on there, or by a reference."""
        if self._num_children_at[node] or self._pins_at[node]:
            return True
        # A loop, because this is asked often and `any` takes twice as long.
        for refs in self.refs_at:  # noqa: SIM110
            if refs[node]:
                return True
        return False

    def _recycle(self, node: int) -> None:
        self._parent_at[node] = NO_NODE
        self._end_at[node] = 0
        self._free_nodes.append(node)

    # Resume points

    def add_resume_point(self, node: int, window_nodes: list[Page]) -> None:
        """Make the end of `node` a place to resume that holds the live pages `window_nodes`, each (group, node).

        It replaces one that was there and becomes the most recently used.
        """
        self.hold(window_nodes)
        self._let_go(self.resume_points.replace(node, window_nodes))

    def drop_resume_point(self, node: int) -> None:
        """Give up the resume point at `node`, if there is one, it is not favoured and no waiting request expects it."""
        if node in self.resume_points and not (node in self.expected or self.resume_points.is_favoured(node)):
            self._let_go(self.resume_points.pop(node))
            self.prune(node)

    def favour(self, node: int) -> None:
        """Let the resume point at `node`, if there is one, outlast those that are not favoured."""
        self.resume_points.favour(node)

    def touch(self, node: int) -> None:
        """The resume point at `node`, if there is one, was used now."""
        self.resume_points.touch(node)

    def pass_by(self, path: list[int]) -> None:
        """A prompt led on through each node of `path`, and a later place of it is kept. So the resume points on the
        path from which nothing else leads on become the first to go."""
        for node in path:
            if self._num_children_at[node] == 1:
                self.resume_points.pass_by(node)

    def pass_by_short_blocks(self, parent: int, block: bytes) -> None:
        """A whole block (token ids as bytes) under `parent` is kept. So the resume points at shorter blocks that it
        begins with become the first to go."""
        for node in self._index.beginnings(parent, block):
            self.resume_points.pass_by(node)

    # Eviction

    def strip_one(self, can_be_replayed: Callable[[int], bool]) -> bool:
        """Let go a spare page. Where there is none, take the resume point that is worth least of those with a window
        page that nobody uses: if its windows can be replayed it loses only these, else it is evicted. False: there was
        nothing to let go.

        can_be_replayed: told how many tokens lie before a resume point."""
        if self.spare:
            return self.evict_one()
        points = self.resume_points
        while (node := points.first_with_windows()) != NO_NODE:
            if not self._has_unused_page(points.held(node)):
                points.set_windows_aside(node)
                continue
            if can_be_replayed(self._end_at[node]):
                self._let_go(points.strip(node), spare=False)
                self.num_evicted_resume_points += 1
            else:
                self._evict(node)
            return True
        return False

    def evict_for_end(self) -> bool:
        """Let go the page that has been for an end the longest. False: there is none."""
        if not self.for_ends:
            return False
        (group, node), _ = self.for_ends.popitem(last=False)
        self._drop_window_page(group, node)
        self.num_evicted_spare_pages += 1
        return True

    def evict_one(self) -> bool:
        """Let go the oldest spare page or, where there is none, the resume point that is worth least. False: nothing
        can be let go that would free memory.

        The order of resume points: those that were passed, then the least recently used, then those that are favoured,
        at last those that are expected. Without windowed groups every block end is a place to resume. So there only the
        last block goes: its parent becomes a resume point, and the next to go.
        """
        if self.spare:
            (group, node), _ = self.spare.popitem(last=False)
            self._drop_window_page(group, node)
            self.num_evicted_spare_pages += 1
            return True
        points = self.resume_points
        while (node := points.first()) != NO_NODE:
            if self._keeps_memory(node):
                self._evict(node)
                return True
            points.set_aside(node)
        return False

    def _evict(self, chosen: int) -> None:
        held = self.resume_points.pop(chosen)
        parent = self._parent_at[chosen]
        if not self.windowed_groups and parent in self._index and parent not in self.resume_points:
            self.resume_points.put(parent, [])
            self.resume_points.pass_by(parent)
        self._let_go(held, spare=False)
        self.prune(chosen)
        self.num_evicted_resume_points += 1

    def _keeps_memory(self, node: int) -> bool:
        """Whether the resume point, alone or together with others, keeps a page that nobody uses from being free."""
        return not self._is_used(node) or self._has_unused_page(self.resume_points.held(node))

    def _has_unused_page(self, held: list[Page]) -> bool:
        return any(not self.refs_at[group][node] for group, node in held)

    def _let_go(self, held: list[Page], *, spare: bool = True) -> None:
        for group, node in held:
            holds = self._holds_at[group]
            holds[node] -= 1
            if spare:
                self._release_window_page(group, node)
            elif not self.refs_at[group][node] and not holds[node]:
                if self._ends_at[group][node]:
                    self.for_ends[group, node] = None
                else:
                    self._drop_window_page(group, node)
