"""Plans with random numbers, for what brings them to a device."""

from __future__ import annotations

import dataclasses

import numpy as np

from lamella.model_executor.decode_graphs import padding_plan
from lamella.model_executor.step_plan import StepPlan


def random_plan(seed: int, lengths: list[int], widths: tuple[int, ...] = (6, 3), *, page_tokens: int) -> StepPlan:
    """lengths: new tokens of each request. Its tables cover the last blocks of each context, `widths` at most; the
    first group's begin at block 0."""
    generator = np.random.default_rng(seed)
    count, num_tokens = len(lengths), sum(lengths)

    def numbers(*shape: int) -> np.ndarray:
        return generator.integers(1, 10_000, size=shape)

    plan = padding_plan(count, widths)
    num_blocks = generator.integers(1, 1 + max(1, widths[0]), size=count)
    groups = tuple(
        dataclasses.replace(
            group,
            block_tables=numbers(count, width),
            first_blocks=np.maximum(num_blocks - width, 0),
            first_keys=numbers(count),
            slot_mapping=numbers(num_tokens),
        )
        for group, width in zip(plan.groups, widths, strict=True)
    )
    return dataclasses.replace(
        plan,
        token_ids=numbers(num_tokens),
        positions=numbers(num_tokens),
        query_start=np.cumsum([0, *lengths]),
        seq_lens=num_blocks * page_tokens - generator.integers(0, page_tokens, size=count),
        num_decodes=lengths.count(1),
        groups=groups,
    )
