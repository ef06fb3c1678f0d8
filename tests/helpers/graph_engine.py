"""A tiny engine whose decode steps run as graphs, each held against an eager pass over the same padded batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamella import Engine, SamplingParams
from lamella.kv_cache.sizing import decode_table_widths, table_line_widths
from lamella.kv_cache.step_memory import NO_STAMP, TableVersions
from lamella.model_executor.device_tables import table_versions
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_plan import StepPlan
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.tiny_gemma import save_tiny_gemma

PAGE_TOKENS = 8
MAX_MODEL_LEN = 64
# The window is 16 tokens: contexts begin and end on both sides of page and window ends. Requests arrive before a step
# and end with one, so that batches of every size from 1 to 9 decode.
PROMPT_LENGTHS = (20, 33, 7, 15, 12, 1, 8, 16, 10)
ARRIVALS = (0, 2, 4, 4, 6, 6, 6, 8, 8)
LAST_STEPS = (10, 9, 14, 12, 10, 13, 11, 12, 13)
# (requests, batch size of the graph) of the steps that only decode
GRAPH_STEPS = [(1, 1), (2, 2), (4, 4), (7, 8), (9, 9), (8, 8), (6, 8), (5, 8), (3, 4), (1, 1)]


def save_model(path: Path) -> Path:
    """A sliding layer and a full one."""
    save_tiny_gemma(path, num_hidden_layers=2, sliding_window_pattern=2, num_attention_heads=2, num_key_value_heads=1)
    return path


def make_engine(folder: Path, backend: str = "triton", **arguments: Any) -> Engine:
    """All of its KV memory is NaN, the null page too."""
    defaults = {"max_model_len": MAX_MODEL_LEN, "page_size": PAGE_TOKENS, "max_num_batched_tokens": 40}
    defaults |= {"max_num_seqs": 9, "kv_cache_memory_bytes": 2**21, "dtype": "float32", "device": "cpu"}
    engine = Engine(model=str(folder), attention_backend=backend, check_invariants=True, **(defaults | arguments))
    engine.inspect().runner.arena.fill_(0xFF)
    return engine


def capture(engine: Engine) -> RecordedGraphs:
    loaded, maker = engine.inspect(), RecordedGraphs()
    widths = decode_table_widths(
        loaded.layout, max_model_len=MAX_MODEL_LEN, interval_tokens=loaded.manager.settings.interval_tokens
    )
    lines = table_line_widths(
        loaded.layout,
        max_model_len=MAX_MODEL_LEN,
        chunk_tokens=engine.config.max_num_batched_tokens,
        interval_tokens=loaded.manager.settings.interval_tokens,
    )
    loaded.runner.reserve_tables(engine.config.max_num_seqs, lines)
    loaded.runner.capture_decodes(maker, max_num_seqs=engine.config.max_num_seqs, table_widths=widths)
    return maker


def serve(engine: Engine) -> list[list[int]]:
    """Each request's tokens."""
    generator = np.random.default_rng(7)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in PROMPT_LENGTHS]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(max(LAST_STEPS) + 1):
        for index, (arrival, last) in enumerate(zip(ARRIVALS, LAST_STEPS, strict=True)):
            if arrival == step:
                params = SamplingParams(temperature=0, max_tokens=last - step + 1, ignore_eos=True)
                engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, params)
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert not engine.has_unfinished_requests()
    return tokens


def padded(plan: StepPlan, size: int) -> StepPlan:
    """With requests of one token that have no keys, no pages and no slot."""
    missing = size - len(plan.seq_lens)

    def extend(values: np.ndarray, filler: int) -> np.ndarray:
        return np.concatenate([values, np.full((missing, *values.shape[1:]), filler, dtype=np.int64)])

    groups = tuple(
        dataclasses.replace(
            group,
            block_tables=extend(group.block_tables, -1),
            first_blocks=extend(group.first_blocks, 0),
            first_keys=extend(group.first_keys, 0),
            slot_mapping=extend(group.slot_mapping, -1),
        )
        for group in plan.groups
    )
    return dataclasses.replace(
        plan,
        token_ids=extend(plan.token_ids, 0),
        positions=extend(plan.positions, 0),
        query_start=np.arange(size + 1),
        seq_lens=extend(plan.seq_lens, 0),
        num_sampled=extend(plan.num_sampled, 0),
        num_decodes=size,
        groups=groups,
        tables=None if plan.tables is None else padded_versions(plan.tables, missing),
    )


