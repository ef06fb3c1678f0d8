"""Norms and activations against float64, and bits against themselves in other batches."""

import pytest
import torch
from torch.nn import functional

from lamella.errors import InvariantError
from lamella.native.elementwise import activated, add_norm, gate_attention, gated_activation, layer_norm, softcap

WIDTHS = [1, 7, 32, 77, 643]
EPS = 1e-6
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


class TestAddNorm:
    @pytest.mark.parametrize("num_rows", [1, 5, 40])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_sandwich_norms(self, width, num_rows):
        x, y = random(num_rows, width), random(num_rows, width, seed=1) * 30
        post_weight, next_weight = random(width, seed=2), random(width, seed=3)
        exact_x = x.double() + exact_norm(y, post_weight)
        normed = add_norm(x, y, post_weight, next_weight, EPS)
        torch.testing.assert_close(x.double(), exact_x, rtol=5e-7, atol=5e-7)
        # Against what was added up: close to 0 the norm magnifies the sum's rounding.
        torch.testing.assert_close(normed.double(), exact_norm(x, next_weight), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_plain_residual(self, width):
        x, y, next_weight = random(5, width), random(5, width, seed=1), random(width, seed=3)
        expected = x + y
        normed = add_norm(x, y, None, next_weight, EPS)
        assert torch.equal(x, expected)
        torch.testing.assert_close(normed.double(), exact_norm(x, next_weight), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_only_a_norm(self, width):
        x, next_weight = random(5, width), random(width, seed=3)
        before = x.clone()
        normed = add_norm(x, None, None, next_weight, EPS)
        assert torch.equal(x, before)
        torch.testing.assert_close(normed.double(), exact_norm(x, next_weight), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("has_y", [True, False])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_without_a_norm_of_the_sum_it_is_the_sum(self, width, has_y):
        x, y, post_weight = random(5, width), random(5, width, seed=1), random(width, seed=2)
        exact_x = x.double() + (exact_norm(y, post_weight) if has_y else 0)
        assert add_norm(x, y if has_y else None, post_weight if has_y else None, None, EPS) is x
        torch.testing.assert_close(x.double(), exact_x, rtol=5e-7, atol=5e-7)
        expected = x + y
        assert torch.equal(add_norm(x, y, None, None, EPS), expected)

    def test_eps_bounds_the_scale_of_a_row_of_zeros(self):
        x, ones = torch.zeros(2, 20), torch.ones(20)
        assert torch.equal(add_norm(x, torch.zeros(2, 20), ones, ones, EPS), torch.zeros(2, 20))
        x.fill_(1e-4)
        expected = 1e-4 / (1e-8 + 1e-2) ** 0.5
        torch.testing.assert_close(add_norm(x, None, None, ones, 1e-2), torch.full((2, 20), expected))

    @pytest.mark.parametrize("num_threads", [1, 2])
    def test_a_row_is_the_same_bits_in_any_company(self, num_threads):
        x, y = random(60, 643), random(60, 643, seed=1)
        post_weight, next_weight = random(643, seed=2), random(643, seed=3)
        alone = x.clone()
        normed = torch.cat([add_norm(alone[i : i + 1], y[i : i + 1], post_weight, next_weight, EPS) for i in range(60)])
        torch.set_num_threads(num_threads)
        for sizes in ([60], [1, 2, 30, 27], [50, 10]):
            together = x.clone()
            parts = zip(together.split(sizes), y.split(sizes), strict=True)
            assert torch.equal(torch.cat([add_norm(a, b, post_weight, next_weight, EPS) for a, b in parts]), normed)
            assert torch.equal(together, alone)

    def test_rows_may_have_a_stride(self):
        wide_x, wide_y = random(4, 100), random(4, 90, seed=1)
        ones = torch.ones(33)
        x, y = wide_x[:, 50:83], wide_y[:, 10:43]
        before, expected_x = wide_x.clone(), x.contiguous()
        expected = add_norm(expected_x, y.contiguous(), ones, ones, EPS)
        assert torch.equal(add_norm(x, y, ones, ones, EPS), expected)
        before[:, 50:83] = expected_x
        assert torch.equal(wide_x, before)

    def test_no_rows(self):
        ones = torch.ones(9)
        assert add_norm(torch.empty(0, 9), torch.empty(0, 9), ones, ones, EPS).shape == (0, 9)

    def test_errors(self):
        x, ones = random(3, 9), torch.ones(9)
        with pytest.raises(InvariantError, match=r"x has shape \[9\]"):
            add_norm(x[0], None, None, ones, EPS)
        with pytest.raises(InvariantError, match=r"x has dtype torch\.bfloat16"):
            add_norm(x.bfloat16(), None, None, ones, EPS)
        with pytest.raises(InvariantError, match=r"y has shape \[3, 8\]; it must be \[tokens, 9\]"):
            add_norm(x, random(3, 8), ones, ones, EPS)
        with pytest.raises(InvariantError, match=r"y has 2 rows; x has 3"):
            add_norm(x, random(2, 9), ones, ones, EPS)
        with pytest.raises(InvariantError, match=r"post_weight is given without y"):
            add_norm(x, None, ones, ones, EPS)
        with pytest.raises(InvariantError, match=r"post_weight has shape \[8\]; it must be \[9\]"):
            add_norm(x, x, ones[:8], ones, EPS)
        with pytest.raises(InvariantError, match=r"next_weight has dtype torch\.float64"):
            add_norm(x, x, ones, ones.double(), EPS)


class TestGatedActivation:
    @pytest.mark.parametrize("kind", ACTIVATIONS)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_against_float64(self, width, kind):
        gate_up = random(40, 2 * width) * 4
        gate, up = gate_up.double().chunk(2, dim=1)
        got = gated_activation(gate_up, kind).double()
        torch.testing.assert_close(got, ACTIVATIONS[kind](gate) * up, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_far_from_zero(self, kind):
        gate = torch.tensor([[-1e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 1e4]])
        got = gated_activation(torch.cat([gate, torch.ones(1, 9)], dim=1), kind)
        torch.testing.assert_close(got.double(), ACTIVATIONS[kind](gate.double()), rtol=1e-6, atol=1e-30)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_not_a_number_stays_one(self, kind):
        gate_up = torch.ones(1, 20)
        gate_up[0, 3] = gate_up[0, 17] = float("nan")
        assert gated_activation(gate_up, kind)[0].isnan().nonzero().flatten().tolist() == [3, 7]

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_a_row_is_the_same_bits_in_any_company(self, kind):
        gate_up = random(60, 2 * 643)
        alone = torch.cat([gated_activation(row, kind) for row in gate_up.split(1)])
        torch.set_num_threads(2)
        assert torch.equal(gated_activation(gate_up, kind), alone)
        assert torch.equal(gated_activation(gate_up[7:50], kind), alone[7:50])

    def test_rows_may_have_a_stride(self):
        gate_up = random(6, 100)[:, 10:64]
        assert torch.equal(gated_activation(gate_up, "silu"), gated_activation(gate_up.contiguous(), "silu"))

    def test_no_rows(self):
        assert gated_activation(torch.empty(0, 18), "silu").shape == (0, 9)

    def test_errors(self):
        with pytest.raises(
            InvariantError, match=r"kind='tanh' is not an activation; choose one of gelu_tanh, silu, gelu"
        ):
            gated_activation(random(2, 8), "tanh")
        with pytest.raises(InvariantError, match=r"gate_up has shape \[2, 7\]; it must be \[tokens, an even width\]"):
            gated_activation(random(2, 7), "silu")
        with pytest.raises(InvariantError, match=r"gate_up has dtype torch\.float64"):
            gated_activation(random(2, 8).double(), "silu")


class TestSoftcap:
    @pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
    def test_against_float64(self, cap):
        x = torch.cat([torch.linspace(-10 * cap, 10 * cap, 4999), random(5000) * 1e-3])
        exact = cap * torch.tanh(x.double() / cap)
        assert softcap(x, cap) is x
        torch.testing.assert_close(x.double(), exact, rtol=4e-7, atol=1e-12)

    def test_special_values(self):
        inf = float("inf")
        x = torch.tensor([[inf, -inf, 0.0, -0.0, float("nan")]])
        softcap(x, 30.0)
        assert x[0, :4].tolist() == [30.0, -30.0, 0.0, 0.0]
        assert x[0, 4].isnan()

    def test_same_bits_wherever_a_value_lies(self):
        x = random(50, 643) * 40
        alone = torch.cat([softcap(row.clone(), 30.0) for row in x.split(1)])
        torch.set_num_threads(2)
        assert torch.equal(softcap(x.clone(), 30.0), alone)

    def test_errors(self):
        with pytest.raises(InvariantError, match=r"x has dtype torch\.float64"):
            softcap(random(3).double(), 30.0)
        with pytest.raises(InvariantError, match=r"x has strides \(9, 1\); it must be contiguous"):
            softcap(random(3, 9)[:, :4], 30.0)
        with pytest.raises(InvariantError, match=r"cap=0 is not a bound"):
            softcap(random(3), 0)


class TestLayerNorm:
    @pytest.mark.parametrize("has_bias", [True, False])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_against_float64(self, width, has_bias):
        x, weight = random(9, width) * 3 + 5, random(width, seed=1)
        bias = random(width, seed=2) if has_bias else None
        expected = functional.layer_norm(
            x.double(), (width,), weight.double(), None if bias is None else bias.double(), 1e-5
        )
        torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5).double(), expected, rtol=1e-5, atol=3e-5)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_rows_bits_do_not_depend_on_the_others(self, width):
        x, weight = random(40, width), random(width, seed=1)
        together = layer_norm(x, weight, None, EPS)
        wide = torch.full((40, width + 3), torch.nan)
        wide[:, 1 : width + 1] = x
        assert torch.equal(layer_norm(wide[:, 1 : width + 1], weight, None, EPS), together)
        assert torch.equal(torch.cat([layer_norm(row[None], weight, None, EPS) for row in x]), together)

    def test_shapes_that_do_not_fit_are_refused(self):
        with pytest.raises(InvariantError, match="weight has shape"):
            layer_norm(random(2, 8), random(7), None, EPS)
        with pytest.raises(InvariantError, match="bias has shape"):
            layer_norm(random(2, 8), random(8), random(9), EPS)


class TestActivated:
    @pytest.mark.parametrize("kind", ACTIVATIONS)
    @pytest.mark.parametrize("has_factor", [True, False])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_against_float64(self, width, has_factor, kind):
        gate, factor = random(6, width) * 4, random(6, 2 * width, seed=1)[:, width:]  # rows of the factor apart
        expected = ACTIVATIONS[kind](gate.double()) * (factor.double() if has_factor else 1)
        found = activated(gate, factor if has_factor else None, kind)
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
        alone = torch.cat(
            [activated(gate[i : i + 1], factor[i : i + 1] if has_factor else None, kind) for i in range(6)]
        )
        assert torch.equal(alone, found)

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(InvariantError, match="kind='tanh'"):
            activated(random(2, 8), None, "tanh")
        with pytest.raises(InvariantError, match="factor has 3 rows"):
            activated(random(2, 8), random(3, 8), "silu")


class TestGateAttention:
    @pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
    @pytest.mark.parametrize(("num_gates", "dim"), [(3, 16), (48, 1), (1, 7)])
    def test_against_float64(self, num_gates, dim, kind):
        attended, gate = random(5, num_gates * dim), random(5, num_gates, seed=1) * 8
        gate[0, 0] = 90.0  # where e^x is beyond float32
        opened = gate.double().sigmoid() if kind == "sigmoid" else functional.softplus(gate.double(), threshold=1000)
        expected = attended.double() * opened.repeat_interleave(dim, dim=1)
        rows = [attended[i : i + 1].clone() for i in range(5)]
        gate_attention(attended, gate, kind)
        torch.testing.assert_close(attended.double(), expected, rtol=1e-6, atol=1e-7)
        for index, row in enumerate(rows):
            gate_attention(row, gate[index : index + 1], kind)
            assert torch.equal(row[0], attended[index])

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(InvariantError, match="kind='tanh'"):
            gate_attention(random(2, 8), random(2, 4), "tanh")
        with pytest.raises(InvariantError, match="columns that divide it"):
            gate_attention(random(2, 8), random(2, 3), "sigmoid")
