"""Batches that only decode, through captured graphs: what a graph reads is what the plan says, and padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.sizing import decode_table_widths
from lamella.kv_cache.step_memory import TableVersions
from lamella.model_executor import step_buffers
from lamella.model_executor.decode_graphs import DecodeBuffers, DecodeGraphs, batch_sizes, padding_plan
from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.step_buffers import StepInputs, StepUpload
from lamella.model_executor.step_plan import StepPlan
from tests.helpers.recorded_graphs import RecordedGraphs
from tests.helpers.simulation import full, sliding

CPU = torch.device("cpu")
PAGE_TOKENS = 4
TABLE_WIDTHS = (12, 5)  # a full group of 48 tokens, a window of 12
COLUMNS = ("token_ids", "positions", "seq_lens", "num_new")


def random_plan(generator: np.random.Generator, num_requests: int, *, extra_columns: int = 0) -> StepPlan:
    """One token each; tables as wide as the longest context needs, and `extra_columns` of null pages."""
    plan = padding_plan(num_requests, (0, 0))
    seq_lens = generator.integers(1, TABLE_WIDTHS[0] * PAGE_TOKENS + 1, size=num_requests)
    num_blocks = -(-seq_lens // PAGE_TOKENS)
    groups = []
    for group, width in zip(plan.groups, TABLE_WIDTHS, strict=True):
        first_blocks = np.maximum(num_blocks - generator.integers(1, width + 1, size=num_requests), 0)
        if width == TABLE_WIDTHS[0]:
            first_blocks[:] = 0
        needed = num_blocks - first_blocks
        tables = np.full((num_requests, int(needed.max()) + extra_columns), -1)
        for row, count in enumerate(needed.tolist()):
            tables[row, :count] = generator.integers(1, 1000, size=count)
        groups.append(
            dataclasses.replace(
                group,
                block_tables=tables,
                first_blocks=first_blocks,
                first_keys=generator.integers(first_blocks * PAGE_TOKENS, seq_lens),
                slot_mapping=generator.integers(4, 4000, size=num_requests),
            )
        )
    return dataclasses.replace(
        plan,
        token_ids=generator.integers(1, 300, size=num_requests),
        positions=seq_lens - 1,
        seq_lens=seq_lens,
        groups=tuple(groups),
        num_sampled=np.ones(num_requests, dtype=np.int64),
    )


def read_back(inputs: StepInputs) -> torch.Tensor:
    """Hidden states of a model that only says what it is given: int64 [B, 4 + 3 * groups]. Of the tables it reads what
    attention does: the entries from the first key's block to that of the newest token, here as a weighted sum."""
    seq_lens = inputs.metadata[0].seq_lens
    columns = [inputs.token_ids, inputs.positions, seq_lens, torch.diff(inputs.metadata[0].query_start)]
    for metadata in inputs.metadata:
        first = metadata.first_keys // PAGE_TOKENS
        count = (metadata.seq_lens + PAGE_TOKENS - 1) // PAGE_TOKENS - first
        numbers = torch.arange(TABLE_WIDTHS[0])
        places = (first[:, None] + numbers - metadata.first_blocks[:, None]) % metadata.block_tables.shape[1]
        pages = metadata.block_tables[metadata.table_rows[:, None], places]
        seen = torch.where(numbers < count[:, None], pages, 0)
        columns += [metadata.first_keys, metadata.slot_mapping, (seen * (numbers + 1)).sum(1)]
    return torch.stack(columns, 1)


