"""Prefixes that are never evicted: what was asked for, what of it is cached, and what that leaves for requests.

A pin is a standing order. It takes hold as soon as the cache has the whole prefix, so that a prompt can resume at its
end: at once, or when the next request has computed it. Until then the order makes its end a boundary of every prompt
that begins with it. A pin that holds keeps

    the last node of the prefix, and so all nodes before it with their full-attention pages
    the windowed pages that a resume at the prefix's end needs, and one block more

Pins never take what one request of the longest length needs. So whatever is pinned, every request can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lamella.errors import CapacityError, RequestError
from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.child_index import NO_NODE
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.prefix_match import PrefixMatch
from lamella.kv_cache.prefix_tree import PrefixTree, Salt
from lamella.kv_cache.resume_points import Page
from lamella.kv_cache.settings import CacheSettings
from lamella.kv_cache.sizing import request_pages, request_slabs
from lamella.kv_cache.spec import ceil_div


class PinnedPrefix(NamedTuple):
    """num_bytes: the most memory that the pin keeps, what it shares with earlier ones not counted. is_cached: whether
    it holds already; otherwise it will when the prefix has been computed."""

    name: str
    num_tokens: int
    num_bytes: int
    is_cached: bool


@dataclass(frozen=True, slots=True, eq=False)
class PinOrder:
    """token_ids: int32 [n], n >= 1, not to be written."""

    name: str
    token_ids: np.ndarray
    salt: Salt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def begins(self, token_ids: np.ndarray, salt: Salt) -> bool:
        """Whether a prompt of these tokens and this salt begins with the prefix."""
        length = self.num_tokens
        return (
            salt == self.salt
            and length <= len(token_ids)
            and token_ids[length - 1] == self.token_ids[-1]  # this alone decides for most
            and np.array_equal(token_ids[:length], self.token_ids)
        )


class PinHold(NamedTuple):
    """What a pin keeps in the tree: the path of the prefix, whose last node is pinned, and windowed pages."""

    path: list[int]
    pages: list[Page]


class PinnedPrefixes:
    """orders: by name, in the order in which they were given. holds: of those that hold.

    orders, to begin with: those of the object that this one replaces; none of them holds in the new tree.
    """

    def __init__(
        self, layout: KVLayout, settings: CacheSettings, tree: PrefixTree, orders: dict[str, PinOrder] | None = None
    ) -> None:
        self.orders: dict[str, PinOrder] = {} if orders is None else orders
        self.holds: dict[str, PinHold] = {}
        self._layout, self._settings, self._tree = layout, settings, tree
        self._nodes = self._held_nodes()

    @property
    def awaited(self) -> bool:
        """Whether there are pins that do not hold yet."""
        return len(self.holds) < len(self.orders)

    def awaited_ends(self, token_ids: np.ndarray, salt: Salt) -> list[int]:
        """Where prefixes end with which this prompt begins, of pins that do not hold yet."""
        waiting = (order for name, order in self.orders.items() if name not in self.holds)
        return [order.num_tokens for order in waiting if order.begins(token_ids, salt)]

    def improve(self, match: PrefixMatch, token_ids: np.ndarray, salt: Salt) -> PrefixMatch:
        """What the tree has of a prompt, or a pin that has more: blocks of other prompts, whose windows are gone, may
        hide one that ends inside a block. At least one token is left to compute."""
        page_tokens = self._layout.page_tokens
        for name, hold in self.holds.items():
            order = self.orders[name]
            if match.num_tokens < order.num_tokens < len(token_ids) and order.begins(token_ids, salt):
                num_whole = order.num_tokens // page_tokens
                tail_node = hold.path[-1] if order.num_tokens % page_tokens else NO_NODE
                path = hold.path[:num_whole]
                match = match._replace(num_tokens=order.num_tokens, path=path, tail_node=tail_node)
        return match

    def states(self) -> list[PinnedPrefix]:
        """All pins, in the order in which they were given."""
        found: list[PinnedPrefix] = []
        for index, order in enumerate(self.orders.values()):
            num_bytes = self._num_bytes(self._pages_beside(order, list(self.orders.values())[:index]))
            found.append(PinnedPrefix(order.name, order.num_tokens, num_bytes, order.name in self.holds))
        return found

    # Orders

    def order(self, order: PinOrder) -> PinnedPrefix:
        """Pin a prefix, now or as soon as it is computed. Raises RequestError for a name that is in use and where
        nothing is kept, CapacityError, with nothing changed, where it would leave too little memory for requests."""
        self.require_kept()
        if order.name in self.orders:
            raise RequestError(
                f"name={order.name!r} is that of a pinned prefix of {self.orders[order.name].num_tokens} tokens: unpin "
                "it first, or choose another name"
            )
        self._require_room(order)
        self.orders[order.name] = order
        self.settle()
        return self.states()[-1]

    def cancel(self, name: str) -> None:
        """Unpin a prefix. What is cached of it ages like any other from now on. Raises RequestError for a name that
        none has."""
        if name not in self.orders:
            known = ", ".join(map(repr, self.orders)) or "there are none"
            raise RequestError(f"name={name!r} is no pinned prefix: pinned are {known}")
        del self.orders[name]
        if name in self.holds:
            self._let_go(name, stays=True)

    def require_kept(self) -> None:
        """Raise RequestError where the settings keep no prefixes."""
        settings = self._settings
        if not settings.enable_prefix_caching:
            raise RequestError("enable_prefix_caching=False keeps no prefix: set it to True to pin or load one")
        if self._tree.windowed_groups and not settings.retention.keeps_ends:
            raise RequestError(
                f"retention={settings.retention.name!r} keeps no place to resume: use 'tails' or 'all' to pin or "
                "load a prefix"
            )

    def settle(self) -> None:
        """Let those pins take hold whose prefixes are cached by now."""
        for name, order in self.orders.items():
            if name not in self.holds:
                self._take_hold(order)

    def forget(self) -> None:
        """What is cached cannot be trusted any more: no pin holds, and all wait until they are computed anew."""
        for name in list(self.holds):
            self._let_go(name, stays=False)

    def _take_hold(self, order: PinOrder) -> None:
        tree, page_tokens, length = self._tree, self._layout.page_tokens, order.num_tokens
        match = tree.match(order.token_ids, order.salt, length)
        if match.num_tokens < length:
            return
        path = match.path if match.tail_node == NO_NODE else [*match.path, match.tail_node]
        if not tree.pending.isdisjoint(path):
            return  # the step that will compute it may fail
        pages = []
        for group in tree.windowed_groups:
            first = tree.specs[group].first_needed(max(0, length - page_tokens)) // page_tokens
            pages += [(group, node) for node in path[first:] if tree.page_at[group][node] != NULL_PAGE]
        tree.pin(path[-1])
        tree.hold(pages)
        self.holds[order.name] = PinHold(path, pages)
        self._nodes = self._held_nodes()

    def _let_go(self, name: str, *, stays: bool) -> None:
        tree = self._tree
        hold = self.holds.pop(name)
        self._nodes = self._held_nodes()
        node = hold.path[-1]
        if stays:
            tree.add_resume_point(node, list(dict.fromkeys([*hold.pages, *tree.resume_points.held(node)])))
        tree.unhold(hold.pages)
        tree.unpin(node)

    # Memory

    def num_unowned(self, match: PrefixMatch) -> list[int]:
        """Per group, how many pages pins keep that no row uses, and that a request which begins with `match` will not
        use as full-attention pages."""
        if not self.holds:
            return [0] * len(self._layout.groups)
        counts = []
        for group, nodes in enumerate(self._nodes):
            unowned = nodes[self._tree.refs[group, nodes] == 0]
            if not self._layout.groups[group].spec.is_windowed and len(match.path):
                unowned = unowned[~np.isin(unowned, match.path)]
            counts.append(len(unowned))
        return counts

    def reserved_pages(self) -> list[int]:
        """Per group, the most pages that all pins keep, those counted that wait to be computed."""
        pages = [0] * len(self._layout.groups)
        earlier: list[PinOrder] = []
        for order in self.orders.values():
            pages = [total + more for total, more in zip(pages, self._pages_beside(order, earlier), strict=True)]
            earlier.append(order)
        return pages

    def most_bytes(self) -> int:
        """The most bytes that pins may keep: as many as leave room for one request, or as the settings allow."""
        limit = self._settings.max_pinned_bytes
        if self._settings.slab_quota is None:
            room = self._num_slabs() * self._layout.slab_bytes
        else:
            room = self._num_bytes([max(0, count) for count in self._pool_pages()])
        return room if limit is None else min(limit, room)

    def _held_nodes(self) -> list[np.ndarray]:
        """Per group, the nodes whose pages pins keep, each once."""
        nodes: list[set[int]] = [set() for _ in self._layout.groups]
        for hold in self.holds.values():
            for group in self._tree.full_groups:
                nodes[group].update(hold.path)
            for group, node in hold.pages:
                nodes[group].add(node)
        return [np.array(sorted(one), dtype=np.int64) for one in nodes]

    def _pages_beside(self, order: PinOrder, others: Iterable[PinOrder]) -> list[int]:
        """Per group, the most pages that the pin keeps and that none of `others` keeps."""
        page_tokens, length = self._layout.page_tokens, order.num_tokens
        num_blocks = ceil_div(length, page_tokens)
        shared = max((_num_common(order, other) // page_tokens for other in others), default=0)
        lowest = max(0, length - page_tokens)
        return [
            num_blocks - (spec.first_needed(lowest) // page_tokens if spec.is_windowed else shared)
            for spec in self._tree.specs
        ]

    def _require_room(self, order: PinOrder) -> None:
        layout, settings = self._layout, self._settings
        more = self._pages_beside(order, self.orders.values())
        pages = [kept + one for kept, one in zip(self.reserved_pages(), more, strict=True)]
        num_bytes, most_bytes = self._num_bytes(pages), self.most_bytes()
        if settings.slab_quota is None:
            num_slabs = sum(
                ceil_div(count, group.pages_per_slab) for count, group in zip(pages, layout.groups, strict=True)
            )
            fits = num_slabs <= self._num_slabs()
        else:
            fits = all(count <= most for count, most in zip(pages, self._pool_pages(), strict=True))
        if fits and num_bytes <= most_bytes:
            return
        kept_bytes = num_bytes - self._num_bytes(more)
        raise CapacityError(
            f"a pinned prefix of {order.num_tokens} tokens takes {self._num_bytes(more)} bytes more, and pinned "
            f"prefixes keep {kept_bytes} of at most {most_bytes} bytes "
            f"(max_pinned_bytes={settings.max_pinned_bytes}; beside them one request of "
            f"max_model_len={settings.max_model_len} must fit into the KV memory): unpin some, pin a shorter one, "
            "give more memory, or lower max_model_len"
        )

    def _num_slabs(self) -> int:
        """Slabs that are left beside one request of the longest length, whose chunks may be as short as a page."""
        settings = self._settings
        needed = request_slabs(
            self._layout,
            max_model_len=settings.max_model_len,
            chunk_tokens=self._layout.page_tokens,
            interval_tokens=settings.interval_tokens,
            num_blocks_more=settings.num_blocks_more,
        )
        return max(0, settings.num_slabs - 1 - needed)

    def _pool_pages(self) -> list[int]:
        """In fixed pools, pages of each that are left beside one request of the longest length."""
        layout, settings = self._layout, self._settings
        assert settings.slab_quota is not None
        needed = request_pages(
            layout,
            max_model_len=settings.max_model_len,
            chunk_tokens=layout.page_tokens,
            interval_tokens=settings.interval_tokens,
            num_blocks_more=settings.num_blocks_more,
        )
        pools = zip(settings.slab_quota, layout.groups, needed, strict=True)
        return [slabs * group.pages_per_slab - count for slabs, group, count in pools]

    def _num_bytes(self, pages: Iterable[int]) -> int:
        return sum(count * group.page_bytes for count, group in zip(pages, self._layout.groups, strict=True))


def _num_common(one: PinOrder, other: PinOrder) -> int:
    """How many first tokens two prefixes have in common; 0 under different salts."""
    if one.salt != other.salt:
        return 0
    length = min(one.num_tokens, other.num_tokens)
    differs = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    return int(differs[0]) if len(differs) else length
