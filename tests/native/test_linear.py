"""Packed linear layers: values against float64 and exact integers, bits against themselves in other company."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional

from lamella.errors import InvariantError
from lamella.native.linear import (
    PackedWeight,
    gather_rows,
    linear,
    linear_argmax,
    linear_topk,
    pack_rows,
    pack_weight,
    unpacked,
)

# (outputs, inputs): below a panel, whole panels, several groups of panels with a rest, deeper than one depth block
SHAPES = [(5, 3), (64, 40), (300, 77), (523, 530)]
# each way through the kernel: streamed, packed in one tile and in several, cut in depth, several row blocks
ROW_COUNTS = [1, 2, 3, 4, 7, 13, 24, 25, 97, 220]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int = 0, most: int = 8) -> torch.Tensor:
    """Small whole numbers, whose products and sums float32 holds exactly."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def random_batches(num_rows: int, seed: int) -> list[torch.Tensor]:
    """The rows in random order, cut into batches of random sizes."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_rows, generator=generator)
    cuts = torch.randperm(num_rows - 1, generator=generator)[:6].sort().values + 1
    return list(torch.tensor_split(order, cuts))


class TestPacking:
    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_every_value_is_where_the_layout_says(self, num_out, num_in):
        weight = random(num_out, num_in)
        data = pack_weight(weight).data
        n = torch.arange(num_out)[:, None]
        k = torch.arange(num_in)
        assert data.shape == (-(-num_out // 16), num_in, 16)
        assert torch.equal(data[n // 16, k, n % 16], weight)
        assert data.sum(dtype=torch.float64).item() == pytest.approx(weight.sum(dtype=torch.float64).item(), abs=1e-9)
        assert data.count_nonzero() == weight.count_nonzero()  # the padding is zero

    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_torch_packs_the_same(self, num_out, num_in):
        weight = random(num_out, num_in)
        assert torch.equal(pack_rows(weight), pack_weight(weight).data)

    def test_pieces_of_whole_panels_join(self):
        weight = random(75, 9)
        joined = torch.cat([pack_rows(weight[:32]), pack_rows(weight[32:64]), pack_rows(weight[64:])])
        assert torch.equal(joined, pack_weight(weight).data)

    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_unpacked_is_the_weight(self, num_out, num_in):
        weight = random(num_out, num_in)
        assert torch.equal(unpacked(pack_weight(weight)), weight)

    def test_memory_mapped_data_is_used_in_place(self, tmp_path):
        weight = random(50, 12)
        path = tmp_path / "weight.bin"
        path.write_bytes(b"head" + pack_rows(weight).numpy().tobytes())  # not aligned to a vector
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(view, dtype=torch.float32, offset=4).view(4, 12, 16)
        packed = PackedWeight(data, 50, 12)
        assert packed.data.data_ptr() == data.data_ptr()
        x = random(5, 12, seed=1)
        assert torch.equal(linear(x, packed), linear(x, pack_weight(weight)))


class TestGatherRows:
    def test_rows_of_the_weight_times_the_scale(self):
        weight = random(300, 77)
        ids = torch.tensor([299, 0, 16, 15, 299, 128])
        assert torch.equal(gather_rows(pack_weight(weight), ids, 2.5), weight[ids] * 2.5)

    def test_no_ids(self):
        assert gather_rows(pack_weight(random(20, 7)), torch.empty(0, dtype=torch.int64)).shape == (0, 7)

    @pytest.mark.parametrize("wrong", [-1, 20, 31])
    def test_an_id_that_is_no_row_is_refused(self, wrong):
        with pytest.raises(InvariantError, match=rf"ids\[1\] is {wrong}; the weight has rows 0 to 19"):
            gather_rows(pack_weight(random(20, 7)), torch.tensor([3, wrong]))


class TestLinear:
    @pytest.mark.parametrize("num_rows", ROW_COUNTS)
    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_whole_numbers_are_exact(self, num_out, num_in, num_rows):
        x, weight, bias = integers(num_rows, num_in), integers(num_out, num_in, seed=1), integers(num_out, seed=2)
        exact = x.long() @ weight.long().T
        packed = pack_weight(weight)
        assert torch.equal(linear(x, packed).long(), exact)
        assert torch.equal(linear(x, packed, bias).long(), exact + bias.long())

    @pytest.mark.parametrize("num_rows", ROW_COUNTS)
    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_as_near_to_float64_as_a_sum_of_rounded_terms_can_be(self, num_out, num_in, num_rows):
        x, weight, bias = random(num_rows, num_in), random(num_out, num_in, seed=1), random(num_out, seed=2)
        exact = functional.linear(x.double(), weight.double(), bias.double())
        size = functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        error = (linear(x, pack_weight(weight), bias) - exact).abs()
        assert (error <= size * 2**-24 * (num_in**0.5 + 3)).all()

    @pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 30])
    def test_an_element_is_one_chain_of_fused_multiply_adds(self, num_rows):
        num_in, num_out = 600, 21
        x, weight = random(num_rows, num_in), random(num_out, num_in, seed=1)
        wide_x, wide_weight = x.numpy().astype(np.longdouble), weight.numpy().astype(np.longdouble)
        chain = np.zeros((num_rows, num_out), dtype=np.float32)
        for k in range(num_in):
            products = wide_x[:, k, None] * wide_weight[None, :, k]
            chain = (products + chain.astype(np.longdouble)).astype(np.float32)
        assert torch.equal(linear(x, pack_weight(weight)), torch.from_numpy(chain))

    @pytest.mark.parametrize("num_threads", [1, 2, 3])
    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_a_row_is_the_same_bits_in_any_company(self, num_out, num_in, num_threads):
        x, bias, packed = random(220, num_in), random(num_out, seed=2), pack_weight(random(num_out, num_in, seed=1))
        alone = torch.cat([linear(x[row : row + 1], packed, bias) for row in range(len(x))])
        torch.set_num_threads(num_threads)
        assert torch.equal(linear(x, packed, bias), alone)
        for seed in range(5):
            for batch in random_batches(len(x), seed):
                assert torch.equal(linear(x[batch], packed, bias), alone[batch])

    def test_rows_may_have_a_stride(self):
        wide = random(9, 100)
        packed = pack_weight(random(70, 40, seed=1))
        for num_rows in (1, 3, 9):
            x = wide[:num_rows, 30:70]
            assert torch.equal(linear(x, packed), linear(x.contiguous(), packed))

    @pytest.mark.parametrize("num_rows", [1, 9, 120])
    def test_out_is_written_within_its_bounds(self, num_rows):
        x, packed = random(num_rows, 40), pack_weight(random(70, 40, seed=1))
        wide = torch.full((num_rows + 2, 90), 7.0)
        out = wide[1:-1, 10:80]
        assert linear(x, packed, out=out) is out
        assert torch.equal(out, linear(x, packed))
        wide[1:-1, 10:80] = 7.0
        assert (wide == 7.0).all()

    def test_no_rows(self):
        packed = pack_weight(random(20, 7))
        assert linear(torch.empty(0, 7), packed).shape == (0, 20)

    def test_not_a_number_stays_in_its_row(self):
        x, packed = random(9, 40), pack_weight(random(70, 40, seed=1))
        expected = linear(x, packed)
        x[4, 20] = float("nan")
        result = linear(x, packed)
        assert result[4].isnan().all()
        assert torch.equal(result[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])

    def test_two_python_threads_at_once(self):
        packed = pack_weight(random(523, 130, seed=1))
        inputs = [random(num_rows, 130, seed=num_rows) for num_rows in (1, 3, 8, 60, 110)]
        expected = [(linear(x, packed), linear_topk(x, packed, 9, with_logsumexp=True)) for x in inputs]

        def run(_) -> bool:
            for _ in range(10):
                for x, (product, top) in zip(inputs, expected, strict=True):
                    again = linear_topk(x, packed, 9, with_logsumexp=True)
                    same = [torch.equal(a, b) for a, b in zip(again, top, strict=True)]
                    if not (torch.equal(linear(x, packed), product) and all(same)):
                        return False
            return True

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(run, range(2))) == [True, True]


class TestLinearArgmax:
    @pytest.mark.parametrize("num_rows", ROW_COUNTS)
    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_same_as_torch_on_the_whole_product(self, num_out, num_in, num_rows):
        x, bias, packed = (
            random(num_rows, num_in),
            random(num_out, seed=2),
            pack_weight(random(num_out, num_in, seed=1)),
        )
        product = linear(x, packed, bias)
        ids, values = linear_argmax(x, packed, bias)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, product.argmax(1))
        assert torch.equal(values, product.amax(1))

    def test_of_equal_columns_the_first(self):
        weight = random(3000, 8, seed=1).clamp(-1, 1) * 0.1
        weight[[2900, 700, 1500]] = 1.0
        ids, values = linear_argmax(torch.ones(4, 8), pack_weight(weight))
        assert ids.tolist() == [700] * 4
        assert values.tolist() == [8.0] * 4

    def test_the_first_nan_is_above_all(self):
        weight = random(3000, 8, seed=1)
        weight[2900, 3] = weight[1200, 5] = float("nan")
        weight[40] = float("inf")
        ids, values = linear_argmax(torch.ones(2, 8), pack_weight(weight))
        assert ids.tolist() == [1200, 1200]
        assert values.isnan().all()

    def test_a_row_of_minus_infinity_has_the_first_column(self):
        bias = torch.full((600,), -float("inf"))
        ids, values = linear_argmax(random(2, 8), pack_weight(random(600, 8)), bias)
        assert ids.tolist() == [0, 0]
        assert values.tolist() == [-float("inf")] * 2

    def test_padding_is_not_a_column(self):
        ids, values = linear_argmax(torch.ones(5, 2), pack_weight(torch.tensor([[-3.0, -1.0], [-1.0, -1.0]])))
        assert ids.tolist() == [1] * 5
        assert values.tolist() == [-2.0] * 5


class TestLinearTopk:
    @pytest.mark.parametrize("num_rows", [1, 3, 13, 97])
    @pytest.mark.parametrize(("num_out", "num_in", "k"), [(5, 3, 5), (300, 77, 128), (2000, 20, 20)])
    def test_as_a_stable_sort_of_the_whole_product(self, num_out, num_in, k, num_rows):
        x, packed = random(num_rows, num_in), pack_weight(random(num_out, num_in, seed=1))
        ordered = linear(x, packed).sort(dim=1, descending=True, stable=True)
        top = linear_topk(x, packed, k)
        assert torch.equal(top.values, ordered.values[:, :k])
        assert torch.equal(top.ids, ordered.indices[:, :k])
        assert top.logsumexp is None

    @pytest.mark.parametrize("num_threads", [1, 2, 3])
    def test_of_many_equal_columns_the_lower_ids(self, num_threads):
        torch.set_num_threads(num_threads)
        x, packed = integers(6, 3, most=1), pack_weight(integers(4000, 3, seed=1, most=1))
        ordered = linear(x, packed).sort(dim=1, descending=True, stable=True)
        assert torch.equal(linear_topk(x, packed, 100).ids, ordered.indices[:, :100])

    def test_nans_come_first_and_in_order(self):
        bias = torch.arange(600.0)
        bias[[500, 3, 77]] = float("nan")
        top = linear_topk(torch.zeros(1, 4), pack_weight(random(600, 4)), 5, bias)
        assert top.ids.tolist() == [[3, 77, 500, 599, 598]]
        assert top.values[0].isnan().tolist() == [True, True, True, False, False]

    @pytest.mark.parametrize("num_rows", ROW_COUNTS)
    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_logsumexp_against_float64(self, num_out, num_in, num_rows):
        x, bias, packed = (
            random(num_rows, num_in),
            random(num_out, seed=2),
            pack_weight(random(num_out, num_in, seed=1)),
        )
        exact = linear(x, packed, bias).double().logsumexp(1)
        got = linear_topk(x, packed, 1, bias, with_logsumexp=True).logsumexp
        torch.testing.assert_close(got.double(), exact, rtol=2e-7, atol=4e-7)

    def test_logsumexp_of_one_far_larger_column(self):
        bias = torch.full((700,), -200.0)
        bias[699] = 300.0
        top = linear_topk(torch.zeros(2, 4), pack_weight(random(700, 4)), 1, bias, with_logsumexp=True)
        assert top.logsumexp.tolist() == [300.0, 300.0]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("columns", [slice(None), slice(400, 401)])
    def test_logsumexp_of_what_is_not_finite(self, value, columns):
        bias = random(700)
        bias[columns] = value
        top = linear_topk(torch.zeros(1, 4), pack_weight(random(700, 4)), 1, bias, with_logsumexp=True)
        exact = bias.double().logsumexp(0, keepdim=True)
        torch.testing.assert_close(top.logsumexp.double(), exact, rtol=2e-7, atol=4e-7, equal_nan=True)

    @pytest.mark.parametrize("num_threads", [1, 2, 3])
    def test_a_row_is_the_same_bits_in_any_company(self, num_threads):
        x, packed = random(120, 30), pack_weight(random(1500, 30, seed=1))
        rows = [linear_topk(x[row : row + 1], packed, 40, with_logsumexp=True) for row in range(len(x))]
        alone = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        torch.set_num_threads(num_threads)
        for batch in [torch.arange(120), *random_batches(120, 0), *random_batches(120, 1)]:
            for got, expected in zip(linear_topk(x[batch], packed, 40, with_logsumexp=True), alone, strict=True):
                assert torch.equal(got, expected[batch])

    def test_no_rows(self):
        top = linear_topk(torch.empty(0, 7), pack_weight(random(20, 7)), 3, with_logsumexp=True)
        assert [tensor.shape for tensor in top] == [(0, 3), (0, 3), (0,)]


class TestErrors:
    def test_x(self):
        packed = pack_weight(random(20, 7))
        with pytest.raises(InvariantError, match=r"x has dtype torch\.float64; .* torch\.float32"):
            linear(random(2, 7).double(), packed)
        with pytest.raises(InvariantError, match=r"x has shape \[2, 8\]; it must be \[tokens, 7\]"):
            linear(random(2, 8), packed)
        with pytest.raises(InvariantError, match=r"x has shape \[7\]; it must be \[tokens, 7\]"):
            linear(random(7), packed)
        with pytest.raises(InvariantError, match=r"x has strides \(1, 5\)"):
            linear(random(7, 5).T, packed)
        with pytest.raises(InvariantError, match=r"x is on meta"):
            linear(torch.empty(2, 7, device="meta"), packed)

    def test_bias(self):
        packed = pack_weight(random(20, 7))
        with pytest.raises(InvariantError, match=r"bias has shape \[7\]; it must be \[20\]"):
            linear(random(2, 7), packed, random(7))
        with pytest.raises(InvariantError, match=r"bias has dtype torch\.bfloat16"):
            linear_argmax(random(2, 7), packed, random(20).bfloat16())
        with pytest.raises(InvariantError, match=r"bias has strides \(2,\)"):
            linear(random(2, 7), packed, random(40)[::2])

    def test_out(self):
        packed = pack_weight(random(20, 7))
        with pytest.raises(InvariantError, match=r"out has shape \[2, 19\]; it must be \[tokens, 20\]"):
            linear(random(2, 7), packed, out=random(2, 19))
        with pytest.raises(InvariantError, match=r"out has 3 rows; x has 2"):
            linear(random(2, 7), packed, out=random(3, 20))

    @pytest.mark.parametrize("k", [0, 21, 129])
    def test_k(self, k):
        num_out = 20 if k < 100 else 200
        with pytest.raises(
            InvariantError, match=rf"k={k} cannot be had of {num_out} outputs; 1 to {min(num_out, 128)}"
        ):
            linear_topk(random(2, 7), pack_weight(random(num_out, 7)), k)

    def test_ids(self):
        packed = pack_weight(random(20, 7))
        with pytest.raises(InvariantError, match=r"ids has dtype torch\.int32; it must be torch\.int64"):
            gather_rows(packed, torch.tensor([1], dtype=torch.int32))
        with pytest.raises(InvariantError, match=r"ids has shape \[1, 2\]"):
            gather_rows(packed, torch.tensor([[1, 2]]))

    def test_weight(self):
        with pytest.raises(InvariantError, match=r"weight has shape \[0, 7\]"):
            pack_weight(random(0, 7))
        with pytest.raises(InvariantError, match=r"weight has dtype torch\.float16"):
            pack_rows(random(3, 7).half())
        with pytest.raises(InvariantError, match=r"weight has strides \(20, 1\); it must be contiguous"):
            pack_weight(random(3, 20)[:, :7])

    def test_packed_data(self):
        with pytest.raises(InvariantError, match=r"data has shape \[2, 7, 16\]; it must be \[3, 7, 16\]"):
            PackedWeight(random(2, 7, 16), 33, 7)
        with pytest.raises(InvariantError, match=r"data has dtype torch\.float64"):
            PackedWeight(random(2, 7, 16).double(), 32, 7)
        with pytest.raises(InvariantError, match=r"data has strides"):
            PackedWeight(random(2, 16, 7).transpose(1, 2), 32, 7)
        with pytest.raises(InvariantError, match=r"num_out=0, num_in=7"):
            PackedWeight(random(0, 7, 16), 0, 7)
