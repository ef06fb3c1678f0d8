"""Which pages are in use, and by which group. Slabs are lent to groups; pages of a slab are handed out one by one.

Slab 0 is never lent: it is the null range, zeros that a kernel may read in place of a page that a
request does not have. On the host the null page is NULL_PAGE.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lamella.errors import ConfigError
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_transfers import PageMoves

NULL_PAGE = -1
FREE = -1
RESERVED = -2


class Arena:
    """Page allocator over `num_slabs` slabs, the null slab included.

    Page ids are in units: page k of slab s in group g is s * slab_units + k * page_units[g].
    slab_quota: most slabs that each group may hold; None: slabs go to whoever needs them. Quotas sum to at most
    num_slabs - 1, so what one group holds never limits another: slabs do not move between groups.
    Invariant: a slab is either free, or lent to one group with at least one page in use.
    Raises ConfigError for quotas that do not fit the layout or the arena.
    """

    def __init__(self, layout: KVLayout, num_slabs: int, *, slab_quota: tuple[int, ...] | None = None) -> None:
        self.layout = layout
        self.num_slabs = num_slabs
        num_groups = len(layout.groups)
        if slab_quota is not None:
            _check_quota(slab_quota, num_groups, num_slabs)
        self.slab_quota = slab_quota
        self._is_windowed = [group.spec.is_windowed for group in layout.groups]
        self._pages_per_slab = [group.pages_per_slab for group in layout.groups]
        self.num_lent_slabs = [0] * num_groups
        self.slab_group = np.full(num_slabs, FREE, dtype=np.int16)
        self.slab_group[0] = RESERVED
        self._slab_group_at = self.slab_group.data  # a view of the same memory whose items are plain ints
        self.num_used = [0] * num_groups
        self._free_slabs = list(range(num_slabs - 1, 0, -1))
        self._free_pages: dict[int, list[int]] = {}  # lent slab -> its free page ids
        # Per group: number of free pages in a slab -> the slabs that have so many. Full slabs are in none.
        self._partial: list[dict[int, dict[int, None]]] = [{} for _ in range(num_groups)]
        self._num_partial_pages = [0] * num_groups

    @property
    def num_free_slabs(self) -> int:
        return len(self._free_slabs)

    def num_lendable_slabs(self, group: int) -> int:
        """Free slabs that `group` may still take."""
        if self.slab_quota is None:
            return len(self._free_slabs)
        return self.slab_quota[group] - self.num_lent_slabs[group]

    def num_allocatable(self, group: int) -> int:
        """Pages that `group` could take now."""
        return self._num_partial_pages[group] + self.num_lendable_slabs(group) * self._pages_per_slab[group]

    def allocate(self, group: int, count: int, near_page: int = NULL_PAGE) -> list[int] | None:
        """Take `count` pages for `group`, all or none (None, and nothing changed).

        Pages come, in this order, from the slab of `near_page` (the last page of who asks; windowed groups only), from
        free slabs as long as what is still missing fills one whole, from the fullest partly used slab of the group, and
        from one more free slab. So slabs become free as a whole: a window's pages stay together and are slid one after
        the other. A full group's pages all live as long as their request; there `near_page` is not used, for it would
        only keep young pages from filling the fullest slab.
        """
        if count == 1:
            page = self.allocate_one(group, near_page)
            return None if page == NULL_PAGE else [page]
        if count > self.num_allocatable(group):
            return None
        pages: list[int] = []
        if near_page != NULL_PAGE and self._is_windowed[group]:
            slab = near_page // self.layout.slab_units
            if self._slab_group_at[slab] == group and self._free_pages[slab]:
                self._unlist(group, slab)
                self._take(group, slab, count, pages)
        pages_per_slab = self._pages_per_slab[group]
        num_whole = min((count - len(pages)) // pages_per_slab, self.num_lendable_slabs(group))
        if num_whole:
            pages += self._lend_whole(group, num_whole)
        while len(pages) < count:
            missing = count - len(pages)
            partial = self._partial[group]
            if partial:
                slab = next(iter(partial[min(partial)]))
                self._unlist(group, slab)
            else:
                slab = self._lend_slab(group)
            self._take(group, slab, missing, pages)
        self.num_used[group] += count
        return pages

    def allocate_one(self, group: int, near_page: int = NULL_PAGE) -> int:
        """Take one page by the same rule as `allocate`; NULL_PAGE, and nothing changed, where there is none."""
        slab = near_page // self.layout.slab_units if near_page != NULL_PAGE and self._is_windowed[group] else 0
        partial = self._partial[group]
        if slab and self._slab_group_at[slab] == group and self._free_pages[slab]:
            self._unlist(group, slab)
        elif partial:
            slab = next(iter(partial[min(partial)]))
            self._unlist(group, slab)
        elif self._free_slabs and (self.slab_quota is None or self.num_lendable_slabs(group) > 0):
            slab = self._lend_slab(group)
        else:
            return NULL_PAGE
        free_pages = self._free_pages[slab]
        page = free_pages.pop()
        if free_pages:
            self._list(group, slab)
        self.num_used[group] += 1
        return page

    def free(self, group: int, page: int) -> None:
        """Give back a page that `allocate(group, ...)` returned. An emptied slab returns to the arena.

        Raises ValueError for a page that the group does not use."""
        slab = page // self.layout.slab_units
        is_lent = page != NULL_PAGE and slab < self.num_slabs and self._slab_group_at[slab] == group
        if not is_lent or page in self._free_pages[slab]:
            raise ValueError(f"page {page} is not in use by group {group}")
        free_pages = self._free_pages[slab]
        self._unlist(group, slab)
        free_pages.append(page)
        self.num_used[group] -= 1
        if len(free_pages) == self._pages_per_slab[group]:
            self._return_slab(group, slab)
        else:
            self._list(group, slab)

    def can_compact(self, group: int) -> bool:
        """Whether `compact` would find moves for `group` if no page were immovable."""
        return self.slab_quota is None and any(
            other != group and num_free >= pages_per_slab
            for other, (num_free, pages_per_slab) in enumerate(
                zip(self._num_partial_pages, self._pages_per_slab, strict=True)
            )
        )

    def compact(self, group: int, *, immovable: Iterable[int] = (), max_moved_share: float = 1.0) -> PageMoves | None:
        """Empty one partly used slab of another group, so that `group` can take it.

        The slab chosen is the one with the fewest bytes in use. Its pages in use move into free pages of that group's
        other slabs. Returns these moves. For the arena they are done already. The caller replaces each source by its
        target wherever it has noted the page, and copies the contents before anything is written to a page that was
        allocated after this call. Sources and targets of one call are disjoint. A later call may move a target again,
        so the copies of several calls must run in the order of the calls. Returns None, with nothing changed, where
        there is no such slab or slabs do not move between groups (`slab_quota`).

        immovable: pages in use that must stay where they are; no slab that holds one of them is emptied.
        max_moved_share: most bytes to move per byte of the slab; what moves is always less than a slab.

        How much can stay unusable: let a group have p pages to a slab and f free pages in its partly used slabs. A slab
        with u pages in use has p - u of those f. So the other slabs have room for its u pages if and only if f >= p,
        whichever slab it is. When None was returned (with nothing immovable and max_moved_share 1), f <= p - 1
        therefore holds in every group but `group`. So the memory that `group` cannot use is less than one slab for each
        other group, and the `slab_waste` of the slabs that are lent. Where pages are immovable, either f <= p - 1, or
        every partly used slab of the group holds such a page, so that f <= n * (p - 1) for n slabs that hold any.
        """
        if not self.can_compact(group):
            return None
        fixed_slabs = {page // self.layout.slab_units for page in immovable}
        best: tuple[int, int, int] | None = None  # units to move, group, slab
        for other, spec in enumerate(self.layout.groups):
            if other == group or self._num_partial_pages[other] < spec.pages_per_slab:
                continue
            for num_free in sorted(self._partial[other], reverse=True):
                slab = next((slab for slab in self._partial[other][num_free] if slab not in fixed_slabs), None)
                if slab is not None:
                    num_units = (spec.pages_per_slab - num_free) * spec.page_units
                    if best is None or num_units < best[0]:
                        best = num_units, other, slab
                    break
        if best is None or best[0] > max_moved_share * self.layout.slab_units:
            return None
        return self._empty_slab(*best[1:])

    def _empty_slab(self, group: int, slab: int) -> PageMoves:
        """Move all pages of a partly used slab into the group's other ones, fullest first; they have room."""
        free_pages = set(self._free_pages[slab])
        sources = [page for page in self._pages_of(group, slab) if page not in free_pages]
        self._unlist(group, slab)
        self._return_slab(group, slab)
        targets: list[int] = []
        while len(targets) < len(sources):
            partial = self._partial[group]
            target_slab = next(iter(partial[min(partial)]))
            self._unlist(group, target_slab)
            self._take(group, target_slab, len(sources) - len(targets), targets)
        return PageMoves(group, np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))

    def free_pages_of(self, group: int) -> set[int]:
        """Free pages inside slabs that are lent to `group`."""
        return {page for slab, pages in self._free_pages.items() if self.slab_group[slab] == group for page in pages}

    def _take(self, group: int, slab: int, most: int, into: list[int]) -> None:
        """Move up to `most` free pages of a slab that is not listed to `into`, and list the slab."""
        free_pages = self._free_pages[slab]
        if most == 1:
            into.append(free_pages.pop())
        else:
            into += free_pages[: -most - 1 : -1]
            del free_pages[-most:]
        self._list(group, slab)

    def _lend_whole(self, group: int, num_slabs: int) -> list[int]:
        """Lend `num_slabs` free slabs to the group and take all of their pages, which are returned."""
        if num_slabs == 1:
            slab = self._free_slabs.pop()
            self._free_pages[slab] = []
            self.num_lent_slabs[group] += 1
            self._slab_group_at[slab] = group
            return [*self._pages_of(group, slab)]
        slabs = self._free_slabs[: -num_slabs - 1 : -1]
        del self._free_slabs[-num_slabs:]
        self._free_pages.update((slab, []) for slab in slabs)
        self.num_lent_slabs[group] += num_slabs
        self.slab_group[slabs] = group
        pages = np.array(slabs)[:, None] * self.layout.slab_units + self._pages_of(group, 0)
        return [int(page) for page in pages.ravel()]

    def _lend_slab(self, group: int) -> int:
        """Lend a free slab to the group. Its pages are free, and the caller lists it."""
        slab = self._free_slabs.pop()
        self._slab_group_at[slab] = group
        is_one_page = self._pages_per_slab[group] == 1
        self._free_pages[slab] = (
            [slab * self.layout.slab_units] if is_one_page else [*reversed(self._pages_of(group, slab))]
        )
        self.num_lent_slabs[group] += 1
        return slab

    def _return_slab(self, group: int, slab: int) -> None:
        """Make a slab free of which no page is in use any more, and which is on no list."""
        del self._free_pages[slab]
        self._slab_group_at[slab] = FREE
        self.num_lent_slabs[group] -= 1
        self._free_slabs.append(slab)

    def _pages_of(self, group: int, slab: int) -> range:
        spec = self.layout.groups[group]
        first = slab * self.layout.slab_units
        return range(first, first + spec.pages_per_slab * spec.page_units, spec.page_units)

    def _list(self, group: int, slab: int) -> None:
        """Enter the slab among the group's partly used ones, if it has a free page."""
        num_free = len(self._free_pages[slab])
        if num_free:
            self._partial[group].setdefault(num_free, {})[slab] = None
            self._num_partial_pages[group] += num_free

    def _unlist(self, group: int, slab: int) -> None:
        """Undo `_list`, before the number of the slab's free pages changes."""
        num_free = len(self._free_pages[slab])
        if num_free:
            bucket = self._partial[group][num_free]
            del bucket[slab]
            if not bucket:
                del self._partial[group][num_free]
            self._num_partial_pages[group] -= num_free


def _check_quota(slab_quota: tuple[int, ...], num_groups: int, num_slabs: int) -> None:
    if len(slab_quota) != num_groups or min(slab_quota) < 0:
        raise ConfigError(f"slab_quota={slab_quota}: must be one count of at least 0 for each of {num_groups} groups")
    if sum(slab_quota) > num_slabs - 1:
        raise ConfigError(
            f"slab_quota={slab_quota} sums to {sum(slab_quota)} slabs, but an arena of {num_slabs} lends "
            f"{num_slabs - 1}, for the first is the null range; lower the quotas or give {sum(slab_quota) + 1} slabs"
        )
