import gguf
import numpy as np
import pytest
import torch

from lamella.errors import ConfigError
from lamella.native.gguf_linear import gather_rows_gguf, linear_gguf, pack_gguf
from lamella.native.linear import linear, pack_weight

# inputs and bytes of a block, and where its float16 scales lie
BLOCKS = {
    "Q4_0": (32, 18, [0]), "Q4_1": (32, 20, [0, 2]), "Q5_0": (32, 22, [0]), "Q5_1": (32, 24, [0, 2]),
    "Q8_0": (32, 34, [0]), "Q4_K": (256, 144, [0, 2]), "Q5_K": (256, 176, [0, 2]), "Q6_K": (256, 210, [208]),
    "MXFP4": (32, 17, []),
}  # fmt: skip
SHAPES = [
    ("Q4_0", 16, 32), ("Q4_0", 50, 576), ("Q4_0", 33, 96), ("Q4_1", 16, 32), ("Q4_1", 50, 576), ("Q4_1", 33, 96),
    ("Q5_1", 16, 32), ("Q5_1", 49, 896), ("Q5_1", 33, 96), ("Q5_K", 7, 256), ("Q5_K", 40, 768),
    ("Q8_0", 16, 32), ("Q8_0", 50, 640), ("Q8_0", 33, 96), ("Q5_0", 16, 32), ("Q5_0", 49, 672), ("Q5_0", 33, 64),
    ("Q4_K", 7, 256), ("Q4_K", 40, 1024), ("Q6_K", 7, 256), ("Q6_K", 40, 768),
    ("MXFP4", 16, 32), ("MXFP4", 7, 128), ("MXFP4", 150, 576), ("MXFP4", 33, 96), ("MXFP4", 65, 160),
]  # fmt: skip


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_blocks(type_name, num_out, num_in, seed=0, any_scale=False):
    """Random bytes: every field takes all of its values. Scales are finite halves, by default in [2^-8, 2^-4), or of
    MXFP4 bytes, by default of 2^-8 to 2^-4."""
    block_inputs, block_bytes, scale_offsets = BLOCKS[type_name]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_out, num_in // block_inputs, block_bytes), dtype=np.uint8)
    for offset in scale_offsets:
        if any_scale:
            halves = generator.integers(0, 1 << 16, blocks.shape[:2], dtype=np.uint16)
            halves = np.where((halves & 0x7C00) == 0x7C00, halves & 0x83FF, halves).astype(np.uint16)
        else:
            halves = (2.0 ** generator.uniform(-8, -4, blocks.shape[:2])).astype(np.float16).view(np.uint16)
        blocks[..., offset] = halves & 255
        blocks[..., offset + 1] = halves >> 8
    if type_name == "MXFP4":
        blocks[..., 0] = generator.integers(0 if any_scale else 119, 253 if any_scale else 124, blocks.shape[:2])
    return blocks.reshape(num_out, -1)


def dequantize(data, type_name):
    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name]))


def few_bits(num_rows, num_in, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4096, 4096, (num_rows, num_in), generator=generator).float() / 1024


def chain(x, weight):
    """sum = fma(x, w, sum), input by input: exact in float64 for such x and w, then rounded to float32."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        sums = (x[:, k, None].double() * weight[None, :, k].double() + sums.double()).float()
    return sums


@pytest.mark.parametrize(("type_name", "num_out", "num_in"), SHAPES)
def test_weights_are_those_of_the_format(type_name, num_out, num_in):
    data = random_blocks(type_name, num_out, num_in, any_scale=True)
    expected = dequantize(data, type_name)
    packed = pack_gguf(data, type_name)
    assert (packed.num_out, packed.num_in) == (num_out, num_in)
    assert torch.equal(gather_rows_gguf(packed, torch.arange(num_out)), expected)
    ids = torch.tensor([[num_out - 1, 0], [3, 3]])
    assert torch.equal(gather_rows_gguf(packed, ids), expected[ids])


@pytest.mark.parametrize(("type_name", "num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 9])
def test_result_is_the_chain_over_dequantised_weights(type_name, num_out, num_in, num_rows):
    data = random_blocks(type_name, num_out, num_in, seed=num_rows)
    x = few_bits(num_rows, num_in, seed=num_rows)
    assert torch.equal(linear_gguf(x, pack_gguf(data, type_name)), chain(x, dequantize(data, type_name)))


@pytest.mark.parametrize(
    ("type_name", "num_out", "num_in"),
    [
        ("Q4_1", 192, 576), ("Q4_1", 576, 1536), ("Q8_0", 4000, 576), ("Q5_0", 128, 896), ("Q5_0", 4864, 896),
        ("Q4_K", 896, 4864), ("Q5_K", 896, 4864), ("Q6_K", 896, 4864), ("MXFP4", 5760, 2880), ("MXFP4", 2880, 2880),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_widths_of_models(type_name, num_out, num_in, num_rows):
    data = random_blocks(type_name, num_out, num_in, seed=num_rows)
    x = few_bits(num_rows, num_in, seed=num_rows)
    some = torch.tensor([0, 15, 16, num_out // 2 + 1, num_out - 1])
    found = linear_gguf(x, pack_gguf(data, type_name))
    assert torch.equal(found[:, some], chain(x, dequantize(data[some], type_name)))
    expected = x.double() @ dequantize(data, type_name).double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("type_name", BLOCKS)
def test_a_row_does_not_depend_on_its_company_or_the_threads(type_name):
    packed = pack_gguf(random_blocks(type_name, 100, 512), type_name)
    x = torch.randn(23, 512, generator=torch.Generator().manual_seed(1))
    whole = linear_gguf(x, packed)
    torch.set_num_threads(1)
    assert torch.equal(linear_gguf(x, packed), whole)
    torch.set_num_threads(2)
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 23)):
        assert torch.equal(linear_gguf(x[begin:end], packed), whole[begin:end])


def scales_of(num_out, num_blocks, lowest, highest, seed=0):
    """MXFP4 blocks, random numbers; scales of 2^lowest to 2^highest, both of them in every panel of 16 rows."""
    data = random_blocks("MXFP4", num_out, 32 * num_blocks, seed).reshape(num_out, num_blocks, 17)
    data[..., 0] = np.random.default_rng(seed).integers(lowest, highest + 1, data.shape[:2]) + 127
    data[::16, 0, 0], data[1::16, -1, 0] = lowest + 127, highest + 127
    return data.reshape(num_out, -1)


@pytest.mark.parametrize(
    ("lowest", "highest"),
    [
        *[(-36, 4), (-37, 4), (-127, 125)],
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(-36, 5), (-40, 5), (-127, -100), (60, 90), (-8, -8)]
        ],
    ],
)
@pytest.mark.parametrize("exponents", [(-60, 60), (-61, 0), (-20, 61), (-149, -100), (-90, -61), (-30, 2), (80, 110)])
def test_mxfp4_equals_floats_however_far_its_scales_and_inputs_reach(lowest, highest, exponents):
    """Sums are kept in units of the scales where these are near each other, which no result may show: not where sums
    are below a float's least exponent or above its largest, and not where terms of opposite signs leave little."""
    data = scales_of(80, 5, lowest, highest)
    packed, floats = pack_gguf(data, "MXFP4"), pack_weight(dequantize(data, "MXFP4"))
    generator = torch.Generator().manual_seed(2)
    powers = torch.randint(*exponents, (4, 160), generator=generator)
    x = torch.ldexp(torch.randn(4, 160, generator=generator).sign(), powers)
    x *= 1 + torch.rand(4, 160, generator=generator)
    x[1, 32:] = 0.0
    x[2, 1::2] = -x[2, ::2]
    for num_rows in (1, 2, 3, 4):
        for first in range(0, 4, num_rows):
            rows = x[first : first + num_rows]
            torch.testing.assert_close(linear_gguf(rows, packed), linear(rows, floats), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -0.0, 2.0**-149, 3.0e38])
