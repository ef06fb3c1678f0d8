"""The rules of each spec against the definitions, position by position."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.errors import ConfigError
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from tests.helpers.fake_executor import keys_seen
from tests.helpers.simulation import chunked, full, kind_of, sliding

SPECS = [full(), sliding(1), sliding(2), sliding(5), sliding(16), chunked(1), chunked(4), chunked(7)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_query_sees_what_the_definition_says(spec):
    for position in range(60):
        assert range(spec.first_visible(position), position + 1) == keys_seen(*kind_of(spec), position)
    each = spec.first_visible_each(np.arange(60))
    assert each.tolist() == [spec.first_visible(position) for position in range(60)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_may_be_dropped_is_never_seen_again(spec):
    for computed in range(40):
        seen_later = {key for position in range(computed, 100) for key in keys_seen(*kind_of(spec), position)}
        before = [key for key in range(computed) if key in seen_later]
        assert before == list(range(spec.first_needed(computed), computed))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize("interval", [1, 4, 6])
@pytest.mark.parametrize("more", [0, 1])
def test_decode_bound_holds_for_every_length(spec, page_tokens, interval, more):
    length = 80
    bound = spec.max_decode_pages(
        page_tokens=page_tokens, interval_tokens=interval, max_model_len=length, num_blocks_more=more
    )
    kept_from, most = 0, 0
    for position in range(length):
        if position % page_tokens == 0:  # a page boundary: slide if due, then take a page
            first = spec.first_needed(max(0, position - more * page_tokens))
            if first - kept_from >= max(interval, page_tokens):
                kept_from = first // page_tokens * page_tokens
        most = max(most, position // page_tokens - kept_from // page_tokens + 1)
    assert most <= bound
    if not isinstance(spec, FullAttentionSpec) and isinstance(spec, SlidingWindowSpec) and interval <= page_tokens:
        assert most == bound, "the bound is attained, so it is no larger than it must be"


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize("interval", [1, 6])
@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_decode_bound_holds_whatever_drafts_are_accepted(spec, page_tokens, interval, drafts):
    """A row slides by what was accepted, takes pages up to its last draft, and keeps those of rejected ones."""
    length = 400
    bound = spec.max_decode_pages(
        page_tokens=page_tokens, interval_tokens=interval, max_model_len=length, num_blocks_more=0,
        num_draft_tokens=drafts,
    )  # fmt: skip
    draw = random.Random(drafts)
    most = 0
    for _ in range(20):
        position, kept_from, end = 0, 0, 0  # tokens; the last two are page boundaries
        while position < length - drafts:
            drafted = draw.randint(0, drafts)
            if position + 1 + drafted > end:  # there is no page for the last draft: slide if due, then take pages
                first = spec.first_needed(position)
                if first - kept_from >= max(interval, page_tokens):
                    kept_from = first // page_tokens * page_tokens
                end = -(-(position + 1 + drafted) // page_tokens) * page_tokens
                most = max(most, (end - kept_from) // page_tokens)
            position += 1 + draw.randint(0, drafted)
    assert most <= bound
    if isinstance(spec, SlidingWindowSpec) and interval <= page_tokens:
        assert most == bound, "the bound is attained, so it is no larger than it must be"


@pytest.mark.parametrize("spec", [s for s in SPECS if isinstance(s, SlidingWindowSpec)], ids=str)
@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
@pytest.mark.parametrize("more", [0, 1])
def test_prefill_bound_is_attained_at_the_worst_start(spec, page_tokens, chunk, more):
    """With a block more what is kept before a chunk is the window at the last whole block's end, and a block."""
    bound = spec.max_prefill_pages(
        page_tokens=page_tokens, chunk_tokens=chunk, max_model_len=1000, num_blocks_more=more
    )
    held = []
    for start in range(30, 60):
        resume = start // page_tokens * page_tokens - page_tokens if more else start
        held.append((start + chunk - 1) // page_tokens - spec.first_needed(resume) // page_tokens + 1)
    assert max(held) == bound


@pytest.mark.parametrize("more", [0, 1])
def test_figures_of_gemma_3(more):
    """W=512, page 16: 33 pages in decode; 65 for a chunk of 512; with interval 128, 40. And a block more."""
    spec, rest = sliding(512), {"page_tokens": 16, "num_blocks_more": more}
    assert spec.max_decode_pages(interval_tokens=16, max_model_len=32768, **rest) == 33 + more
    assert spec.max_decode_pages(interval_tokens=128, max_model_len=32768, **rest) == 40 + more
    assert spec.max_prefill_pages(chunk_tokens=512, max_model_len=32768, **rest) == 65 + more
    assert spec.max_decode_pages(interval_tokens=16, max_model_len=100, **rest) == 7


@pytest.mark.parametrize("name", ["num_kv_heads", "k_dim", "v_dim", "itemsize_bytes", "window_tokens"])
def test_sizes_must_be_positive(name):
    sizes = {"num_kv_heads": 1, "k_dim": 2, "v_dim": 2, "itemsize_bytes": 4, "window_tokens": 8}
    with pytest.raises(ConfigError, match=f"{name}=0"):
        SlidingWindowSpec(**{**sizes, name: 0})
