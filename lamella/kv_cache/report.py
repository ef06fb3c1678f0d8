"""The KV memory of an engine as text: what each layer keeps, how pages and slabs come out, what fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from lamella.kv_cache.capacity import decode_pages, num_requests_that_fit
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.pinned_prefixes import PinnedPrefix
from lamella.kv_cache.sizing import held_chunk_tokens
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.kv_cache.step_pages import region_tokens

_SHORTEST_CONTEXT = 1024


def kv_cache_report(
    layout: KVLayout,
    num_slabs: int,
    *,
    max_model_len: int,
    chunk_tokens: int,
    interval_tokens: int,
    slab_quota: tuple[int, ...] | None = None,
    context_lengths: Sequence[int] | None = None,
    step_pages_bytes: int = 0,
    num_blocks_more: int = 1,
    pinned: Sequence[PinnedPrefix] = (),
    num_draft_tokens: int = 0,
) -> str:
    """Tables of layers, groups and capacity, for an arena of `num_slabs` slabs (the null slab included) and step pages
    of `step_pages_bytes` behind them.

    slab_quota: slabs of each group's pool; None: elastic. context_lengths: tokens per request to give the capacity
    for; None: powers of four from 1,024 below max_model_len, and max_model_len. num_blocks_more, num_draft_tokens: see
    KVCacheSpec.max_pages. pinned: prefixes that are never evicted.
    """
    contexts = default_context_lengths(max_model_len) if context_lengths is None else context_lengths
    return "\n\n".join(
        [
            _layer_table(layout),
            _group_table(layout, slab_quota),
            _memory_lines(layout, num_slabs, slab_quota, chunk_tokens, interval_tokens, step_pages_bytes),
            _capacity_table(
                layout,
                num_slabs,
                slab_quota,
                contexts,
                held_chunk_tokens(
                    layout,
                    chunk_tokens=chunk_tokens,
                    step_pages_bytes=step_pages_bytes,
                    num_blocks_more=num_blocks_more,
                ),
                interval_tokens,
                num_blocks_more,
                num_draft_tokens,
            ),
            *([_pinned_table(pinned)] if pinned else []),
        ]
    )


def default_context_lengths(max_model_len: int) -> list[int]:
    """Powers of four from 1,024 tokens that are below `max_model_len`, and that."""
    powers = itertools.takewhile(
        lambda length: length < max_model_len, (_SHORTEST_CONTEXT * 4**step for step in itertools.count())
    )
    return [*powers, max_model_len]


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to equal width: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def format_bytes(num_bytes: int) -> str:
    """A size in the largest unit of which there is at least one: "12 B", "3.5 KiB", "2.0 GiB"."""
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    power = min(4, (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 2 ** (10 * power):.1f} {'KMGT'[power - 1]}iB"


def _layer_table(layout: KVLayout) -> str:
    # Neighbours that are alike share a line; otherwise 62 layers would fill the screen.
    runs = itertools.groupby(
        range(len(layout.owners)),
        key=lambda layer: (layout.layer_address(layer)[0], layout.owners[layer] if layout.is_shared(layer) else None),
    )
    rows = []
    for (index, owner), run in runs:
        layers = list(run)
        group = layout.groups[index]
        spec = group.spec
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        dims = [str(value) for value in (spec.num_kv_heads, spec.k_dim, spec.v_dim)]
        kept = f"{spec.token_bytes:,}" if owner is None else f"shares layer {owner}'s"
        rows.append([span, group.name, *_reach(spec), *dims, kept])
    return format_table(
        ["layers", "group", "kind", "keys seen", "KV heads", "K dim", "V dim", "bytes/token/layer"], rows
    )


def _reach(spec: KVCacheSpec) -> tuple[str, str]:
    if isinstance(spec, SlidingWindowSpec):
        return "sliding window", f"{spec.window_tokens:,}"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked local", f"{spec.attention_chunk_tokens:,}"
    return "full", "all"


def _group_table(layout: KVLayout, slab_quota: tuple[int, ...] | None) -> str:
    header = ["group", "layers", "page bytes", "units/page", "pages/slab", "slab waste"]
    rows = [
        [
            group.name,
            str(len(group.layers)),
            f"{group.page_bytes:,}",
            str(group.page_units),
            str(group.pages_per_slab),
            f"{layout.slab_waste(group):.2%}",
        ]
        for group in layout.groups
    ]
    if slab_quota is not None:
        header += ["pool slabs", "pool tokens"]
        for row, group, slabs in zip(rows, layout.groups, slab_quota, strict=True):
            row += [f"{slabs:,}", f"{slabs * group.pages_per_slab * layout.page_tokens:,}"]
    return format_table(header, rows)


def _memory_lines(
    layout: KVLayout,
    num_slabs: int,
    slab_quota: tuple[int, ...] | None,
    chunk_tokens: int,
    interval_tokens: int,
    step_pages_bytes: int,
) -> str:
    step_pages = [
        f"step pages: {step_pages_bytes:,} B ({format_bytes(step_pages_bytes)}) behind them, for "
        f"{region_tokens(layout, step_pages_bytes):,} prompt tokens a step"
    ]
    sharing = "slabs move between groups" if slab_quota is None else "fixed pools"
    return "\n".join(
        [
            f"page: {layout.page_tokens} tokens; unit: {layout.unit_bytes:,} B; "
            f"slab: {layout.slab_units} units = {layout.slab_bytes:,} B",
            f"arena: {num_slabs:,} slabs = {num_slabs * layout.slab_bytes:,} B "
            f"({format_bytes(num_slabs * layout.slab_bytes)}), one of them the null slab; {sharing}",
            *(step_pages if step_pages_bytes else []),
            f"prefill chunk: at most {chunk_tokens:,} tokens; eviction interval: {interval_tokens:,} tokens",
        ]
    )


def _pinned_table(pinned: Sequence[PinnedPrefix]) -> str:
    rows = [
        [one.name, f"{one.num_tokens:,}", format_bytes(one.num_bytes), "yes" if one.is_cached else "when computed"]
        for one in pinned
    ]
    return format_table(["pinned prefix", "tokens", "KV beside those above", "cached"], rows)


def _capacity_table(
    layout: KVLayout,
    num_slabs: int,
    slab_quota: tuple[int, ...] | None,
    contexts: Sequence[int],
    chunk_tokens: int,
    interval_tokens: int,
    num_blocks_more: int,
    num_draft_tokens: int,
) -> str:
    rows = []
    for context in contexts:
        pages = decode_pages(
            layout,
            context_tokens=context,
            interval_tokens=interval_tokens,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        num_bytes = sum(count * group.page_bytes for count, group in zip(pages, layout.groups, strict=True))
        count = num_requests_that_fit(
            layout,
            num_slabs,
            context_tokens=context,
            chunk_tokens=chunk_tokens,
            interval_tokens=interval_tokens,
            slab_quota=slab_quota,
            num_blocks_more=num_blocks_more,
            num_draft_tokens=num_draft_tokens,
        )
        rows.append([f"{context:,}", f"{count:,}", format_bytes(num_bytes), *(f"{count:,}" for count in pages)])
    header = ["context", "requests that fit", "KV of one", *(f"{group.name} pages" for group in layout.groups)]
    return format_table(header, rows)
