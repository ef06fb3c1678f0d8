"""The block manager's first keys reach the attention of each group, through the real plan and runner."""

from __future__ import annotations

import pytest
import torch

from lamella.attention.contract import AttentionParams
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor.runner import ModelRunner
from tests.helpers.attention_cases import nan_arena
from tests.helpers.simulation import Simulation

WINDOW_TOKENS, PAGE_TOKENS = 6, 4
SHAPE = {"num_kv_heads": 1, "k_dim": 1, "v_dim": 1, "itemsize_bytes": 4}
SPECS = [SlidingWindowSpec(window_tokens=WINDOW_TOKENS, **SHAPE), FullAttentionSpec(**SHAPE)]


class Averages:
    """All scores are 0 and the value of a key is its position: a query's output is the mean position that it sees."""

    dtype = torch.float32

    def attention_params(self, specs):
        return [AttentionParams(spec=spec, num_heads=1, scale=1.0) for spec in specs]

    def __call__(self, token_ids, positions, attention):
        value = positions.float().view(-1, 1, 1)
        zeros = torch.zeros_like(value)
        self.positions = positions.tolist()
        self.means = [attention(layer, zeros, zeros, value).flatten().tolist() for layer in range(2)]
        return torch.zeros(len(positions), 1)

    def logits(self, hidden):
        return torch.tensor([[0.0, 1.0]]).expand(len(hidden), 2)


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=lambda backend: backend.name)
def test_each_request_sees_from_its_own_first_key_on(backend):
    simulation = Simulation(SPECS, page_tokens=PAGE_TOKENS, chunk_tokens=7)
    manager, scheduler = simulation.manager, simulation.scheduler
    layout = build_layout(SPECS, page_tokens=PAGE_TOKENS)
    sliding_group, full_group = (layout.layer_address(layer)[0] for layer in range(2))
    arena = nan_arena(manager.inspect().arena.num_slabs * layout.slab_bytes)
    arena[: layout.slab_bytes] = 0
    model = Averages()
    runner = ModelRunner(model, backend, layout, SPECS, arena, prunes=False)
    first_key = {"decoded": 0, "chunked": 0}
    num_checked = {"decoded": 0, "chunked": 0}
    rows_of = {}

    def step():
        plan = scheduler.schedule()
        requests = [scheduler.rows.request(row).request_id for row in scheduler.scheduled_rows.tolist()]
        rows_of.update(zip(requests, scheduler.scheduled_rows.tolist(), strict=True))
        assert plan.groups[sliding_group].first_keys.tolist() == [first_key[name] for name in requests]
        assert plan.groups[full_group].first_keys.tolist() == [0] * len(requests)
        result = runner.execute(plan)
        for index, name in enumerate(requests):
            for token in range(int(plan.query_start[index]), int(plan.query_start[index + 1])):
                query = model.positions[token]
                lowest = max(0, query - WINDOW_TOKENS + 1, first_key[name])
                assert model.means[0][token] == pytest.approx((lowest + query) / 2, abs=1e-5)
                assert model.means[1][token] == pytest.approx(query / 2, abs=1e-5)
                num_checked[name] += first_key[name] > max(0, query - WINDOW_TOKENS + 1)
        scheduler.update(result)
        return requests

    simulation.add("decoded", [1] * 5, 12)
    step()
    step()
    simulation.add("chunked", [0] * 20, 3)
    assert step() == ["decoded", "chunked"]
    # Positions 0..6 and 0..5 are computed. From now on they have lost what lies below 5 and 4.
    first_key.update(decoded=5, chunked=4)
    for name, lowest in first_key.items():
        manager.inspect().rows.first_keys[sliding_group, rows_of[name]] = lowest
    while scheduler.has_requests:
        step()
    # Queries 7..9 of one and 6..8 of the other would have seen further down.
    assert num_checked == {"decoded": 3, "chunked": 3}
