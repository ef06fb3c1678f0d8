"""Models cut for workers: glued they are what they were, and together they compute what the whole model does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lamella.errors import ConfigError, InvariantError
from lamella.model_executor.layers.description import Experts, Model
from lamella.model_executor.layers.native_mlp import native_experts
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.registry import parse_config
from lamella.model_executor.models.sharding import (
    SHARDING,
    Inputs,
    OfExpert,
    Outputs,
    ShardRule,
    Unit,
    Whole,
    Worker,
    shard_config,
)
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.weight_map import WeightMap
from lamella.model_executor.weights import shards as shards_module
from lamella.model_executor.weights.loading import load_config, load_weights, resolve_model
from lamella.model_executor.weights.shards import ParameterShard, PartShard, cut_weights, parameter_shards
from tests.helpers.random_models import ARCHITECTURES, draw_config, save_random_model
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


@pytest.mark.parametrize(("name", "cuts_experts"), CUTS, ids=str)
def test_workers_together_compute_each_layer(name: str, cuts_experts: bool) -> None:
    config = case_config(name)
    model, tensors = whole_model(config)
    whole = compute(model, WorkerOperators(), prompt_tokens(config))
    for num_workers in NUM_WORKERS:
        workers = Workers(num_workers)
        computed = computed_by(workers, config, tensors, whole, cuts_experts)
        assert workers.num_sums >= 1 + 2 * config.num_layers  # embeddings; attention and MLP of each layer
        for each in computed:
            assert largest_difference(each.operators.before[0].x, whole.operators.before[0].x) < 1e-5
            for own, uncut in zip(each.operators.after, whole.operators.after, strict=True):
                assert largest_difference(own.x, uncut.x) < 1e-5
                assert largest_difference(own.normed, uncut.normed) < 1e-5
        logits = torch.cat([each.logits for each in computed], dim=1)
        assert largest_difference(logits, whole.logits) < 1e-5


def furthest(name: str, cuts_experts: bool, workers: Workers) -> float:
    """How far a worker's layer is from the whole model's."""
    config = case_config(name)
    model, tensors = whole_model(config)
    whole = compute(model, WorkerOperators(), prompt_tokens(config))
    computed = computed_by(workers, config, tensors, whole, cuts_experts)
    pairs = [pair for each in computed for pair in zip(each.operators.after, whole.operators.after, strict=True)]
    return max(largest_difference(own.x, uncut.x) for own, uncut in pairs)


def test_a_wrong_kv_head_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in the wrong order have the right shapes."""

    def in_turns(worker: Worker, count: int) -> range:
        return range(worker.rank % count, worker.rank % count + 1)

    assert furthest("qwen2, biases", False, Workers(4)) < 1e-5
    monkeypatch.setattr(Worker, "kv_heads", in_turns)
    assert furthest("qwen2, biases", False, Workers(4)) > 1e-2


def test_a_bias_that_each_worker_adds_before_the_sum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = OfExpert(Inputs(Unit.ROW, bias_before_sum=False))
    use_rules(monkeypatch, {"mlp.experts.down_proj": rule})
    assert furthest("gpt_oss", True, Workers(2)) > 1e-2
    assert furthest("gpt_oss", False, Workers(2)) < 1e-5  # each expert's is one worker's


def test_a_sum_that_is_not_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(2)
    monkeypatch.setattr(workers, "sum", lambda y: y)
    assert furthest("mixtral", False, workers) > 1e-2


def use_rules(monkeypatch: pytest.MonkeyPatch, changed: dict[str, ShardRule | None]) -> None:
    """None: without a rule."""
    rules = {name: rule for name, rule in {**SHARDING, **changed}.items() if rule is not None}
    monkeypatch.setattr(shards_module, "weight_map", lambda config: WeightMap(sharding=rules))


def test_a_parameter_without_a_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_rules(monkeypatch, {"self_attn.sinks": None})
    with pytest.raises(InvariantError, match=r"no rule by which layers\.0\.self_attn\.sinks is divided"):
        parameter_shards(case_config("gpt_oss"), Worker(0, 2))


