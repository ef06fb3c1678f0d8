"""Step pages: room for the sliding KV of a prefill chunk that nobody needs after the step.

When layer l runs it writes the K and V of the chunk and attends; no other layer reads them. Of what a chunk writes
into a sliding layer, all but the window at its end is therefore garbage as soon as that layer has run, and one
layer's worth of memory serves all layers of all groups in turn. That memory is a *region* behind the last slab of the
arena. A step page is addressed like any page, id * unit + the layer's offset in its group's page; but its stride is
that of one layer's page, so that step page k of layer l lies where step page k + 1 of layer l - 1 does:

    layer 0   | 0 | 1 | 2 |
    layer 1       | 0 | 1 | 2 |
    layer 2           | 0 | 1 | 2 |

Where a layer reads the KV of an earlier one (`KVLayout.owners`), that lives longer than its layer: the step pages of
such a group are whole pages that alias nothing, taken from the region's other end.

Step pages are nobody's: owned by no row, in no tree, gone when the step has run.
"""

from __future__ import annotations

from lamella.kv_cache.arena import NULL_PAGE
from lamella.kv_cache.layout import KVLayout


def has_shared_kv(layout: KVLayout, group: int) -> bool:
    """Whether a later layer reads the KV of one of the group's layers."""
    layers = layout.groups[group].layers
    return any(owner in layers for layer, owner in enumerate(layout.owners) if owner != layer)


def region_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Bytes that step pages for `num_tokens` tokens take, however they are spread over requests; 0 if they are less
    than a block, or no layer is windowed."""
    num_blocks = num_tokens // layout.page_tokens
    if not num_blocks:
        return 0
    aliased = [0]
    own = 0
    for index, group in enumerate(layout.groups):
        if not group.spec.is_windowed:
            continue
        if has_shared_kv(layout, index):
            own += num_blocks * group.page_bytes
        else:
            aliased.append((num_blocks - 1) * layout.page_tokens * group.spec.token_bytes + group.page_bytes)
    return max(aliased) + own


def region_tokens(layout: KVLayout, num_bytes: int) -> int:
    """Most tokens, in whole blocks, whose step pages fit into `num_bytes`; 0 where no layer is windowed."""
    if not region_bytes(layout, layout.page_tokens):
        return 0
    low, high = 0, num_bytes // min(layout.page_tokens * group.spec.token_bytes for group in layout.groups)
    while low < high:
        middle = (low + high + 1) // 2
        if region_bytes(layout, middle * layout.page_tokens) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return low * layout.page_tokens


class StepPages:
    """Hands out the region behind `num_slabs` slabs, of `num_bytes` bytes. Page ids are in units, like the arena's.

    `first_page`: no page of the arena has this id or a greater one, and every step page has.
    """

    def __init__(self, layout: KVLayout, num_slabs: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_tokens = region_tokens(layout, num_bytes)
        self.first_page = num_slabs * layout.slab_units
        self._end = self.first_page + num_bytes // layout.unit_bytes
        self._page_units = [group.page_units for group in layout.groups]
        self._aliases = [not has_shared_kv(layout, group) for group in range(len(layout.groups))]
        self._stride_units = [
            group.page_units // len(group.layers) if aliases else group.page_units
            for group, aliases in zip(layout.groups, self._aliases, strict=True)
        ]
        self._is_windowed = [group.spec.is_windowed for group in layout.groups]
        self.reset()

    def reset(self) -> None:
        """The step has run: all is free."""
        self._next = [self.first_page] * len(self._page_units)
        self._aliased_end = self.first_page  # behind the last page that aliases others
        self._own_start = self._end  # of the lowest page that does not

    def state(self) -> tuple[list[int], int, int]:
        """What `restore` takes to undo every `take` since."""
        return [*self._next], self._aliased_end, self._own_start

    def restore(self, state: tuple[list[int], int, int]) -> None:
        self._next, self._aliased_end, self._own_start = state

    def num_left(self, group: int) -> int:
        """Step pages that `group` could take now."""
        if not self._is_windowed[group]:
            return 0
        if self._aliases[group]:
            room = self._own_start - self._next[group] - self._page_units[group]
            return room // self._stride_units[group] + 1 if room >= 0 else 0
        return (self._own_start - self._aliased_end) // self._page_units[group]

    def take(self, group: int, count: int) -> list[int]:
        """So many step pages, `num_left` at most."""
        assert count <= self.num_left(group), "there are no more step pages"
        if not count:
            return []
        stride = self._stride_units[group]
        if not self._aliases[group]:
            self._own_start -= count * stride
            return [*range(self._own_start, self._own_start + count * stride, stride)]
        first = self._next[group]
        self._next[group] = last = first + count * stride
        self._aliased_end = max(self._aliased_end, last - stride + self._page_units[group])
        return [*range(first, last, stride)]

    def holds(self, page: int) -> bool:
        """Whether the page is a step page, and neither one of the arena's nor NULL_PAGE."""
        return page != NULL_PAGE and page >= self.first_page
