"""Decode's partial results: their number is bounded, and neither that nor the batch shows in what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamella.attention.triton.decode import count_scratch_segments
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case
from tests.helpers.triton_cases import assert_like_reference, make_spec, on_device, small_backend

SMALL: dict[str, int] = {"segment_tokens": 16, "max_segments": 3}
# Contexts of 3 segments of 16, one more token, of 32, ...; windows whose segments begin before them.
CONTEXTS = [0, 15, 46, 47, 48, 95, 96, 191, 192, 193]
RULES = [("full", 0), ("window", 48), ("window", 96), ("window", 100), ("chunk", 192)]


class LargestMade(TorchDispatchMode):
    """How many bytes the largest uninitialised tensor has that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def decode(case: AttentionCase, **overrides: Any) -> tuple[torch.Tensor, int]:
    """(output, bytes of the partial results)."""
    backend = small_backend(**(SMALL | overrides))
    case = on_device(case)
    cache = case.cache(backend, case.arena)
    backend.write_kv(cache, case.new_keys, case.new_values, case.metadata)
    out = torch.empty(len(case.requests), case.params.num_heads, case.params.spec.v_dim, device=case.query.device)
    with LargestMade() as made:
        backend.decode(case.params, cache, case.query, case.metadata, out)
    return out.cpu(), made.num_bytes


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_long_segments_give_what_the_reference_gives(rule: tuple[str, int]) -> None:
    requests = [Ragged(context) for context in CONTEXTS] + [Ragged(200, 1, 160), Ragged(200, 1, 200)]
    case = make_case(make_spec(*rule), requests, num_heads=2, page_tokens=8, with_sinks=True)
    assert_like_reference(case, small_backend(**SMALL))


@pytest.mark.parametrize("rule", [("full", 0), ("window", 100)], ids=str)
def test_a_longer_neighbour_changes_nothing(rule: tuple[str, int]) -> None:
    """Bit for bit; it makes the tables wider and its own segments longer."""
    for context in (40, 96):
        both = make_case(make_spec(*rule), [Ragged(context), Ragged(300)], num_heads=1, page_tokens=8)
        expected = decode(both)[0][0]
        for target_programs in (1, 100):
            assert torch.equal(decode(both, target_programs=target_programs)[0][0], expected)
        metadata = both.metadata
        width = (context + 8) // 8  # a table no wider than it takes
        alone = dataclasses.replace(
            metadata,
            num_decodes=1,
            query_start=metadata.query_start[:2],
            query_start_host=metadata.query_start_host[:2],
            **{
                f"{name}{suffix}": getattr(metadata, f"{name}{suffix}")[:1]
                for name in ("seq_lens", "first_blocks", "first_keys")
                for suffix in ("", "_host")
            },
            block_tables=metadata.block_tables[:1, :width],
            block_tables_host=metadata.block_tables_host[:1, :width],
            slot_mapping=metadata.slot_mapping[:1],
        )
        case = dataclasses.replace(
            both,
            metadata=alone,
            query=both.query[:1],
            new_keys=both.new_keys[:1],
            new_values=both.new_values[:1],
            requests=both.requests[:1],
        )
        assert torch.equal(decode(case)[0][0], expected)


@pytest.mark.parametrize("rule", [("full", 0), ("window", 250)], ids=str)
def test_partial_results_take_bounded_memory(rule: tuple[str, int]) -> None:
    spec = make_spec(*rule, k_dim=16, v_dim=64)
    case = make_case(spec, [Ragged(300), Ragged(5), Ragged(0)], num_heads=2, page_tokens=8)
    _, num_bytes = decode(case)
    assert num_bytes == 3 * (3 + 1) * 2 * 64 * 4  # requests, segments and one more, heads, values, bytes
    assert decode(case, max_segments=10_000)[1] > 4 * num_bytes


def test_every_request_fits() -> None:
    """Segments counted position by position, for anything that a table of 40 pages of 8 tokens can show."""
    for reach in (None, 1, 15, 16, 17, 48, 50, 96, 97, 150, 320):
        room = count_scratch_segments(320, reach, **SMALL)
        assert room <= SMALL["max_segments"] + 1
        most = 0
        for seq_len in range(1, 321):
            first = 0 if reach is None else max(0, seq_len - reach)
            segment = SMALL["segment_tokens"]
            while segment * SMALL["max_segments"] < min(seq_len, reach or seq_len):
                segment *= 2
            most = max(most, len({position // segment for position in range(first, seq_len)}))
        assert most <= room
        assert room - most <= 1


def test_what_is_launched_follows_from_the_tables_width() -> None:
    """So that a captured graph's scratch is that of any batch with tables as wide."""
    short = make_case(make_spec("full"), [Ragged(5), Ragged(9)], num_heads=2, page_tokens=8)
    long = make_case(make_spec("full"), [Ragged(200), Ragged(9)], num_heads=2, page_tokens=8)
    width = long.metadata.block_tables.shape[1]
    tables = torch.full((2, width), -1)
    tables[:, : short.metadata.block_tables.shape[1]] = short.metadata.block_tables
    metadata = dataclasses.replace(short.metadata, block_tables=tables, block_tables_host=tables.numpy())
    _, num_bytes = decode(dataclasses.replace(short, metadata=metadata))
    assert num_bytes == decode(long)[1]
