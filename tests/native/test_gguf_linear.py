import gguf
import numpy as np
import pytest
import torch

from lamella.errors import ConfigError
from lamella.native.gguf_linear import gather_rows_gguf, linear_gguf, pack_gguf

# inputs and bytes of a block, and where its float16 scales lie
BLOCKS = {
    "Q4_0": (32, 18, [0]), "Q4_1": (32, 20, [0, 2]), "Q5_0": (32, 22, [0]), "Q5_1": (32, 24, [0, 2]),
    "Q8_0": (32, 34, [0]), "Q4_K": (256, 144, [0, 2]), "Q5_K": (256, 176, [0, 2]), "Q6_K": (256, 210, [208]),
}  # fmt: skip
SHAPES = [
    ("Q4_0", 16, 32), ("Q4_0", 50, 576), ("Q4_0", 33, 96), ("Q4_1", 16, 32), ("Q4_1", 50, 576), ("Q4_1", 33, 96),
    ("Q5_1", 16, 32), ("Q5_1", 49, 896), ("Q5_1", 33, 96), ("Q5_K", 7, 256), ("Q5_K", 40, 768),
    ("Q8_0", 16, 32), ("Q8_0", 50, 640), ("Q8_0", 33, 96), ("Q5_0", 16, 32), ("Q5_0", 49, 672), ("Q5_0", 33, 64),
    ("Q4_K", 7, 256), ("Q4_K", 40, 1024), ("Q6_K", 7, 256), ("Q6_K", 40, 768),
]  # fmt: skip


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_blocks(type_name, num_out, num_in, seed=0, any_scale=False):
    """Random bytes: every field takes all of its values. Scales are finite halves, by default in [2^-8, 2^-4)."""
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
        ("Q4_K", 896, 4864), ("Q5_K", 896, 4864), ("Q6_K", 896, 4864),
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
