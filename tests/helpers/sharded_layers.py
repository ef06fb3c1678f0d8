"""Small random models cut for workers, which run as threads and meet wherever a sum over workers is taken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from lamella.attention.torch_backend import TorchBackend
from lamella.kv_cache.layout import build_layout
from lamella.model_executor.layers.contract import LayerInputs
from lamella.model_executor.layers.description import DecoderLayer, Model, Norm, Projection
from lamella.model_executor.layers.stack import Stack
from lamella.model_executor.layers.textbook import run_layer
from lamella.model_executor.layers.torch_operators import TorchOperators
from lamella.model_executor.layers.worker_sum import ONE_WORKER
from lamella.model_executor.models.config import ModelConfig, kv_sharing, layer_specs
from lamella.model_executor.models.sharding import Worker
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_attention import StepAttention
from lamella.model_executor.weights.parameters import is_norm
from tests.helpers.attention_cases import make_metadata, nan_arena
from tests.helpers.parsed_configs import parsed

FULL, SLIDING = "full_attention", "sliding_attention"
PAGE_TOKENS, LENGTHS = 4, (19, 1, 10)
WINDOW = 8
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {FULL: {**_ROPE, "rope_theta": 1e5}, SLIDING: _ROPE}
# Name -> (as transformers' classes begin, what its config has beside or in place of the above).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3, one kv head": (
        "Gemma3",
        {"num_key_value_heads": 1, "head_dim": 16, "layer_types": [SLIDING, FULL], "tie_word_embeddings": True},
    ),
    "gemma4, heads by layer": (
        "Gemma4",
        {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320,
            "use_double_wide_mlp": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gpt_oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mimo, K wider than V": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "num_key_value_heads": 1,
            "head_dim": 48,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3": ("Phi3", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "qwen2, biases": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen2_moe, a shared expert": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "olmo3, whole rows normed": ("Olmo3", {"layer_types": [SLIDING, FULL]}),
    "cohere2, parallel": ("Cohere2", {"layer_types": [SLIDING, FULL]}),
    "laguna, gates of heads": (
        "Laguna",
        {
            "head_dim": 16,
            "num_attention_heads_per_layer": [4, 8],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "gating": "per-head",
            "layer_types": [SLIDING, FULL],
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": {kind: {**rope, "partial_rotary_factor": 1.0} for kind, rope in _ROPES.items()},
        },
    ),
    "laguna, gates of elements": (
        "Laguna",
        {
            "head_dim": 16,
            "gating": "per-element",
            "layer_types": [SLIDING, FULL],
            "mlp_layer_types": ["dense", "dense"],
            "rope_parameters": {kind: {**rope, "partial_rotary_factor": 1.0} for kind, rope in _ROPES.items()},
        },
    ),
    "phimoe, a bias of the head": (
        "Phimoe",
        {"num_local_experts": 4, "lm_head_bias": True, "attention_bias": True, "rope_parameters": _ROPE},
    ),
}
_Result = TypeVar("_Result")


def case_config(name: str) -> ModelConfig:
    architecture, fields = CASES[name]
    return parsed(architecture, **{**_SIZES, **fields})


def random_tensors(model: Model, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values for each parameter of the whole model, by which it matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if is_norm(parameter.name):
            tensors[parameter.name] = 1 + values / 4
        elif values.dim() < 2:
            tensors[parameter.name] = values / 4
        elif parameter.name.startswith("embed_tokens"):
            tensors[parameter.name] = values / 10
        else:
            tensors[parameter.name] = values * parameter.shape[-1] ** -0.5
    return tensors


class Workers:
    """Threads that run in step. Outside of them, sums are of one worker."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.num_sums = 0
        self._own = threading.local()
        self._barrier = threading.Barrier(num_workers, timeout=60)
        self._given: list[torch.Tensor | None] = [None] * num_workers

    def run(self, function: Callable[[int], _Result]) -> list[_Result]:
        """function(rank) of every rank."""
        results: list[Any] = [None] * self.num_workers
        errors: list[BaseException] = []

        def run_one(rank: int) -> None:
            self._own.rank = rank
            torch.set_num_threads(1)  # each thread would begin OpenMP threads of its own
            try:
                with torch.inference_mode():
                    results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(self.num_workers)]
        num_threads = torch.get_num_threads()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(num_threads)
        for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise error
        return results

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """As `WorkerSum.sum`."""
        rank = getattr(self._own, "rank", None)
        if rank is None:
            return y
        self._given[rank] = y
        if self._barrier.wait() == 0:
            self.num_sums += 1
        given = [each for each in self._given if each is not None]
        total = torch.stack(given).sum(dim=0)
        self._barrier.wait()
        return total


