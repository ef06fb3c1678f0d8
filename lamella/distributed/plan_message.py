"""A step's plan as one message to the workers that compute it together, and back: numbers of 8 bytes and nothing else.

    [number of decodes, first step slot, number of groups, number of moves,
     for each array: its dimensions and then its shape, or -1 where there is none,
     the arrays' entries, one after the other]

How tokens are sampled is left out: one worker does that, and the others compute the layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lamella.errors import InvariantError
from lamella.kv_cache.page_transfers import PageCopies, PageMoves
from lamella.kv_cache.step_memory import GroupPlan, TableVersions
from lamella.model_executor.step_plan import SamplingBatch, ScoredTokens, StepPlan

_NUM_FIXED, _PER_GROUP, _PER_MOVE = 9, 6, 3
_ABSENT = -1


def encode_plan(plan: StepPlan, token_ids: np.ndarray) -> bytes:
    """A copy of the plan, whose arrays may be written again at once. token_ids: int64 [T], all of them known, in place
    of the plan's own. Raises InvariantError for a plan with adapters, which these messages have no place for."""
    if plan.adapter_ids is not None:
        raise InvariantError("a plan has adapters, and the workers that it is for have none")
    arrays: list[np.ndarray | None] = [
        token_ids,
        plan.positions,
        plan.query_start,
        plan.seq_lens,
        plan.num_sampled,
        plan.is_long_text,
        None if plan.scored is None else plan.scored.tokens,
        None if plan.tables is None else plan.tables.rows,
        None if plan.tables is None else plan.tables.stamps,
    ]
    for group in plan.groups:
        copies = group.copies
        arrays += [group.block_tables, group.first_blocks, group.first_keys, group.slot_mapping]
        arrays += [copies.src_pages, copies.dst_pages]
    for move in plan.moves:
        arrays += [np.array([move.group]), move.src_pages, move.dst_pages]
    header = [plan.num_decodes, plan.first_step_slot, len(plan.groups), len(plan.moves)]
    for array in arrays:
        header += [_ABSENT] if array is None else [array.ndim, *array.shape]
    parts = [np.array(header), *(array.ravel() for array in arrays if array is not None)]
    return np.concatenate(parts, dtype=np.int64, casting="same_kind").tobytes()


def decode_plan(message: bytes) -> StepPlan:
    """The plan that `encode_plan` was given, with tokens in place of their sources, and nobody's sampling."""
    numbers = np.frombuffer(bytearray(message), dtype=np.int64)  # that may be written, as torch wants it
    num_decodes, first_step_slot, num_groups, num_moves = numbers[:4].tolist()
    count = _NUM_FIXED + num_groups * _PER_GROUP + num_moves * _PER_MOVE
    shapes: list[tuple[int, ...] | None] = []
    place = 4
    for _ in range(count):
        num_dims = int(numbers[place])
        place += 1
        if num_dims == _ABSENT:
            shapes.append(None)
            continue
        shapes.append(tuple(numbers[place : place + num_dims].tolist()))
        place += num_dims

    def taken() -> Iterator[np.ndarray | None]:
        nonlocal place
        for shape in shapes:
            if shape is None:
                yield None
                continue
            size = int(np.prod(shape, dtype=np.int64))
            yield numbers[place : place + size].reshape(shape)
            place += size

    arrays: list[Any] = list(taken())
    if place != len(numbers):
        raise InvariantError(f"a plan's message of {len(numbers)} numbers says that it has {place}")
    fixed, rest = arrays[:_NUM_FIXED], arrays[_NUM_FIXED:]
    token_ids, positions, query_start, seq_lens, num_sampled, is_long_text, scored, rows, stamps = fixed
    groups = tuple(_group(rest[start : start + _PER_GROUP]) for start in range(0, num_groups * _PER_GROUP, _PER_GROUP))
    of_moves = rest[num_groups * _PER_GROUP :]
    moves = tuple(_move(of_moves[start : start + _PER_MOVE]) for start in range(0, len(of_moves), _PER_MOVE))
    return StepPlan(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        moves=moves,
        groups=groups,
        first_step_slot=first_step_slot,
        num_sampled=num_sampled,
        sampling=_nobodys_sampling(),
        is_long_text=None if is_long_text is None else is_long_text.astype(bool),
        scored=None if scored is None else ScoredTokens(scored, *[np.zeros(len(scored), dtype=np.int64)] * 4),
        tables=None if rows is None or stamps is None else TableVersions(rows, stamps),
    )


def _group(arrays: list[Any]) -> GroupPlan:
    block_tables, first_blocks, first_keys, slot_mapping, src_pages, dst_pages = arrays
    return GroupPlan(block_tables, first_blocks, first_keys, slot_mapping, PageCopies(src_pages, dst_pages))


def _move(arrays: list[Any]) -> PageMoves:
    group, src_pages, dst_pages = arrays
    return PageMoves(int(group[0]), src_pages, dst_pages)


def _nobodys_sampling() -> SamplingBatch:
    none, numbers = np.zeros(0, dtype=np.int64), np.zeros(0)
    return SamplingBatch(
        temperature=numbers,
        top_k=none,
        top_p=numbers,
        min_p=numbers,
        seeds=np.zeros(0, dtype=np.uint64),
        draw_index=none,
        num_logprobs=none,
        banned_token_ids={},
    )
