"""A layer of every description on the torch operators, against the same layer written out in dense float64.

Two layers each, over prompts that are computed in one step: so that the second may read the first one's K and V, and
that what leaves the last layer may be a few tokens only.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lamella.attention.torch_backend import TorchBackend
from lamella.kv_cache.layout import build_layout
from lamella.model_executor.layers.description import Model
from lamella.model_executor.layers.stack import Stack
from lamella.model_executor.layers.torch_operators import TorchOperators
from lamella.model_executor.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormPlaces,
    RotaryConfig,
    kv_sharing,
    layer_specs,
)
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_attention import StepAttention
from tests.helpers.attention_cases import make_metadata, nan_arena
from tests.helpers.pairwise import pairwise

NUM_HEADS, NUM_KV_HEADS, K_DIM = 4, 2, 8
HIDDEN, MLP_WIDTH, VOCAB, EPS = 24, 20, 30, 1e-5
PAGE_TOKENS, LENGTHS = 4, (9, 1, 4)
LAST_TOKENS = np.array([7, 8, 9, 13])  # two of the first prompt, the last of the others

PLACES = ("input", "post_attention", "mlp", "post_mlp")
SWITCH = (False, True)
# What a layer is made of; the first choice of each is that of the simplest layer.
OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(PLACES, SWITCH),
    "qk_norm": (None, "heads"),
    "has_qkv_bias": SWITCH,
    "has_output_bias": SWITCH,
    "has_mlp_bias": SWITCH,
    "rotary": (None, RotaryConfig(4, 100.0), RotaryConfig(K_DIM, 1000.0)),
    "v_dim": (K_DIM, 6),
    "kv_owner": (None, 0),
}
# What goes with it; every pair of choices occurs.
SURROUNDINGS: dict[str, tuple[Any, ...]] = {
    "window_tokens": (None, 3),
    "softcap": (None, 1.5),
    "activation": ("silu", "gelu_tanh"),
    "position_divisor": (1.0, 4.0),
    "embedding_scale": (1.0, 1.7),
    "final_logit_softcap": (None, 2.0),
    "tie_word_embeddings": (True, False),
    "prunes": SWITCH,
}


def make_config(options: dict[str, Any]) -> ModelConfig:
    rotary = options["rotary"]
    if rotary is not None:
        rotary = RotaryConfig(rotary.dim, rotary.theta, options["position_divisor"])
    layers = [
        LayerConfig(
            AttentionConfig(
                kind="full_attention" if options["window_tokens"] is None else "sliding_attention",
                num_heads=NUM_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                k_dim=K_DIM,
                scale=0.4,
                rotary=rotary,
                kv_owner=owner,
                **{name: options[name] for name in ("window_tokens", "softcap", "v_dim", "qk_norm")},
                **{name: options[name] for name in ("has_qkv_bias", "has_output_bias")},
            ),
            MLPConfig(MLP_WIDTH, options["activation"], options["has_mlp_bias"]),
            NormPlaces(*(options[place] for place in PLACES)),
        )
        for owner in (None, options["kv_owner"])
    ]
    return ModelConfig(
        architecture="none",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=tuple(layers),
        norm_eps=EPS,
        max_position_embeddings=64,
        **{name: options[name] for name in ("embedding_scale", "final_logit_softcap", "tie_word_embeddings")},
    )


def random_weights() -> dict[str, torch.Tensor]:
    """Everything that any of the models has, before anything is fused. float32, so that both sides start from one."""
    generator = torch.Generator().manual_seed(5)
    query, key = NUM_HEADS * K_DIM, NUM_KV_HEADS * K_DIM
    weights = {}

    def linear(name: str, num_out: int, num_in: int) -> None:
        weights[f"{name}.weight"] = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
        weights[f"{name}.bias"] = torch.randn(num_out, generator=generator) / 2

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) / 3

    for table in ("embed_tokens", "lm_head"):
        weights[f"{table}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    norm("norm", HIDDEN)
    for layer in range(2):
        for name, num_out, num_in in (
            ("q", query, HIDDEN),
            ("k", key, HIDDEN),
            ("v", key, HIDDEN),  # the widest; fewer rows of it where v_dim is less
            ("o", HIDDEN, query),
            ("gate", MLP_WIDTH, HIDDEN),
            ("up", MLP_WIDTH, HIDDEN),
            ("down", HIDDEN, MLP_WIDTH),
        ):
            linear(f"{layer}.{name}", num_out, num_in)
        for name, width in (*dict.fromkeys(PLACES, HIDDEN).items(), ("q_norm", K_DIM), ("k_norm", K_DIM)):
            norm(f"{layer}.{name}", width)
    return weights


WEIGHTS = random_weights()
TOKENS = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(6))


def of_layer(layer: int, name: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """weight and bias of a layer's linear layer, with as many values as `v_dim` says."""
    weight, bias = WEIGHTS[f"{layer}.{name}.weight"], WEIGHTS[f"{layer}.{name}.bias"]
    if name == "v":
        weight, bias = weight[: NUM_KV_HEADS * options["v_dim"]], bias[: NUM_KV_HEADS * options["v_dim"]]
    if name == "o":
        weight = weight[:, : NUM_HEADS * options["v_dim"]]
    return {"weight": weight, "bias": bias}


