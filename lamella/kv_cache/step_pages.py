"""Step pages: room for the sliding KV of a prefill chunk that nobody needs after the step.

When layer l runs it writes the K and V of the chunk and attends; no other layer reads them. Of what a chunk writes
into a sliding layer, all but the window at its end is therefore garbage as soon as that layer has run, and one
layer's worth of memory serves all layers of all groups in turn. That memory is a *region* behind the last slab of the
arena. A step page is addressed like any page, id * unit + the layer's offset in its group's page; but its stride is
that of one layer's page, so that step page k of layer l lies where step page k + 1 of layer l - 1 does:

    layer 0   | 0 | 1 | 2 |
    layer 1       | 0 | 1 | 2 |
    layer 2           | 0 | 1 | 2 |

A layer that reads the KV of an earlier one (`KVLayout.owners`) finds it there if no windowed layer has written in
between: so it is in Gemma 3n, where all layers that read another's come after all that write. Where one does write in
between, the group whose KV is read has no step pages.

Step pages are nobody's: owned by no row, in no tree, gone when the step has run.
"""

from __future__ import annotations

from lamella.kv_cache.layout import KVLayout


def can_have_step_pages(layout: KVLayout, group: int) -> bool:
    """Whether the group is windowed, and its layers' KV is read for the last time before another windowed layer
    writes."""
    spec = layout.groups[group]
    if not spec.spec.is_windowed:
        return False
    writing = [layer for one in layout.groups if one.spec.is_windowed for layer in one.layers]
    last_reader = dict(zip(layout.owners, range(len(layout.owners)), strict=True))
    return not any(layer < other < last_reader[layer] for layer in spec.layers for other in writing)


def region_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Bytes that step pages for `num_tokens` tokens take, however they are spread over requests; 0 if they are less
    than a block, or no group has any."""
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
    """Most tokens, in whole blocks, whose step pages fit into `num_bytes`; 0 where no group has any."""
    num_blocks = [
        (num_bytes - group.page_bytes) // (layout.page_tokens * group.spec.token_bytes) + 1
        for index, group in enumerate(layout.groups)
        if can_have_step_pages(layout, index)
    ]
    return max(0, min(num_blocks, default=0)) * layout.page_tokens


class StepPages:
    """Hands out the region behind `num_slabs` slabs, of `num_bytes` bytes. Page ids are in units, like the arena's.

    `first_page`: no page of the arena has this id or a greater one, and every step page has.
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
        """The step has run: all is free."""
        self._num_taken = [0] * len(self._num_taken)

    def num_left(self, group: int) -> int:
        """Step pages that `group` could take now. What other groups take makes no difference."""
        return self._num_pages[group] - self._num_taken[group]

    def take(self, group: int, count: int) -> list[int]:
        """So many step pages, `num_left` at most."""
        assert count <= self.num_left(group), "there are no more step pages"
        taken, stride = self._num_taken[group], self._stride_units[group]
        self._num_taken[group] = taken + count
        return [self.first_page + index * stride for index in range(taken, taken + count)]

    def give_back(self, group: int, count: int) -> None:
        """Undo the last `take`s, of `count` pages together."""
        self._num_taken[group] -= count

    def holds(self, page: int) -> bool:
        """Whether the page is a step page, and neither one of the arena's nor NULL_PAGE."""
        return page >= self.first_page
