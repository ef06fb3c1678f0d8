"""Checks that the KV bookkeeping agrees with itself, from first principles.

Ownership is recounted by walking the rows; nothing here trusts a counter that it checks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import numpy as np

from lamella.errors import InvariantError
from lamella.kv_cache.arena import FREE, NULL_PAGE
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.inspection import Inspection
from lamella.kv_cache.layout import KVGroup, KVLayout


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def check(manager: BlockManager, num_computed: Mapping[int, int] | None = None) -> None:
    """Raise InvariantError at the first contradiction.

    num_computed: between two steps, how many tokens each row has computed, without drafts that were rejected; None: not
    known. No row has entered a block in the tree that ends beyond that.

    Checked: every page is in exactly one of free / cached / owned; reference and hold counts equal what
    rows, planned copies and resume points name; planned copies go into pages of their rows; tree and tables agree
    both ways; nodes exist for a reason; what a row needs to go on is live; pinned prefixes are whole and keep no more
    than they may; slabs hold pages of their own group only; step pages are where the rows say, and no two of them
    overlap.
    """
    parts = manager.inspect()
    tree_nodes = set(parts.tree.nodes())
    refs, private = _walk_rows(parts, tree_nodes)
    for row, position in (num_computed or {}).items():
        end = int(parts.rows.num_committed[row]) * manager.layout.page_tokens
        _require(
            end <= max(position, parts.rows.replay_end.get(row, 0)),
            f"row {row} has computed {position} tokens, but the tree has its blocks up to {end}",
        )
    _check_step_pages(parts, manager.layout)
    _check_tree(parts, tree_nodes, refs)
    _check_pins(parts, manager.layout)
    for group, spec in enumerate(manager.layout.groups):
        _check_pages(parts, group, spec, manager.layout.slab_units, tree_nodes, private[group])


def _walk_rows(parts: Inspection, tree_nodes: set[int]) -> tuple[Counter[tuple[int, int]], list[list[int]]]:
    """References per (group, node), and the private pages of each group, as the rows name them."""
    rows, tree = parts.rows, parts.tree
    refs: Counter[tuple[int, int]] = Counter()
    private: list[list[int]] = [[] for _ in range(parts.rows.num_groups)]
    pins: Counter[int] = Counter()
    for row in range(len(rows.frontier)):
        num_blocks = int(rows.num_blocks[row])
        num_committed = int(rows.num_committed[row])
        frontier = int(rows.frontier[row])
        beyond = rows.pages[:, row, num_blocks:]
        _require((beyond == NULL_PAGE).all(), f"row {row}: a page beyond its {num_blocks} blocks")
        if frontier == NO_NODE:
            _require(num_blocks == 0 and num_committed == 0, f"row {row} is empty but has blocks")
            continue
        pins[frontier] += 1
        _require(num_committed <= num_blocks, f"row {row}: more blocks committed than grown")
        committed = rows.nodes[row, :num_committed]
        _require((rows.nodes[row, num_committed:] == NO_NODE).all(), f"row {row}: node beyond the frontier")
        _require(
            frontier == (committed[-1] if num_committed else frontier),
            f"row {row}: the frontier is not its last committed block",
        )
        _require(
            all(int(tree.parent[child]) == int(parent) for parent, child in itertools.pairwise(committed)),
            f"row {row}: its nodes are no path",
        )
        for group in range(parts.rows.num_groups):
            first_kept = int(rows.first_kept[group, row])
            for block, page in enumerate(rows.pages[group, row, :num_blocks].tolist()):
                node = int(rows.nodes[row, block])
                _require(
                    (page == NULL_PAGE) == (block < first_kept),
                    f"row {row} group {group} block {block}: page {page}, but first kept block is {first_kept}",
                )
                if page == NULL_PAGE or parts.step_pages.holds(page):
                    continue
                if node == NO_NODE or block < rows.scratch_end[group, row]:
                    private[group].append(page)
                else:
                    _require(int(tree.page[group, node]) == page, f"row {row}: table and tree differ at block {block}")
                    refs[group, node] += 1
    for row, copies in parts.supply.copies.items():
        for group, source, target in copies:
            refs[group, source] += 1
            _require(
                target in rows.pages[group, row].tolist(),
                f"row {row} group {group}: a copy is planned into page {target}, which the row does not have",
            )
    pins.update(hold.path[-1] for hold in parts.pins.holds.values())
    for node in tree_nodes | set(tree.roots().values()):
        _require(
            int(tree.pins[node]) == pins[node],
            f"node {node}: {tree.pins[node]} pins, {pins[node]} frontiers and ends of pinned prefixes",
        )
    return refs, private


def _check_step_pages(parts: Inspection, layout: KVLayout) -> None:
    rows, region = parts.rows, parts.step_pages
    first_unit = parts.arena.num_slabs * layout.slab_units
    end_unit = first_unit + region.num_bytes // layout.unit_bytes
    found = [
        (group, row, block, page)
        for group, row, block in np.argwhere(rows.pages >= region.first_page).tolist()
        if (page := int(rows.pages[group, row, block])) != NULL_PAGE
    ]
    named = {
        (group, row, block)
        for row, spans in parts.chunks.step_blocks.items()
        for group, first, last in spans
        for block in range(first, last)
    }
    _require({one[:3] for one in found} == named, "the step pages in the tables are not those that rows have")
    for group, _, block, page in found:
        spec = layout.groups[group]
        _require(spec.spec.is_windowed, f"block {block} of {spec.name} has a step page, but its KV is needed later")
        _require(
            first_unit <= page and page + spec.page_units <= end_unit,
            f"step page {page} of {spec.name} is outside of units {first_unit} to {end_unit}",
        )
    for group, spec in enumerate(layout.groups):
        pages = sorted(page for owner, _, _, page in found if owner == group)
        distance = spec.page_units // len(spec.layers)
        _require(
            all(after - before >= distance for before, after in itertools.pairwise(pages)),
            f"step pages of {spec.name} overlap: {pages}",
        )


def _check_tree(parts: Inspection, tree_nodes: set[int], refs: Counter[tuple[int, int]]) -> None:
    rows, tree = parts.rows, parts.tree
    holds: Counter[tuple[int, int]] = Counter()
    for node in tree.resume_points:
        _require(node in tree_nodes, f"resume point at node {node}, which is gone")
        holds.update(tree.resume_points.held(node))
    for hold in parts.pins.holds.values():
        holds.update(hold.pages)
    _require(all(node in tree_nodes for _, node in tree.spare), "a spare page of a node that is gone")
    ends = Counter(
        (group, int(node))
        for group, row in np.argwhere(rows.first_left < rows.first_kept).tolist()
        for node in rows.nodes[row, rows.first_left[group, row] : rows.first_kept[group, row]]
    )
    _require(all(node in tree_nodes for _, node in [*tree.for_ends, *ends]), "an end wants what is gone")
    for node in tree.expected:
        _require(node in tree.resume_points, f"node {node} is expected, but no resume point")
    _require(tree.knows_what_to_evict(), "a resume point is set aside, though without it a page would be free")
    _require(tree.knows_its_sources(), "a node with siblings is taken for a source of copies, or for none, wrongly")
    children = Counter(int(tree.parent[node]) for node in tree_nodes)
    roots = set(tree.roots().values())
    for node in tree_nodes:
        _require(int(tree.parent[node]) in tree_nodes | roots, f"node {node} has lost its parent")
        _require(int(tree.num_children[node]) == children[node], f"node {node}: wrong number of children")
        used = any(refs[group, node] for group in range(parts.rows.num_groups))
        _require(
            children[node] or node in tree.resume_points or tree.pins[node] or used,
            f"node {node} has no reason to exist",
        )
        for group, spec in enumerate(tree.specs):
            page = int(tree.page[group, node])
            count = refs[group, node]
            _require(int(tree.refs[group, node]) == count, f"group {group} node {node}: reference count is wrong")
            _require(int(tree.holds[group, node]) == holds[group, node], f"group {group} node {node}: hold count")
            _require(page != NULL_PAGE or not (count or holds[group, node]), f"node {node} is used but has no page")
            if spec.is_windowed:
                kept = count or holds[group, node]
                is_spare, is_for_end = (group, node) in tree.spare, (group, node) in tree.for_ends
                num_ends, is_unkept = ends[group, node], page != NULL_PAGE and not kept
                _require(int(tree.ends[group, node]) == num_ends, f"group {group} node {node}: ends that want it")
                _require(is_for_end == (is_unkept and num_ends > 0), f"node {node}: whether its page is for an end")
                _require(not is_unkept or is_spare or is_for_end, f"node {node}: a page nobody keeps")
                _require(not (is_spare and is_for_end), f"node {node}: its page is spare and for an end")
                _require(not is_spare or (page != NULL_PAGE and not kept), f"node {node}: its page is not spare")
                _require(
                    not count or all(tree.refs[full, node] for full in tree.full_groups),
                    f"node {node}: a window reference without a full one",
                )
            else:
                _require(page != NULL_PAGE, f"node {node} has no full-attention page")


def _check_pins(parts: Inspection, layout: KVLayout) -> None:
    """Every pin that holds is found whole, and all keep no more than is reserved and allowed."""
    tree, pins = parts.tree, parts.pins
    _require(set(pins.holds) <= set(pins.orders), "a prefix is kept that is not pinned")
    kept: set[tuple[int, int]] = set()
    for name, hold in pins.holds.items():
        order = pins.orders[name]
        found = tree.match(order.token_ids, order.salt, order.num_tokens).num_tokens
        _require(
            found == order.num_tokens, f"of the pinned prefix {name!r} {found} of {order.num_tokens} tokens are there"
        )
        kept.update((group, node) for group in tree.full_groups for node in hold.path)
        kept.update(hold.pages)
    counts = Counter(group for group, _ in kept)
    reserved = pins.reserved_pages()
    num_bytes = sum(count * group.page_bytes for count, group in zip(reserved, layout.groups, strict=True))
    _require(num_bytes <= pins.most_bytes(), f"{num_bytes} bytes are reserved for pins, of {pins.most_bytes()}")
    _require(
        all(counts[group] <= count for group, count in enumerate(reserved)),
        f"pins keep {dict(counts)} pages, where {reserved} are reserved",
    )


def _check_pages(
    parts: Inspection, group: int, spec: KVGroup, slab_units: int, tree_nodes: set[int], private: list[int]
) -> None:
    arena, tree, name = parts.arena, parts.tree, spec.name
    in_tree = [int(tree.page[group, node]) for node in tree_nodes if tree.page[group, node] != NULL_PAGE]
    referenced = [int(tree.page[group, node]) for node in tree_nodes if tree.refs[group, node]]
    free = arena.free_pages_of(group)
    given_up = [page for owner, page in parts.supply.given_up if owner == group]
    _require(parts.supply.in_flight or not given_up, f"{name}: pages are held back for a step, and none is in flight")
    used = in_tree + private + given_up
    _require(len(set(used)) == len(used), f"{name}: a page is used twice")
    _require(not free.intersection(used), f"{name}: a page is both free and used")
    _require(arena.num_used[group] == len(used), f"{name}: {arena.num_used[group]} pages counted, {len(used)} found")
    _require(
        parts.supply.num_owned[group] == len(private) + len(referenced), f"{name}: the count of owned pages is wrong"
    )
    lent = np.flatnonzero(arena.slab_group == group)
    every = {int(slab) * slab_units + index * spec.page_units for slab in lent for index in range(spec.pages_per_slab)}
    _require(every == free.union(used), f"{name}: pages and lent slabs do not match")
    num_free_slabs = int((arena.slab_group == FREE).sum())
    _require(arena.num_free_slabs == num_free_slabs, "the list of free slabs is wrong")
