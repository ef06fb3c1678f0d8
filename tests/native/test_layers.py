"""Layers of every kind behind one call, bit for bit against the kernels that they are made of."""

import pytest
import torch

from lamella.errors import ConfigError, InvariantError
from lamella.native.elementwise import add_norm, gated_activation
from lamella.native.gguf_linear import linear_gguf, pack_gguf
from lamella.native.int8 import quantize_int8
from lamella.native.layer_linear import LinearLayer
from lamella.native.layers import LayerTail
from lamella.native.linear import linear, pack_weight
from lamella.native.mlp import Gate, GatedMLP
from tests.helpers.native_layers import KINDS, q8_blocks, random
from tests.helpers.native_layers import make_layer as make

EPS = 1e-6
WIDTH, MLP_WIDTH, ATTENDED = 96, 160, 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 9])
def test_a_layer_is_its_kernel(kind, num_rows):
    layer, alone = make(kind, 100, 96, seed=1)
    x = random(num_rows, 96)
    assert torch.equal(layer(x), alone(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_to_the_finished_product(kind):
    """In any company, on any number of threads, and in a part of the outputs as in all of them."""
    bias, x = random(400, seed=7), random(70, 96)
    plain, _ = make(kind, 400, 96, seed=1)
    layer = LinearLayer(list(plain._kept[0]), int8_activations=kind == "w8a8", bias=bias)
    expected = plain(x) + bias
    assert not torch.equal(expected, plain(x))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for begin, end in ((0, 70), (0, 1), (1, 3), (3, 6), (6, 11), (11, 70), (5, 5)):
            assert torch.equal(layer(x[begin:end]), expected[begin:end])


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_a_float32_layer_with_bias_is_its_kernel(num_rows):
    packed, bias, x = pack_weight(random(100, 96)), random(100, seed=7), random(num_rows, 96, seed=2)
    assert torch.equal(LinearLayer([packed], bias=bias)(x), linear(x, packed, bias))


@pytest.mark.parametrize("num_rows", [1, 2, 5, 17])
def test_parts_lie_side_by_side(num_rows):
    float32, blocks, last = (
        pack_weight(random(33, 64)),
        pack_gguf(q8_blocks(20, 64), "Q8_0"),
        pack_weight(random(7, 64)),
    )
    layer = LinearLayer([float32, blocks, last])
    x = random(num_rows, 64, seed=2)
    assert (layer.num_in, layer.num_out) == (64, 60)
    expected = torch.cat([linear(x, float32), linear_gguf(x, blocks), linear(x, last)], dim=1)
    assert torch.equal(layer(x), expected)
    bias = random(60, seed=3)
    assert torch.equal(LinearLayer([float32, blocks, last], bias=bias)(x), expected + bias)


def test_weights_that_make_no_layer():
    int8, float32 = quantize_int8(random(16, 32)), pack_weight(random(16, 32))
    with pytest.raises(ConfigError, match=r"\[32, 64\] inputs make no layer"):
        LinearLayer([float32, pack_weight(random(16, 64))])
    with pytest.raises(ConfigError, match="2 weights with int8 among them"):
        LinearLayer([int8, int8])
    with pytest.raises(ConfigError, match="PackedWeight has none"):
        LinearLayer([float32], int8_activations=True)
    with pytest.raises(InvariantError, match=r"bias has shape \[15\]; it must be \[16\]"):
        LinearLayer([float32], bias=torch.zeros(15))
    with pytest.raises(InvariantError, match=r"bias has dtype torch.bfloat16; it must be torch.float32"):
        LinearLayer([float32], bias=torch.zeros(16).bfloat16())
    with pytest.raises(InvariantError, match=r"x has shape \[1, 31\]"):
        LinearLayer([float32])(torch.ones(1, 31))
    with pytest.raises(InvariantError, match="contiguous"):
        LinearLayer([float32])(torch.ones(3, 64)[:, :32])


def make_tail(kind: str, activation: str, with_post_norms: bool, with_pre_norms: bool = True):
    """(tail, the same step by step)."""
    (out_proj, attend_out), (gate_up, expand), (down, contract) = (
        make(kind, WIDTH, ATTENDED, 1), make(kind, 2 * MLP_WIDTH, WIDTH, 2), make(kind, WIDTH, MLP_WIDTH, 3),
    )  # fmt: skip
    norms = {name: 1 + random(WIDTH, seed=seed) / 10 for seed, name in enumerate(("pre_mlp_norm", "following_norm"))}
    posts = {name: random(WIDTH, seed=seed) for seed, name in enumerate(("post_attention_norm", "post_mlp_norm"), 5)}
    if not with_post_norms:
        posts = dict.fromkeys(posts)
    if not with_pre_norms:
        norms = dict.fromkeys(norms)
    mlp = GatedMLP(gate_up, down, Gate(activation))
    tail = LayerTail(out_proj, mlp, **norms, **posts, eps=EPS)

    def step_by_step(x, attended):
        normed = add_norm(x, attend_out(attended), posts["post_attention_norm"], norms["pre_mlp_norm"], EPS)
        y = contract(gated_activation(expand(normed), activation))
        return add_norm(x, y, posts["post_mlp_norm"], norms["following_norm"], EPS).clone()

    return tail, step_by_step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("activation", "with_post_norms", "with_pre_norms"),
    [("gelu_tanh", True, True), ("silu", False, True), ("gelu", True, False), ("silu", False, False)],
)
def test_a_tail_is_its_kernels_at_every_row_count(kind, activation, with_post_norms, with_pre_norms):
    """1,200 rows are more than go through at once."""
    tail, step_by_step = make_tail(kind, activation, with_post_norms, with_pre_norms)
    x, attended = random(1200, WIDTH), random(1200, ATTENDED, seed=4)
    expected_x = x.clone()
    expected = step_by_step(expected_x, attended)
    for num_threads, begin, end in ((1, 0, 1200), (2, 0, 1200), (2, 0, 1), (2, 5, 8), (1, 30, 94), (2, 100, 401)):
        torch.set_num_threads(num_threads)
        changed = x[begin:end].clone()
        normed = tail(changed, attended[begin:end])
        assert torch.equal(normed, expected[begin:end])
        assert torch.equal(changed, expected_x[begin:end])
    assert tail(x[:0], attended[:0]).shape == (0, WIDTH)


def test_projections_that_do_not_follow_each_other():
    tail, _ = make_tail("float32", "silu", True)
    layer, norm = make("float32", WIDTH, WIDTH, 1)[0], torch.ones(WIDTH)
    norms = dict.fromkeys(("post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "following_norm"), norm)
    silu = Gate("silu")
    with pytest.raises(ConfigError, match="96 -> 192 and 96 -> 96"):
        GatedMLP(layer, layer, silu)
    gate_up = make("float32", 2 * WIDTH, WIDTH, 2)[0]
    with pytest.raises(ConfigError, match="activation='tanh' is not known; choose one of gelu_tanh, silu"):
        GatedMLP(gate_up, layer, Gate("tanh"))
    with pytest.raises(ConfigError, match=r"limit=0.0 does not go with slope=1.7"):
        GatedMLP(gate_up, layer, Gate("silu", slope=1.7))
    mlp = GatedMLP(gate_up, layer, silu)
    with pytest.raises(InvariantError, match=r"norm has shape \[5\]"):
        LayerTail(layer, mlp, **{**norms, "pre_mlp_norm": torch.ones(5)}, eps=EPS)
    with pytest.raises(ConfigError, match="96 -> 192 and 96 -> 96 do not follow each other"):
        LayerTail(gate_up, mlp, **norms, eps=EPS)
    with pytest.raises(ConfigError, match="attended has 2 rows; x has 3"):
        tail(random(3, WIDTH), random(2, ATTENDED))