class Passed(NamedTuple):
    """x and normed [T, hidden_size], before or behind a layer."""

    x: torch.Tensor
    normed: torch.Tensor


class WorkerOperators(TorchOperators):
    """Layers one by one, each of which may be given its input. before and after: of each layer."""

    def __init__(
        self,
        workers: Workers | None = None,
        worker: Worker | None = None,
        given: Sequence[Passed] | None = None,
    ) -> None:
        """workers and worker None: of the whole model. given: what every layer gets in place of what it would."""
        super().__init__(ONE_WORKER if workers is None else workers)
        self.before: list[Passed] = []
        self.after: list[Passed] = []
        self._workers = workers
        self._worker = worker
        self._given = given
        self._row_norms: set[str] = set()

    def prepare(self, model: Model) -> None:
        for layer in model.layers:
            if layer.attention.config.qk_norm == "projection":
                norms = (layer.attention.q_norm, layer.attention.k_norm)
                self._row_norms |= {norm.name for norm in norms if norm is not None}

    def embed(self, table: Projection, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        if self._workers is None or self._worker is None:
            return super().embed(table, token_ids, scale)
        # Tokens of other workers give zeros.
        own = self._worker.piece(table.num_out * self._worker.num_workers)
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        x = super().embed(table, (token_ids - own.start).where(is_own, 0), scale)
        return self._workers.sum(x * is_own.unsqueeze(1))

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._workers is None or norm.name not in self._row_norms:
            return super().norm(x, norm)
        mean_square = self._workers.sum(x.square().mean(dim=-1, keepdim=True)) / self._workers.num_workers
        return x * torch.rsqrt(mean_square + norm.eps) * norm.weight

    def run(
        self,
        step: StepAttention,
        layers: Sequence[DecoderLayer],
        following: Norm | None,
        inputs: Sequence[LayerInputs],
        x: torch.Tensor,
        normed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        next_norms = [*(layer.input_norm for layer in layers[1:]), following]
        for layer, next_norm, its_inputs in zip(layers, next_norms, inputs, strict=True):
            self.before.append(Passed(x.clone(), normed.clone()))
            if self._given is not None:
                x, normed = (each.clone() for each in self._given[layer.index])
            x, normed = run_layer(self, step, layer, next_norm, its_inputs, x, normed)
            self.after.append(Passed(x.clone(), normed.clone()))
        return x, normed


class Computed(NamedTuple):
    operators: WorkerOperators
    logits: torch.Tensor


def compute(
    model: Model, operators: WorkerOperators, tokens: torch.Tensor, hidden: torch.Tensor | None = None
) -> Computed:
    """Prompts of LENGTHS through a loaded model, each from its first token on. hidden: what logits are computed of; of
    its own where None."""
    stack = Stack(model, operators)
    specs = layer_specs(model.config, itemsize_bytes=4)
    layout = build_layout(specs, page_tokens=PAGE_TOKENS, kv_sharing=kv_sharing(model.config))
    num_pages = [-(-length // PAGE_TOKENS) for length in LENGTHS]
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    request = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    metadata, next_unit = [], 0
    for group in layout.groups:
        tables = np.full((len(LENGTHS), max(num_pages)), -1)
        next_unit = -(-next_unit // group.page_units) * group.page_units  # ids are multiples of a page's units
        for row, count in enumerate(num_pages):
            tables[row, :count] = next_unit + group.page_units * np.arange(count)
            next_unit += group.page_units * count
        slots = tables[request, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        metadata.append(
            make_metadata(
                page_tokens=PAGE_TOKENS,
                num_decodes=0,
                query_start=np.cumsum([0, *LENGTHS]),
                seq_lens=np.array(LENGTHS),
                first_blocks=np.zeros(len(LENGTHS), dtype=np.int64),
                block_tables=tables,
                slot_mapping=slots,
            )
        )
    most_units = max(group.page_units for group in layout.groups)
    arena = nan_arena((next_unit + most_units) * layout.unit_bytes)
    runner = ModelRunner(stack, TorchBackend(), layout, specs, arena, prunes=False)
    step = StepAttention(runner.backend, layout, runner.places, metadata, {})
    with torch.inference_mode():
        own = stack(tokens, torch.from_numpy(positions), step)
        logits = stack.logits(own if hidden is None else hidden)
    assert isinstance(logits, torch.Tensor)
    return Computed(operators, logits)
