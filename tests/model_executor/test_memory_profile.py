"""What is left of a device's memory for KV, and the steps that are measured for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lamella import ConfigError, EngineConfig
from lamella.errors import CapacityError, InvariantError
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.memory import MemoryProfile
from lamella.model_executor.memory_profile import LargestBatch, decodes_plan, prompts_plan
from tests.helpers.simulation import full, sliding

GIB = 2**30
PROFILE = MemoryProfile(
    total_bytes=80 * GIB, foreign_bytes=2 * GIB, weights_bytes=54 * GIB, step_bytes=6 * GIB, graph_bytes=1 * GIB
)


@pytest.mark.parametrize(("utilization", "left_gib"), [(0.9, 9), (1.0, 17), (0.8, 1)])
def test_kv_gets_what_is_left(utilization, left_gib):
    assert PROFILE.kv_bytes(utilization) == left_gib * GIB


@pytest.mark.parametrize("name", ["foreign_bytes", "weights_bytes", "step_bytes", "graph_bytes"])
def test_each_part_counts_to_the_byte(name):
    more = dataclasses.replace(PROFILE, **{name: getattr(PROFILE, name) + 12345})
    assert more.kv_bytes(0.9) == 9 * GIB - 12345


def test_a_byte_is_enough_and_none_is_not():
    assert dataclasses.replace(PROFILE, step_bytes=15 * GIB - 1).kv_bytes(0.9) == 1
    with pytest.raises(CapacityError, match=r"raise it above 0\.900, "):
        dataclasses.replace(PROFILE, step_bytes=15 * GIB).kv_bytes(0.9)


def test_the_error_names_every_figure_and_ways_out():
    with pytest.raises(CapacityError) as refused:
        PROFILE.kv_bytes(0.75)
    assert str(refused.value) == (
        "gpu_memory_utilization=0.75 allows 60.00 GiB of the device's 80.00 GiB, and 2.00 GiB are held outside this "
        "process's tensors, 54.00 GiB by the weights, 6.00 GiB by the largest step, 1.00 GiB by captured graphs: "
        "nothing is left for the KV cache; raise it above 0.787, lower max_num_batched_tokens or max_num_seqs, set "
        "enforce_eager=True, or free memory that others hold"
    )


def test_the_error_advises_only_what_helps():
    full_up = dataclasses.replace(PROFILE, weights_bytes=90 * GIB, graph_bytes=0)
    with pytest.raises(CapacityError) as refused:
        full_up.kv_bytes(1.0)
    assert "raise it" not in str(refused.value)
    assert "enforce_eager" not in str(refused.value)


def test_the_named_utilization_is_enough():
    with pytest.raises(CapacityError) as refused:
        PROFILE.kv_bytes(0.6)
    named = float(str(refused.value).split("raise it above ")[1].split(",")[0])
    assert PROFILE.kv_bytes(named + 0.001) > 0


def test_memory_cannot_be_negative():
    with pytest.raises(InvariantError, match="foreign_bytes=-1"):
        dataclasses.replace(PROFILE, foreign_bytes=-1)


@pytest.mark.parametrize("value", [0, -0.1, 1.01])
def test_utilization_is_a_share(value):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=.*must lie in \(0, 1\]"):
        EngineConfig(model="m", gpu_memory_utilization=value)
    assert EngineConfig(model="m").gpu_memory_utilization == 0.9


LAYOUT = build_layout([full(), sliding(6)], page_tokens=4)


@pytest.mark.parametrize("num_tokens", [5, 8, 13, 64])
def test_prompts_are_all_tokens_of_all_requests(num_tokens):
    plan = prompts_plan(
        LAYOUT, LargestBatch(num_requests=5, num_tokens=num_tokens, table_widths=(9, 3), line_widths=(9, 5))
    )
    lengths = np.diff(plan.query_start)
    assert len(lengths) == 5
    assert lengths.sum() == num_tokens == len(plan.token_ids) == len(plan.positions)
    assert lengths.max() - lengths.min() <= 1
    assert plan.seq_lens.tolist() == lengths.tolist()
    assert plan.num_decodes == (lengths == 1).sum()
    assert (lengths[: plan.num_decodes] == 1).all()
    assert plan.positions.tolist() == [position for length in lengths for position in range(length)]
    assert plan.sampled_tokens.tolist() == [end - 1 for end in plan.query_start[1:]]
    for group in plan.groups:
        assert (group.block_tables == -1).all()
        assert group.block_tables.shape == (5, -(-int(lengths.max()) // 4))
        assert group.slot_mapping.tolist() == [-1] * num_tokens


def test_decodes_have_the_widest_tables_up_to_one_newest_token():
    plan = decodes_plan(LAYOUT, LargestBatch(num_requests=3, num_tokens=64, table_widths=(9, 3), line_widths=(9, 5)))
    assert plan.num_decodes == len(plan.token_ids) == len(plan.sample_requests) == 3
    assert plan.seq_lens.tolist() == [36] * 3
    assert plan.positions.tolist() == [35] * 3
    assert [group.block_tables.shape for group in plan.groups] == [(3, 9), (3, 3)]
    assert [group.first_blocks.tolist() for group in plan.groups] == [[0] * 3, [6] * 3]