def padded_versions(tables: TableVersions, missing: int) -> TableVersions:
    """Requests without keys have the lines of rows that are not in the plan: nobody reads them."""
    others = np.setdiff1d(np.arange(len(tables.rows) + missing + tables.rows.max()), tables.rows)[:missing]
    stamps = np.full((len(tables.stamps), missing), NO_STAMP)
    return TableVersions(np.concatenate([tables.rows, others]), np.concatenate([tables.stamps, stamps], axis=1))


def written_bytes(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    """Which bytes (bool [arena]) the plan's tokens' K and V are, from where the page layout puts them."""
    layout = runner.layout
    is_written = torch.zeros(runner.arena.numel(), dtype=torch.bool)
    for layer in range(len(layout.owners)):
        group, offset = layout.layer_address(layer)
        row_bytes = layout.groups[group].spec.token_bytes // 2  # K and V are equally wide
        for slot in plan.groups[group].slot_mapping.tolist():
            page = slot // PAGE_TOKENS * layout.unit_bytes + offset
            for begin in (page, page + PAGE_TOKENS * row_bytes):
                row = begin + slot % PAGE_TOKENS * row_bytes
                is_written[row : row + row_bytes] = True
    return is_written.to(runner.arena.device)


def live_entries(plan: StepPlan, group: int, table: torch.Tensor) -> torch.Tensor:
    """Which entries of a device's table (bool [rows, width]) the plan's requests have, one at a time."""
    is_live = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    first_blocks = plan.groups[group].first_blocks.tolist()
    for row, first, length in zip(
        table_versions(plan).rows.tolist(), first_blocks, plan.seq_lens.tolist(), strict=True
    ):
        for block in range(first, -(-length // PAGE_TOKENS)):
            is_live[row, block % table.shape[1]] = True
    return is_live


class CheckedReplays:
    """Wraps a runner's graph steps: hidden states and every byte of the KV memory are those of an eager pass over the
    same batch, padded here, and nothing but the plan's slots is written. All entries of the block tables that are none
    of the plan's requests are pointed at the null page, which is NaN, while the graph runs.

    steps: (requests, batch size of the graph) of each.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps: list[tuple[int, int]] = []
        self._run_graph = runner._run_graph
        runner._run_graph = self

    def __call__(self, plan: StepPlan, size: int) -> torch.Tensor:
        runner, arena = self.runner, self.runner.arena
        self.steps.append((len(plan.seq_lens), size))
        replay, entries = runner.graphs.replay, runner.tables.entries
        before = arena.clone()

        def replay_with_others_nulled(*arguments: int) -> torch.Tensor:
            held = entries.clone()
            for group, table in enumerate(runner.tables.tables):
                table[~live_entries(plan, group, table)] = 0
            hidden = replay(*arguments)
            entries.copy_(held)
            return hidden

        runner.graphs.replay = replay_with_others_nulled
        hidden = self._run_graph(plan, size)
        runner.graphs.replay = replay
        assert runner.tables.entries is entries, "a graph reads where it was captured"
        after = arena.clone()
        arena.copy_(before)
        expected = runner._forward(runner._inputs(padded(plan, size)))
        assert torch.equal(hidden, expected[: len(hidden)])
        assert torch.equal(runner.graphs.hidden[:size], expected)
        assert expected.isfinite().all()
        assert torch.equal(after, arena)
        is_written = written_bytes(runner, plan)
        assert torch.equal(after[~is_written], before[~is_written])
        assert after[is_written].view(torch.float32).isfinite().all()
        return hidden
