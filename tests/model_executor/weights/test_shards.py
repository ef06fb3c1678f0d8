"""Models cut for workers: glued they are what they were, and together they compute what the whole model does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lamella.model_executor.layers import textbook
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.sharding import Worker, shard_config
from lamella.model_executor.weights.shards import ParameterShard, cut_weights, parameter_shards
from tests.helpers.sharded_layers import (
    CASES,
    LENGTHS,
    Computed,
    WorkerOperators,
    Workers,
    case_config,
    compute,
    random_tensors,
)

NUM_WORKERS = (1, 2, 4)
WITH_EXPERTS = [name for name in CASES if any("experts" in key for key in CASES[name][1])]
CUTS = [(name, False) for name in CASES] + [(name, True) for name in WITH_EXPERTS]


def whole_model(config: ModelConfig) -> tuple[Model, dict[str, torch.Tensor]]:
    model = Model(config, torch.float32)
    tensors = random_tensors(model)
    model.load(tensors)
    return model, tensors


def workers_of(num_workers: int, cuts_experts: bool = False) -> list[Worker]:
    return [Worker(rank, num_workers, cuts_experts) for rank in range(num_workers)]


def glued(shapes: dict[str, torch.Size], cut: list[tuple[list[ParameterShard], dict[str, torch.Tensor]]]) -> dict:
    """What the shards say of themselves, put together again. Fails where two workers' values differ."""
    whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for shards, tensors in cut:
        assert [shard.name for shard in shards] == list(tensors)
        for shard in shards:
            row = 0
            for part in shard.parts:
                piece = tensors[shard.name][row : row + len(part.rows)]
                row += len(part.rows)
                if part.is_zero:
                    assert not piece.any()
                    continue
                place = whole[shard.name][part.first_row + part.rows.start : part.first_row + part.rows.stop]
                place = place if part.columns is None else place[:, part.columns.start : part.columns.stop]
                assert place.isnan().all() or torch.equal(place, piece), "replicas differ"
                place.copy_(piece)
            assert row == len(tensors[shard.name])
    return whole


@pytest.mark.parametrize(("name", "cuts_experts"), CUTS, ids=str)
def test_shards_glued_are_the_model(name: str, cuts_experts: bool) -> None:
    config = case_config(name)
    _, tensors = whole_model(config)
    for num_workers in NUM_WORKERS:
        cut = []
        for worker in workers_of(num_workers, cuts_experts):
            shards = parameter_shards(config, worker)
            cut.append((shards, cut_weights(tensors, shards)))
        whole = glued({name: tensor.shape for name, tensor in tensors.items()}, cut)
        assert whole.keys() == tensors.keys()
        for parameter, tensor in tensors.items():
            assert torch.equal(whole[parameter], tensor), (parameter, num_workers)


def computed_by(
    workers: Workers, config: ModelConfig, tensors: dict[str, torch.Tensor], whole: Computed, cuts_experts: bool
) -> list[Computed]:
    """Every layer of what the uncut one has before it, and the logits of its hidden states."""
    hidden = whole.operators.after[-1].normed
    tokens = prompt_tokens(config)

    def run(rank: int) -> Computed:
        worker = Worker(rank, workers.num_workers, cuts_experts)
        model = Model(shard_config(config, worker), torch.float32)
        model.load(cut_weights(tensors, parameter_shards(config, worker)))
        return compute(model, WorkerOperators(workers, worker, whole.operators.before), tokens, hidden)

    return workers.run(run)


def prompt_tokens(config: ModelConfig) -> torch.Tensor:
    return torch.randint(config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def run_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Workers]:
    def begin(num_workers: int) -> Workers:
        workers = Workers(num_workers)
        monkeypatch.setattr(textbook, "reduce", workers.reduce)
        return workers

    return begin


@pytest.mark.parametrize(("name", "cuts_experts"), CUTS, ids=str)
def test_workers_together_compute_each_layer(
    name: str, cuts_experts: bool, run_workers: Callable[[int], Workers]
) -> None:
    config = case_config(name)
    model, tensors = whole_model(config)
    whole = compute(model, WorkerOperators(), prompt_tokens(config))
    for num_workers in NUM_WORKERS:
        workers = run_workers(num_workers)
        computed = computed_by(workers, config, tensors, whole, cuts_experts)
        assert workers.num_sums >= 1 + 2 * config.num_layers  # embeddings; attention and MLP of each layer
        for each in computed:
            assert largest_difference(each.operators.before[0].x, whole.operators.before[0].x) < 1e-5
            for own, uncut in zip(each.operators.after, whole.operators.after, strict=True):
                assert largest_difference(own.x, uncut.x) < 1e-5
                assert largest_difference(own.normed, uncut.normed) < 1e-5
        logits = torch.cat([each.logits for each in computed], dim=1)
        assert largest_difference(logits, whole.logits) < 1e-5


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()
