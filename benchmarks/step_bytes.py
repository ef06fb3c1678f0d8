"""Bytes that a decode step sends to a device, counted: with the block tables' changes, and with the tables whole.

    python benchmarks/step_bytes.py

The block manager plans steps of requests whose lengths are spread over a page; no model runs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.sizing import request_slabs, table_line_widths
from lamella.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.decode_graphs import padding_plan
from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.step_buffers import PackedShape, StepUpload, send_step
from lamella.model_executor.step_plan import StepPlan

INT64_BYTES = 8
SHAPE = {"num_kv_heads": 16, "k_dim": 128, "v_dim": 128, "itemsize_bytes": 2}


def hybrid(window_tokens: int) -> list[KVCacheSpec]:
    """A full layer after every five sliding ones, as in Gemma 3."""
    sliding = SlidingWindowSpec(window_tokens=window_tokens, **SHAPE)
    return [FullAttentionSpec(**SHAPE) if layer % 6 == 5 else sliding for layer in range(12)]


def whole_tables_bytes(plan: StepPlan) -> int:
    """What the plan's tables take, sent whole with the block at which each begins."""
    return sum(group.block_tables.nbytes + group.first_blocks.nbytes for group in plan.groups)


def count(
    num_rows: int, context_tokens: int, *, window_tokens: int, page_tokens: int, num_steps: int
) -> dict[str, float]:
    """Bytes per step, and the share of steps that change any entry."""
    layout = build_layout(hybrid(window_tokens), page_tokens=page_tokens)
    max_model_len = context_tokens + num_steps + 2 * page_tokens
    bounds = {"max_model_len": max_model_len, "chunk_tokens": context_tokens, "interval_tokens": page_tokens}
    num_slabs = 2 + num_rows * request_slabs(layout, **bounds)
    manager = BlockManager(
        layout, num_slabs=num_slabs, num_rows=num_rows, max_model_len=max_model_len, interval_tokens=page_tokens,
        enable_prefix_caching=False,
    )  # fmt: skip
    lengths = context_tokens - np.arange(num_rows) % page_tokens
    for row, length in enumerate(lengths.tolist()):
        manager.begin(row, manager.match(np.zeros(1, dtype=np.int32)))
        assert manager.grow(row, 0, length, is_prefill=True)
    tables = DeviceTables(torch.device("cpu"), layout)
    tables.reserve(num_rows, table_line_widths(layout, **bounds))
    upload, rows = StepUpload(torch.device("cpu")), np.arange(num_rows)
    sent, whole, has_changes = [], [], []
    for step in range(num_steps + page_tokens):
        manager.begin_step(is_ahead=False)
        for row in rows.tolist():
            if lengths[row] >= manager.next_due(row):
                assert manager.grow(row, int(lengths[row]), 1, is_prefill=False)
        memory = manager.plan_step(rows, rows, lengths)
        plan = padding_plan(num_rows, (0,) * len(layout.groups))
        plan = dataclasses.replace(
            plan, groups=memory.groups, tables=memory.tables, seq_lens=lengths + 1, positions=lengths
        )
        _, shape = send_step(upload, tables, plan)
        manager.end_step()
        lengths = lengths + 1
        if step >= page_tokens:  # by then windows have slid once
            sent.append(shape.num_entries * INT64_BYTES)
            fixed = PackedShape.of(plan).num_fixed - num_rows  # the tables' rows were not sent
            whole.append(fixed * INT64_BYTES + whole_tables_bytes(plan))
            has_changes.append(shape.num_changes > 0)
    return {"changes": np.mean(sent), "largest": max(sent), "whole": np.mean(whole), "share": np.mean(has_changes)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count the bytes that decode steps send to a device.")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args(arguments)
    print("| rows | context | tables whole, bytes a step | changes, bytes a step | at most | steps with a change |")
    print("|---|---|---|---|---|---|")
    for num_rows in options.rows:
        for context in options.contexts:
            found = count(
                num_rows, context, window_tokens=options.window, page_tokens=options.page_size, num_steps=options.steps
            )
            cells = [f"{num_rows}", f"{context:,}", f"{found['whole']:,.0f}", f"{found['changes']:,.0f}"]
            cells += [f"{found['largest']:,}", f"{100 * found['share']:.0f} %"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
