"""What a layer launches and how many bytes that moves, eager and fused: the figures in docs/gpu.md."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lamella.attention.contract import AttentionParams, LayerCache
from lamella.model_executor.layers.contract import LayerInputs, Operators
from lamella.model_executor.layers.description import Model
from lamella.model_executor.layers.torch_operators import TorchOperators
from lamella.model_executor.layers.triton import activation, heads, norm
from lamella.model_executor.layers.triton.operators import TritonOperators
from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormPlaces,
    RotaryConfig,
)
from lamella.model_executor.step_attention import LayerPlace
from operator_compile_report import launches

VIEWS = {"t", "slice", "unflatten", "flatten", "split_with_sizes", "chunk", "view", "detach"}
PRODUCTS = {"linear", "mm", "addmm"}
ALLOCATIONS = {"new_empty", "empty"}

META = torch.device("meta")
CPU = torch.device("cpu")


class TorchTraffic(TorchDispatchMode):
    """Counts the operations of torch that would launch a kernel, and the bytes of what they read and write; those of
    matrix products are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in VIEWS:
            self.counts[name] += 1
        if name not in VIEWS | PRODUCTS:
            tensors = [result]
            for argument in args:
                tensors += argument if isinstance(argument, (list, tuple)) else [argument]
            self.num_bytes += sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))
        return result


class Launches:
    """Stands before a kernel and counts. What the interpreter asks of torch on the way is not counted."""

    def __init__(self, kernel: Any, name: str, counts: Counter[str]) -> None:
        self.kernel, self.name, self.counts = kernel, name, counts

    def __getitem__(self, grid: Any) -> Any:
        self.counts[self.name] += 1

        def launch(*arguments: Any, **constants: Any) -> None:
            with _disable_current_modes():
                self.kernel[grid](*arguments, **constants)

        return launch


class QueriesThrough:
    """Instead of attention: returns the queries that it is given. Has pages for K and V."""

    def __init__(self, config: AttentionConfig, num_tokens: int, device: torch.device) -> None:
        pages = torch.zeros(num_tokens, 1, config.num_kv_heads, config.k_dim, dtype=torch.bfloat16, device=device)
        params = AttentionParams(spec=config.spec(2), num_heads=config.num_heads, scale=config.scale)
        self.backend = SimpleNamespace(name="triton")
        self._place = LayerPlace(0, params, LayerCache(pages, pages.clone()))
        self._metadata = SimpleNamespace(slot_mapping=torch.arange(num_tokens, device=device))

    def output_rows(self, layer: int) -> None:
        return None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q

    def place(self, layer: int, *, has_kv: bool) -> LayerPlace:
        assert has_kv
        return self._place

    def taken(self, layer: int) -> Any:
        return self._metadata

    def attend_written(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return q


def gemma_layer(num_heads: int, num_kv_heads: int, head_dim: int, width: int, mlp_width: int) -> ModelConfig:
    """Of one full layer."""
    attention = AttentionConfig(
        kind="full_attention",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=head_dim,
        v_dim=head_dim,
        scale=1.0,
        rotary=RotaryConfig(head_dim, 1e6),
        qk_norm="heads",
    )
    layer = LayerConfig(attention, MLPConfig(mlp_width, "gelu_tanh"), NormPlaces(True, True, True, True))
    return ModelConfig(
        architecture="gemma3",
        vocab_size=16,
        hidden_size=width,
        layers=(layer,),
        norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def layer_traffic(operators: Operators, config: ModelConfig, num_tokens: int, device: torch.device) -> TorchTraffic:
    """Of the one layer of `config` in bfloat16."""
    model = Model(config, torch.bfloat16)
    model.load(
        {
            each.name: torch.ones(each.shape, device=device)
            if each.name.endswith("norm.weight")
            else torch.zeros(each.shape, dtype=torch.bfloat16, device=device)
            for each in model.parameters()
        }
    )
    attention = config.layers[0].attention
    tables = torch.zeros(num_tokens, 1, attention.k_dim // 2, dtype=torch.bfloat16, device=device)
    x, normed = (torch.zeros(num_tokens, config.hidden_size, dtype=torch.bfloat16, device=device) for _ in range(2))
    step: Any = QueriesThrough(attention, num_tokens, device)
    with torch.inference_mode(), TorchTraffic() as traffic:
        operators.run(step, model.layers, model.norm, [LayerInputs((tables, tables))], x, normed)
    return traffic


def test_a_fused_layer_is_four_products_and_four_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Counter[str] = Counter()
    for module, name in (
        (norm, "norm_kernel"),
        (norm, "add_norm_kernel"),
        (heads, "heads_kernel"),
        (activation, "gated_kernel"),
    ):
        monkeypatch.setattr(module, name, Launches(getattr(module, name), name, launched))
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    traffic = layer_traffic(TritonOperators(), gemma_layer(2, 1, 16, 32, 48), 1, device)
    assert launched == {"heads_kernel": 1, "add_norm_kernel": 2, "gated_kernel": 1}
    launching = {name: count for name, count in traffic.counts.items() if name not in ALLOCATIONS}
    assert set(launching) <= PRODUCTS
    assert sum(launching.values()) == 4


@pytest.mark.parametrize(
    ("name", "config", "eager_bytes", "fused_bytes"),
    [
        ("gemma-3-270m", gemma_layer(4, 1, 256, 640, 2048), 132_096, 29_184),
        ("gemma-3-27b", gemma_layer(32, 16, 128, 5376, 21504), 960_512, 248_064),
    ],
    ids=["270m", "27b"],
)
def test_bytes_for_each_token(name: str, config: ModelConfig, eager_bytes: int, fused_bytes: int) -> None:
    """From one token to two: weights, which both read once, drop out."""
    one, two = (layer_traffic(TorchOperators(), config, count, META) for count in (1, 2))
    assert one.counts == two.counts
    assert sum(count for name, count in one.counts.items() if name in PRODUCTS) == 4
    assert sum(one.counts.values()) == 40
    write_kv = 2 * 2 * config.layers[0].attention.key_columns * 2
    assert two.num_bytes - one.num_bytes + write_kv == eager_bytes

    rows = {launch.kernel: launch.row_bytes for launch in launches() if launch.shape in (name, f"{name}, gelu_tanh")}
    assert rows["heads"] + 2 * rows["add_norm"] + rows["gated"] == fused_bytes