def loaded_model(options: dict[str, Any]) -> Model:
    tensors = {f"{name}.weight": WEIGHTS[f"{name}.weight"] for name in ("embed_tokens", "norm")}
    if not options["tie_word_embeddings"]:
        tensors["lm_head.weight"] = WEIGHTS["lm_head.weight"]
    for layer, owner in enumerate((None, options["kv_owner"])):
        for name, parts, has_bias in (
            ("self_attn.qkv_proj", "qkv" if owner is None else "q", options["has_qkv_bias"]),
            ("self_attn.o_proj", "o", options["has_output_bias"]),
            ("mlp.gate_up_proj", ("gate", "up"), options["has_mlp_bias"]),
            ("mlp.down_proj", ("down",), options["has_mlp_bias"]),
        ):
            for ending in ("weight", "bias") if has_bias else ("weight",):
                parts_of = [of_layer(layer, part, options)[ending] for part in parts]
                tensors[f"layers.{layer}.{name}.{ending}"] = torch.cat(parts_of)
        for place in PLACES:
            if options[place]:
                tensors[f"layers.{layer}.{place}_norm.weight"] = WEIGHTS[f"{layer}.{place}.weight"]
        if options["qk_norm"]:
            for norm in ("q_norm",) if owner is not None else ("q_norm", "k_norm"):
                tensors[f"layers.{layer}.self_attn.{norm}.weight"] = WEIGHTS[f"{layer}.{norm}.weight"]
    model = Model(make_config(options), torch.float32)
    model.load(tensors)
    return model