def expected_rows(plan: StepPlan) -> list[list[int]]:
    """What `read_back` gives for the plan, one number at a time."""
    rows = []
    for request in range(len(plan.seq_lens)):
        row = [plan.token_ids[request], plan.positions[request], plan.seq_lens[request], 1]
        for group in plan.groups:
            first = group.first_keys[request] // PAGE_TOKENS
            blocks = range(first, -(-plan.seq_lens[request] // PAGE_TOKENS))
            pages = [group.block_tables[request, block - group.first_blocks[request]] for block in blocks]
            row += [group.first_keys[request], group.slot_mapping[request]]
            row.append(sum(page * (column + 1) for column, page in enumerate(pages)))
        rows.append([int(value) for value in row])
    return rows


PADDING = [0, 0, 0, 1, 0, -1, 0, 0, -1, 0]
LAYOUT = build_layout([full(), sliding(12)], page_tokens=PAGE_TOKENS)


def capture(forward=read_back, *, sizes=(1, 2, 4, 8, 9)) -> tuple[DecodeGraphs, RecordedGraphs]:
    maker = RecordedGraphs()
    tables = DeviceTables(CPU, LAYOUT)
    buffers = DecodeBuffers(tables, max_num_requests=sizes[-1], table_widths=TABLE_WIDTHS, page_tokens=PAGE_TOKENS)
    return DecodeGraphs(forward, buffers, StepUpload(CPU), maker, sizes), maker


def run(graphs: DecodeGraphs, plan: StepPlan) -> list[list[int]]:
    size = graphs.size_for(plan)
    graphs.load(plan, size)
    return graphs.replay(size, size).tolist()


def test_batch_sizes():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(3) == (1, 2, 3)
    assert batch_sizes(9) == (1, 2, 4, 8, 9)
    assert batch_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert batch_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert batch_sizes(1000) == batch_sizes(512) == (1, 2, 4, *range(8, 513, 8))


def test_a_replay_sees_the_plan_and_padding():
    """Batches grow and shrink, tables are narrower and wider than before, and what an earlier step left behind in
    tables is never read."""
    generator = np.random.default_rng(4)
    graphs, maker = capture()
    for num_requests in (9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 4, 2, 1, 9):
        plan = random_plan(generator, num_requests, extra_columns=int(generator.integers(0, 9)))
        rows = run(graphs, plan)
        assert rows == expected_rows(plan) + [PADDING] * (len(rows) - num_requests)
    assert maker.num_replays == [3, 5, 3, 2, 2]  # of 9, 8, 4, 2 and 1: the largest is captured first


def test_rows_of_any_order_and_tables_that_come_in_parts():
    """Requests in other rows than their numbers; later steps send what new blocks and another stamp say, no more."""
    graphs, _ = capture()
    plan, pages = random_plan(np.random.default_rng(8), 5), np.arange(100, 150).reshape(2, 5, 5)
    rows, stamps, zeros = np.array([8, 1, 0, 5, 3]), np.arange(10).reshape(2, 5), np.zeros(5, dtype=np.int64)
    sent = []

    def run_with(seq_lens):
        groups = tuple(
            dataclasses.replace(part, block_tables=table.copy(), first_blocks=zeros, first_keys=zeros)
            for part, table in zip(plan.groups, pages, strict=True)
        )
        step = dataclasses.replace(
            plan, seq_lens=np.array(seq_lens), positions=np.array(seq_lens) - 1, groups=groups,
            tables=TableVersions(rows, stamps.copy()),
        )  # fmt: skip
        before = graphs.buffers.tables.entries.clone()
        assert run(graphs, step)[:5] == expected_rows(step)
        sent.append(int((graphs.buffers.tables.entries != before).sum()))

    run_with([4, 4, 1, 8, 16])
    run_with([5, 4, 1, 8, 16])
    pages[1, 4, 2:4] += 1000
    stamps[1, 4] = 77
    run_with([5, 4, 2, 9, 16])
    assert sent == [2 * (1 + 1 + 1 + 2 + 4), 2, 2 + 2]


def test_a_graph_does_not_run_where_its_tables_are_no_longer():
    graphs, _ = capture()
    plan = random_plan(np.random.default_rng(2), 3)
    assert graphs.size_for(plan) == 4
    graphs.buffers.tables.reserve(graphs.buffers.tables.tables[0].shape[0] + 1, TABLE_WIDTHS)
    assert graphs.size_for(plan) is None


def test_token_ids_may_be_changed_before_the_replay():
    graphs, _ = capture()
    plan = random_plan(np.random.default_rng(3), 3)
    token_ids = graphs.load(plan, 4)
    assert token_ids.tolist() == [*plan.token_ids.tolist(), 0]
    token_ids[1] = 777
    assert graphs.replay(4, 3)[:, 0].tolist() == [int(plan.token_ids[0]), 777, int(plan.token_ids[2])]


def test_which_plans_a_graph_takes():
    graphs, _ = capture()
    plan = random_plan(np.random.default_rng(5), 3)
    assert graphs.size_for(plan) == 4
    assert graphs.size_for(dataclasses.replace(plan, num_decodes=2)) is None
    assert graphs.size_for(random_plan(np.random.default_rng(5), 10)) is None
    longest = dataclasses.replace(plan, seq_lens=np.array([1, 2, 48]))
    full_group = dataclasses.replace(plan.groups[0], first_blocks=np.zeros(3, dtype=np.int64))
    window = dataclasses.replace(plan.groups[1], first_blocks=np.array([0, 0, 7]))
    assert graphs.size_for(dataclasses.replace(longest, groups=(full_group, window))) == 4
    wider = dataclasses.replace(window, first_blocks=np.array([0, 0, 6]))  # six blocks, where five fit
    assert graphs.size_for(dataclasses.replace(longest, groups=(full_group, wider))) is None
    longer = dataclasses.replace(longest, seq_lens=np.array([1, 2, 49]), groups=(full_group, window))
    assert graphs.size_for(longer) is None


@pytest.mark.parametrize("interval", [1, 4, 9])
@pytest.mark.parametrize("page_tokens", [1, 3, 4, 16])
def test_table_widths_cover_what_decodes_hold(interval, page_tokens):
    """By walking a request to its end: pages go when an interval of tokens has left the window, and a step late."""
    layout = build_layout([full(), sliding(7)], page_tokens=page_tokens)
    widths = decode_table_widths(layout, max_model_len=64, interval_tokens=interval)
    first_kept = most = 0
    for position in range(64):
        first_needed = max(0, position - 1 - 6)  # of the step before
        lag = first_needed - first_kept * page_tokens
        if lag >= max(interval, page_tokens):
            first_kept = first_needed // page_tokens
        most = max(most, position // page_tokens + 1 - first_kept)
    assert widths[0] == -(-64 // page_tokens)
    assert most <= widths[1] <= min(widths[0], most + 2)


def host_lengths(inputs: StepInputs) -> torch.Tensor:
    rows = read_back(inputs).clone()
    rows[:, 2] = torch.from_numpy(inputs.metadata[0].seq_lens_host)
    return rows


class Alternating:
    """Another operation at every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        rows = read_back(inputs)
        return rows + 0 if self.calls % 2 else rows * 1


class NewMemory:
    """Reads a tensor that it makes anew at every call, outside of what is recorded."""

    def __init__(self):
        self.values = []

    def __call__(self, inputs):
        self.values.append(torch.from_numpy(np.zeros(1, dtype=np.int64)))
        return read_back(inputs) + self.values[-1]


def waiting(inputs: StepInputs) -> torch.Tensor:
    return read_back(inputs)[:, : 100 + int(inputs.token_ids.sum())]


@pytest.mark.parametrize("forward", [host_lengths, Alternating(), NewMemory(), waiting])
def test_what_a_graph_could_not_do_is_noticed(forward):
    """Of the recording that stands in for CUDA's graphs, and of the test above."""
    plan = random_plan(np.random.default_rng(6), 2)
    with pytest.raises(AssertionError):  # noqa: PT012
        graphs, _ = capture(forward, sizes=(1, 2))
        assert run(graphs, plan) == expected_rows(plan)
        assert run(graphs, plan) == expected_rows(plan)


def test_other_padding_is_noticed(monkeypatch):
    monkeypatch.setattr(step_buffers, "NO_SLOT", 3)
    with pytest.raises(AssertionError):
        test_a_replay_sees_the_plan_and_padding()