@pytest.mark.parametrize(
    ("name", "rule", "told"),
    [
        ("self_attn.sinks", Whole(), r"layers\.0\.self_attn\.sinks\.vector: .* is \[4\], .* wants \[2\]"),
        ("self_attn.o_proj", Outputs(Unit.ROW), r"o_proj\.weight: .* is \[32, 64\], .* wants \[64, 32\]"),
    ],
)
def test_a_rule_that_does_not_fit_the_workers_model_is_told(
    name: str, rule: ShardRule, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rules(monkeypatch, {name: rule})
    with pytest.raises(InvariantError, match=told):
        parameter_shards(case_config("gpt_oss"), Worker(0, 2))


def test_slices_by_part() -> None:
    """Four workers, two KV heads of 16: the second worker's query head reads the first one, as the first worker's."""
    found = {shard.name: shard for shard in parameter_shards(case_config("qwen2, biases"), Worker(1, 4))}
    name = "layers.0.self_attn"
    expected = [
        PartShard(f"{name}.q_proj.weight", 0, range(16, 32)),
        PartShard(f"{name}.k_proj.weight", 64, range(16)),
        PartShard(f"{name}.v_proj.weight", 96, range(16)),
    ]
    assert found[f"{name}.qkv_proj.weight"] == ParameterShard(f"{name}.qkv_proj.weight", (48, 64), tuple(expected))
    assert found[f"{name}.qkv_proj.bias"].parts[1] == PartShard(f"{name}.k_proj.bias", 64, range(16))
    o_proj = PartShard(f"{name}.o_proj.weight", 0, range(64), range(16, 32))
    assert found[f"{name}.o_proj.weight"] == ParameterShard(f"{name}.o_proj.weight", (64, 16), (o_proj,))
    gate_up = found["layers.0.mlp.gate_up_proj.weight"]
    assert [(part.first_row, part.rows) for part in gate_up.parts] == [(0, range(24, 48)), (96, range(24, 48))]
    assert found["layers.0.mlp.down_proj.weight"].parts[0].columns == range(24, 48)
    assert found["embed_tokens.weight"].parts == (PartShard("embed_tokens.weight", 0, range(80, 160)),)
    assert found["norm.weight"].parts == (PartShard("norm.weight", 0, range(64)),)


def test_experts_by_expert_and_by_width() -> None:
    config, name = case_config("gpt_oss"), "layers.1.mlp.experts"
    for cuts_experts, shape, numbers in ((False, (128, 96), [2, 3]), (True, (256, 48), [0, 1, 2, 3])):
        shards = parameter_shards(config, Worker(1, 2, cuts_experts))
        found = {shard.name: shard for shard in shards}
        weight, bias = found[f"{name}.down_proj.weight"], found[f"{name}.down_proj.bias"]
        assert weight.shape == shape
        assert [part.name for part in weight.parts] == [f"{name}.{each}.down_proj.weight" for each in numbers]
        assert [part.first_row for part in weight.parts] == [64 * each for each in numbers]
        # Biases that are added before the sum are the first worker's.
        assert {part.is_zero for part in bias.parts} == {cuts_experts}
        assert found["layers.1.mlp.router.vector"].shape == (4, 64)


def test_the_native_path_refuses_some_of_a_layers_experts() -> None:
    """The kernels have an expert for every logit of the router."""
    experts = Model(shard_config(case_config("gpt_oss"), Worker(1, 2)), torch.float32).layers[0].mlp
    assert isinstance(experts, Experts)
    with pytest.raises(ConfigError, match=r"experts 2 to 3 of 4: the native path .*cuts_experts=True"):
        native_experts(experts, lambda projection, start, stop: pytest.fail("nothing is made of it"))


def test_a_checkpoint_that_holds_q_k_and_v_fused(tmp_path: Path) -> None:
    """Phi 3's files have them as one tensor; cut, each worker has its rows of each."""
    theirs = save_random_model(tmp_path, "phi3", 1).config
    source = resolve_model(str(tmp_path))
    config = load_config(source)
    tensors = load_weights(source, Model(config, torch.float32))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        fused = file.get_tensor("model.layers.1.self_attn.qkv_proj.weight")
    dim = theirs.hidden_size // theirs.num_attention_heads
    q, k, v = fused.split([dim * heads for heads in (theirs.num_attention_heads, *[theirs.num_key_value_heads] * 2)])
    assert theirs.num_key_value_heads > 1
    for worker in workers_of(2):
        model = Model(shard_config(config, worker), torch.float32)
        model.load(cut_weights(tensors, parameter_shards(config, worker)))
        own = torch.cat([each.chunk(2)[worker.rank] for each in (q, k, v)])
        assert torch.equal(model.layers[1].attention.qkv_proj.weight, own)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_can_be_cut(architecture: str) -> None:
    """By rules for all of its parameters, which fit the workers' models."""
    fields = draw_config(architecture, 0).to_dict()
    config = parse_config(TypedFields(fields, "config.json"))
    for cuts_experts in (False, True):
        for worker in workers_of(2, cuts_experts):
            names = [each.name for each in Model(config, torch.float32).parameters()]
            assert [each.name for each in parameter_shards(config, worker)] == names


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()