def run(options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the last norm makes of the tokens that leave the last layer, their logits)."""
    model = loaded_model(options)
    stack = Stack(model, TorchOperators())
    specs = layer_specs(model.config, itemsize_bytes=4)
    layout = build_layout(specs, page_tokens=PAGE_TOKENS, kv_sharing=kv_sharing(model.config))
    num_pages = [-(-length // PAGE_TOKENS) for length in LENGTHS]
    units = layout.groups[0].page_units
    tables = np.full((len(LENGTHS), max(num_pages)), -1)
    free = iter(np.random.default_rng(1).permutation(sum(num_pages)) + 1)
    for row, count in enumerate(num_pages):
        tables[row, :count] = [next(free) * units for _ in range(count)]
    arena = nan_arena((sum(num_pages) + 1) * layout.groups[0].page_bytes)
    runner = ModelRunner(stack, TorchBackend(), layout, specs, arena, prunes=False)
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    request = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    slots = tables[request, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    metadata = make_metadata(
        page_tokens=PAGE_TOKENS,
        num_decodes=0,
        query_start=np.cumsum([0, *LENGTHS]),
        seq_lens=np.array(LENGTHS),
        first_blocks=np.zeros(len(LENGTHS), dtype=np.int64),
        block_tables=tables,
        slot_mapping=slots,
    )
    needed = {2: LAST_TOKENS} if options["prunes"] else {}
    step = StepAttention(runner.backend, layout, runner.places, [metadata], needed)
    with torch.inference_mode():
        hidden = stack(TOKENS, torch.from_numpy(positions), step)
        logits = stack.logits(hidden)
    assert isinstance(logits, torch.Tensor)
    return hidden, logits


def rms(x: torch.Tensor, name: str) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * WEIGHTS[f"{name}.weight"].double()


def turned(x: torch.Tensor, rotary: RotaryConfig | None, divisor: float) -> torch.Tensor:
    """x [T, heads, dim] of positions 0 to T, element by element as complex numbers: the first half of the rotated
    elements are real parts, the second imaginary ones."""
    if rotary is None:
        return x
    half = rotary.dim // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] / divisor
    angles = angles * torch.tensor([rotary.theta ** (-2 * pair / rotary.dim) for pair in range(half)])
    numbers = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angles)
    return torch.cat((numbers.real, numbers.imag, x[..., 2 * half :]), dim=-1)


def dense_prompt(tokens: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """float64 [T, HIDDEN]: what the last norm makes of each token of one prompt."""

    def linear(x: torch.Tensor, layer: int, name: str, has_bias: bool) -> torch.Tensor:
        of = of_layer(layer, name, options)
        return x @ of["weight"].double().T + (of["bias"].double() if has_bias else 0)

    def heads(x: torch.Tensor, layer: int, name: str, dim: int) -> torch.Tensor:
        y = linear(x, layer, name, options["has_qkv_bias"]).view(len(x), -1, dim)
        if name == "v":
            return y
        y = rms(y, f"{layer}.{name}_norm") if options["qk_norm"] else y
        return turned(y, options["rotary"], options["position_divisor"])

    def placed(x: torch.Tensor, layer: int, place: str) -> torch.Tensor:
        return rms(x, f"{layer}.{place}") if options[place] else x

    distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    visible = (distance >= 0) & (distance < (options["window_tokens"] or 1000))
    x = WEIGHTS["embed_tokens.weight"].double()[tokens] * options["embedding_scale"]
    keys_values = []
    for layer, owner in enumerate((None, options["kv_owner"])):
        normed = placed(x, layer, "input")
        q = heads(normed, layer, "q", K_DIM)
        if owner is None:
            keys_values.append((heads(normed, layer, "k", K_DIM), heads(normed, layer, "v", options["v_dim"])))
        k, v = keys_values[layer if owner is None else owner]
        attended = []
        for head in range(NUM_HEADS):
            of_head = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = 0.4 * q[:, head] @ k[:, of_head].T
            if options["softcap"] is not None:
                scores = options["softcap"] * (scores / options["softcap"]).tanh()
            attended.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, of_head])
        y = linear(torch.cat(attended, -1), layer, "o", options["has_output_bias"])
        x = x + placed(y, layer, "post_attention")
        normed = placed(x, layer, "mlp")
        gate, up = (linear(normed, layer, name, options["has_mlp_bias"]) for name in ("gate", "up"))
        if options["activation"] == "silu":
            gate = gate * gate.sigmoid()
        else:
            gate = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
        x = x + placed(linear(gate * up, layer, "down", options["has_mlp_bias"]), layer, "post_mlp")
    return rms(x, "norm")


def dense(options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.cat([dense_prompt(tokens, options) for tokens in TOKENS.split(LENGTHS)])
    if options["prunes"]:
        hidden = hidden[LAST_TOKENS]
    head = WEIGHTS["embed_tokens.weight" if options["tie_word_embeddings"] else "lm_head.weight"].double()
    logits, cap = hidden @ head.T, options["final_logit_softcap"]
    return hidden, logits if cap is None else cap * (logits / cap).tanh()


def check(options: dict[str, Any]) -> None:
    for actual, expected in zip(run(options), dense(options), strict=True):
        assert actual.shape == expected.shape, options
        difference = (actual.double() - expected).abs().max()
        assert difference < 1e-4 * expected.abs().max(), options


def test_every_pair_of_options() -> None:
    for options in pairwise({**OPTIONS, **SURROUNDINGS}):
        check(options)


@pytest.mark.slow
@pytest.mark.parametrize("places", list(itertools.product(SWITCH, repeat=4)), ids=str)
def test_every_combination_of_options(places: tuple[bool, ...]) -> None:
    surroundings = itertools.cycle(pairwise(SURROUNDINGS))
    others = {name: choices for name, choices in OPTIONS.items() if name not in PLACES}
    for chosen in itertools.product(*others.values()):
        own = dict(zip(others, chosen, strict=True)) | dict(zip(PLACES, places, strict=True))
        check({**own, **next(surroundings)})


SIMPLEST = {name: choices[0] for name, choices in {**OPTIONS, **SURROUNDINGS}.items()}


@pytest.mark.parametrize("name", [*OPTIONS, *SURROUNDINGS])
def test_the_oracle_tells_each_option_from_none(name: str) -> None:
    """Or the tests above would say nothing about it."""
    base = {**SIMPLEST, "rotary": OPTIONS["rotary"][1]} if name == "position_divisor" else SIMPLEST
    for choice in {**OPTIONS, **SURROUNDINGS}[name][1:]:
        changed = dense({**base, name: choice})[1]
        plain = dense(base)[1]
        assert changed.shape != plain.shape or (changed - plain).abs().max() > 1e-2
