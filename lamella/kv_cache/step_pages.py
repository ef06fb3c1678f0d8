"""Step pages: room for the sliding KV of a prefill chunk that nobody needs after the step.

When layer l runs it writes the K and V of the chunk and attends; no other layer reads them. So as soon as that layer
has run, of what the chunk wrote into it only the window at the chunk's end is needed. One layer's worth of memory can
therefore serve all layers of all groups in turn. That memory is a *region* behind the last slab of the arena. A step
page is addressed like any page, by id * unit + the layer's offset in its group's page. But from one step page to the
next it is only one layer's part of a page, so step page k of layer l lies where step page k + 1 of layer l - 1 does:

    layer 0   | 0 | 1 | 2 |
    layer 1       | 0 | 1 | 2 |
    layer 2           | 0 | 1 | 2 |

A layer that reads the KV of an earlier one (`KVLayout.owners`) still finds it there if no windowed layer has written
in between. That is so in Gemma 3n, where the layers that read another's KV come after all layers that write. Where a
windowed layer does write in between, the group whose KV is read has no step pages.

Step pages are nobody's: no row owns them, they are not in the prefix tree, and when the step has run they are free.
"""

from __future__ import annotations

from lamella.kv_cache.layout import KVLayout


def can_have_step_pages(layout: KVLayout, group: int) -> bool:
    """Whether the group is windowed and the KV of each of its layers is read for the last time before another
    windowed layer writes."""
    spec = layout.groups[group]
    if not spec.spec.is_windowed:
        return False
    writing = [layer for one in layout.groups if one.spec.is_windowed for layer in one.layers]
    last_reader = dict(zip(layout.owners, range(len(layout.owners)), strict=True))
    return not any(layer < other < last_reader[layer] for layer in spec.layers for other in writing)


def region_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Bytes that step pages for `num_tokens` tokens take, however the tokens are spread over requests. 0 for less than
    a block of tokens, or where no group has step pages."""
    num_blocks = num_tokens // layout.page_tokens
    if not num_blocks:
        return 0
    return max(
        (
            (num_blocks - 1) * layout.page_tokens * group.spec.token_bytes + group.page_bytes
            for index, group in enumerate(layout.groups)
            if can_have_step_pages(layout, index)
        ),
        default=0,
    )


def region_tokens(layout: KVLayout, num_bytes: int) -> int:
    """Most tokens, in whole blocks, whose step pages fit into `num_bytes`. 0 where no group has step pages."""
    num_blocks = [
        (num_bytes - group.page_bytes) // (layout.page_tokens * group.spec.token_bytes) + 1
        for index, group in enumerate(layout.groups)
        if can_have_step_pages(layout, index)
    ]
    return max(0, min(num_blocks, default=0)) * layout.page_tokens


class StepPages:
    """Hands out the step pages of a region of `num_bytes` bytes behind `num_slabs` slabs. Page ids are in units, like
    those of the arena.

    first_page: every step page has this id or a greater one, and every page of the arena a smaller one.
    """

    def __init__(self, layout: KVLayout, num_slabs: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_tokens = region_tokens(layout, num_bytes)
        self.first_page = num_slabs * layout.slab_units
        num_units = num_bytes // layout.unit_bytes
        self._stride_units = [group.page_units // len(group.layers) for group in layout.groups]
        self._num_pages = [
            max(0, (num_units - group.page_units) // stride + 1) if can_have_step_pages(layout, index) else 0
            for index, (group, stride) in enumerate(zip(layout.groups, self._stride_units, strict=True))
        ]
        self._num_taken = [0] * len(layout.groups)

    def reset(self) -> None:
        """The step has run: all step pages are free."""
        self._num_taken = [0] * len(self._num_taken)

    def num_left(self, group: int) -> int:
        """Number of step pages that `group` could take now. What other groups take makes no difference: layers use the
        region one after the other."""
        return self._num_pages[group] - self._num_taken[group]

    def take(self, group: int, count: int) -> list[int]:
        """Take `count` step pages for `group`, at most `num_left`, and return their ids."""
        assert count <= self.num_left(group), "there are no more step pages"
        taken, stride = self._num_taken[group], self._stride_units[group]
        self._num_taken[group] = taken + count
        return [self.first_page + index * stride for index in range(taken, taken + count)]

    def give_back(self, group: int, count: int) -> None:
        """Undo the last calls of `take` for `group`, which took `count` pages together."""
        self._num_taken[group] -= count

    def holds(self, page: int) -> bool:
        """Whether the page is a step page, not one of the arena and not NULL_PAGE."""
        return page >= self.first_page