def test_mxfp4_equals_floats_for_inputs_that_are_hardly_numbers(value):
    data = scales_of(40, 3, -20, -2)
    packed, floats = pack_gguf(data, "MXFP4"), pack_weight(dequantize(data, "MXFP4"))
    for num_rows in (1, 2, 3, 4, 6):
        x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(num_rows))
        x[num_rows // 2, 50] = value
        found = linear_gguf(x, packed)
        torch.testing.assert_close(found, linear(x, floats), rtol=0, atol=0, equal_nan=True)


def test_mxfp4_numbers_in_the_order_of_the_format():
    """A single input picks a column: number i of a block is the low half of byte i, number 16 + i its high half."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.random.default_rng(5).integers(0, 16, (17, 64), dtype=np.uint8)
    blocks = np.full((17, 2, 17), 128, dtype=np.uint8)  # 2^1
    halves = codes.reshape(17, 2, 2, 16)
    blocks[..., 1:] = halves[:, :, 0] | halves[:, :, 1] << 4
    found = linear_gguf(torch.eye(64), pack_gguf(blocks.reshape(17, -1), "MXFP4"))
    one_by_one = torch.cat(
        [linear_gguf(row[None], pack_gguf(blocks.reshape(17, -1), "MXFP4")) for row in torch.eye(64)]
    )
    expected = 2 * numbers[torch.from_numpy(codes).long()]
    assert torch.equal(found, expected.T)
    assert torch.equal(one_by_one, expected.T)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_zero_blocks_give_zero(type_name):
    block_inputs, block_bytes, _ = BLOCKS[type_name]
    packed = pack_gguf(np.zeros((20, 2 * block_bytes), dtype=np.uint8), type_name)
    assert torch.equal(linear_gguf(torch.ones(3, 2 * block_inputs), packed), torch.zeros(3, 20))


@pytest.mark.parametrize(
    ("type_name", "share"),
    [
        ("Q4_0", 1.0),
        ("Q4_1", 1.0),
        ("Q5_0", 1.0),
        ("Q5_1", 1.0),
        ("Q8_0", 1.0),
        ("Q4_K", 37 / 36),
        ("Q5_K", 45 / 44),
        ("Q6_K", 106 / 105),
        ("MXFP4", 1.0),
    ],
)
def test_panels_are_about_as_large_as_the_file(type_name, share):
    data = random_blocks(type_name, 64, 512)
    assert pack_gguf(data, type_name).num_bytes == pytest.approx(data.nbytes * share, abs=0)


def test_errors_name_what_was_given():
    data = random_blocks("Q8_0", 20, 64)
    with pytest.raises(
        ConfigError, match="IQ2_XS has no kernel; there are MXFP4, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0"
    ):
        pack_gguf(data, "IQ2_XS")
    with pytest.raises(ConfigError, match=r"uint8 \[20, 68\]; Q6_K takes uint8 \[outputs, n \* 210\]"):
        pack_gguf(data, "Q6_K")
    with pytest.raises(ConfigError, match="scale that is not finite"):
        pack_gguf(np.full((16, 34), 0x7C, dtype=np.uint8), "Q8_0")
    packed = pack_gguf(data, "Q8_0")
    with pytest.raises(ConfigError, match=r"\[1, 32\].*\[..., 64\]"):
        linear_gguf(torch.ones(1, 32), packed)
    with pytest.raises(IndexError, match="id -1 was asked for; rows are 0 to 19"):
        gather_rows_gguf(packed, torch.tensor([3, -1]))
