import dataclasses

import pytest
import torch

from lamella.errors import ConfigError
from lamella.native.int8_head import build_int8_head


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pack(weight):
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % 16))
    return padded.view(-1, 16, weight.shape[1]).transpose(1, 2).contiguous()


def head_of(weight):
    return build_int8_head(pack(weight), weight.shape[0])


def chain(x, weight):
    """sum = fma(x, w, sum), input by input: exact in float64 for what `few_bits` gives, then rounded to float32."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(x.shape[1]):
        sums = (x[:, k, None].double() * weight[None, :, k].double() + sums.double()).float()
    return sums


def few_bits(shape, generator, num_bits=12):
    return torch.randint(-(2**num_bits), 2**num_bits, shape, generator=generator).float() / 2 ** (num_bits - 2)


def expect_best(head, x, weight, num_best, scores=None):
    scores = chain(x, weight) if scores is None else scores
    values, ids = scores.sort(dim=1, descending=True, stable=True)  # of equal values the lowest id first
    found = head.best(x, num_best)
    assert torch.equal(found.ids, ids[:, :num_best])
    assert torch.equal(found.values, values[:, :num_best])
    return found


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 13, 200])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 3), (16, 8), (37, 33), (1000, 130)])
def test_best_outputs_are_those_of_the_float_chain(num_out, num_in, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    weight = few_bits((num_out, num_in), generator)
    # 4096 times larger every other input: float32 sums round at each step
    x = few_bits((num_rows, num_in), generator) * torch.tensor([1.0, 4096.0]).repeat(num_in)[:num_in]
    head = head_of(weight)
    scores = chain(x, weight)
    for num_best in {1, min(5, num_out), min(64, num_out)}:
        expect_best(head, x, weight, num_best, scores)


@pytest.mark.parametrize(("num_out", "num_in"), [pytest.param(49152, 576, marks=pytest.mark.slow), (9000, 896)])
def test_the_vocabularies_of_models(num_out, num_in):
    """Against float64, for a chain over so many outputs takes long."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(num_out, num_in, generator=generator)
    x = torch.randn(6, num_in, generator=generator)
    scores = x.double() @ weight.double().T
    values, ids = scores.topk(21)
    assert (values.diff(dim=1) < -1e-4).all(), "or rounding could change the order"
    head = head_of(weight)
    for rows in (1, 6):
        found = head.best(x[:rows], 20)
        assert torch.equal(found.ids, ids[:rows, :20])
        torch.testing.assert_close(found.values.double(), values[:rows, :20], rtol=1e-5, atol=0)


@pytest.mark.parametrize("repeats", [1, 5])
def test_few_columns_are_scored_again_where_one_stands_out(repeats):
    generator = torch.Generator().manual_seed(0)
    weight = few_bits((4000, 64), generator)
    x = weight[[17, 3999, 0] * repeats].contiguous()
    found = expect_best(head_of(weight), x, weight, 1)
    assert found.ids[:, 0].tolist() == [17, 3999, 0] * repeats
    assert found.num_rescored.tolist() == [1, 1, 1] * repeats


@pytest.mark.parametrize("seed", range(4))
def test_columns_that_differ_by_one_unit_in_the_last_place(seed):
    generator = torch.Generator().manual_seed(seed)
    base = few_bits((1, 40), generator, num_bits=8)
    weight = base.repeat(900, 1)
    for row in range(900):
        k = int(torch.randint(0, 40, (), generator=generator))
        toward = torch.tensor(float("inf") if row % 3 else -float("inf"))
        weight[row, k] = torch.nextafter(weight[row, k] + (weight[row, k] == 0), toward)
    x = few_bits((6, 40), generator, num_bits=8)
    head = head_of(weight)
    scores = chain(x, weight)
    for rows in (1, 2, 4, 6):
        for num_best in (1, 10, 64):
            expect_best(head, x[:rows], weight, num_best, scores[:rows])


def test_equal_columns_give_the_lowest_ids():
    weight = few_bits((1, 20), torch.Generator().manual_seed(3)).repeat(300, 1)
    found = head_of(weight).best(weight[:2].contiguous(), 7)
    assert found.ids.tolist() == [list(range(7))] * 2
    assert found.num_rescored.tolist() == [300, 300]


@pytest.mark.parametrize("num_rows", [3, 7])
def test_more_candidates_than_are_kept_read_all_floats(num_rows):
    generator = torch.Generator().manual_seed(4)
    weight = few_bits((1, 4), generator).repeat(70_000, 1)
    weight[65_000] += 2.0**-16
    x = weight[:num_rows].abs().contiguous()
    found = expect_best(head_of(weight), x, weight, 3)
    assert found.ids[0].tolist() == [65_000, 0, 1]
    assert found.num_rescored.tolist() == [70_000] * num_rows


@pytest.mark.parametrize(("num_best", "num_rescored"), [(1, 8), (20, 20)])
@pytest.mark.parametrize("num_rows", [2, 6])
def test_columns_that_the_scores_found_rule_out_are_not_scored(num_rows, num_best, num_rescored):
    """Weights of which int8 keeps nothing: each score is 0 with a bound of the weight itself, so the bounds alone rule
    out no column, and the first that are scored rule out all the others."""
    weight = torch.zeros(500, 4)
    weight[:, 0] = torch.linspace(0.01, 0.49, 500)[torch.randperm(500, generator=torch.Generator().manual_seed(2))]
    weight[:, 3] = 127.0  # times 0: all scales are 1
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(num_rows, 1)
    found = expect_best(head_of(weight), x, weight, num_best)
    assert found.num_rescored.tolist() == [num_rescored] * num_rows


def test_what_rounding_a_row_hides_is_found():
    """Weights that int8 holds exactly, rows that 16 bits do not: the best by rounded rows is another column, so without
    its part for the rows the bound would rule out the right one."""
    generator = torch.Generator().manual_seed(8)
    signs = torch.randint(0, 2, (40, 96), generator=generator) * 2.0 - 1
    x = 0.375 * signs
    x[:, 0], x[:, 1], x[:, 2] = 32767.0, 0.0, 10.0  # all scales are 1, and all but 10 is rounded away
    weight = torch.randint(-3, 4, (3000, 96), generator=generator).float()
    weight[:40] = 20 * signs  # the best of each row, 20 * 0.375 * 93, of which nothing is left
    weight[:, 0], weight[:, 1], weight[:, 2] = 0.0, 127.0, 0.0
    weight[40:80, 2] = 20.0  # 200 and little more
    assert chain(x, weight).argmax(1).tolist() == list(range(40))
    assert bool((chain(x.round(), weight).argmax(1) >= 40).all())
    head = head_of(weight)
    expect_best(head, x, weight, 1)
    blind = dataclasses.replace(head, level_slopes=torch.zeros_like(head.level_slopes))
    assert not torch.equal(blind.best(x, 1).ids, head.best(x, 1).ids)


def test_many_rows_that_are_not_finite_take_the_float_path():
    generator = torch.Generator().manual_seed(9)
    weight = few_bits((300, 40), generator)
    x = few_bits((30, 40), generator)
    x[4, 7], x[11] = float("nan"), 3e38
    found = head_of(weight).best(x, 2)
    finite = [row for row in range(30) if row not in (4, 11)]
    values, ids = chain(x[finite], weight).sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.ids[finite], ids[:, :2])
    assert torch.equal(found.values[finite], values[:, :2])
    assert found.ids[4].tolist() == [0, 1]
    assert bool(found.values[4].isnan().all())
    assert [row for row in range(30) if found.num_rescored[row] == 300] == [4, 11]


def test_rows_that_are_not_finite_or_overflow_take_the_float_path():
    generator = torch.Generator().manual_seed(5)
    weight = few_bits((200, 16), generator)
    x = few_bits((6, 16), generator)
    x[1, 3] = float("nan")
    x[2, 3] = float("inf")
    x[3, 0] = 3e38
    x[4] = 3e38
    head = head_of(weight)
    found = head.best(x, 4)
    scores = chain(x, weight)
    assert found.num_rescored.tolist()[1:5] == [200] * 4
    assert int(found.num_rescored[0]) < 200
    assert int(found.num_rescored[5]) < 200
    assert found.ids[1].tolist() == [0, 1, 2, 3]
    assert bool(found.values[1].isnan().all())
    for row in (0, 2, 3, 4, 5):  # NaN counts as larger than everything
        keys = [(0, 0, n) if score != score else (1, -score, n) for n, score in enumerate(scores[row].tolist())]
        order = [n for _, _, n in sorted(keys)]
        assert found.ids[row].tolist() == order[:4]
        assert torch.equal(found.values[row].nan_to_num(nan=7.0), scores[row, order[:4]].nan_to_num(nan=7.0))


@pytest.mark.parametrize("repeats", [1, 3])
def test_zeros_and_denormals(repeats):
    weight = torch.zeros(50, 8)
    weight[20] = 1e-41
    weight[30, 2] = 2e-39
    x = torch.ones(2, 8)
    x[1] = 0
    found = head_of(weight).best(x.repeat(repeats, 1), 2)
    assert found.ids.tolist() == [[30, 20], [0, 1]] * repeats
    values = torch.stack([chain(x[:1], weight)[0, [30, 20]], torch.zeros(2)])
    assert torch.equal(found.values, values.repeat(repeats, 1))


def test_outliers_in_activations_and_weights():
    generator = torch.Generator().manual_seed(6)
    weight = few_bits((3000, 48), generator)
    weight[::7, 5] *= 64
    x = few_bits((5, 48), generator)
    x[:, 9] *= 1024
    expect_best(head_of(weight), x, weight, 16)


def test_a_row_does_not_depend_on_its_company_or_the_threads():
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(2500, 96, generator=generator)
    x = torch.randn(205, 96, generator=generator)
    head = head_of(weight)
    whole = head.best(x, 8)
    torch.set_num_threads(1)
    alone = head.best(x, 8)
    torch.set_num_threads(2)
    assert torch.equal(alone.ids, whole.ids)
    assert torch.equal(alone.values, whole.values)
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 17), (17, 205)):
        part = head.best(x[begin:end], 8)
        assert torch.equal(part.ids, whole.ids[begin:end])
        assert torch.equal(part.values, whole.values[begin:end])


def test_no_rows():
    assert head_of(torch.ones(20, 4)).best(torch.ones(0, 4), 3).ids.shape == (0, 3)


@pytest.mark.parametrize("num_rows", [3, 9])
def test_weights_that_are_not_finite_are_scored_by_the_float_weights(num_rows):
    generator = torch.Generator().manual_seed(3)
    weight = few_bits((50, 12), generator)
    weight[7, 3], weight[21, 0], weight[40] = float("nan"), float("inf"), -float("inf")
    x = few_bits((num_rows, 12), generator)
    x[1] = 0.0
    head = head_of(weight)
    scores = torch.stack([torch.stack([chain(row[None], one[None])[0, 0] for one in weight]) for row in x])
    found = head.best(x, 5)
    for row in range(num_rows):
        order = sorted(range(50), key=lambda column: (not scores[row, column].isnan(), -float(scores[row, column])))
        assert found.ids[row].tolist() == order[:5], row
        assert torch.equal(found.values[row].nan_to_num(nan=7.0), scores[row, order[:5]].nan_to_num(nan=7.0))


def test_errors_name_what_was_given():
    weight = torch.ones(20, 4)
    head = head_of(weight)
    with pytest.raises(ConfigError, match="num_best is 0; it can be 1 to 20"):
        head.best(torch.ones(1, 4), 0)
    with pytest.raises(ConfigError, match="num_best is 65; it can be 1 to 64"):
        head_of(torch.ones(100, 4)).best(torch.ones(1, 4), 65)
    with pytest.raises(ConfigError, match=r"x is \[4\]"):
        head.best(torch.ones(4))
    with pytest.raises(ConfigError, match=r"\[1, 5\].*\[..., 4\]"):
        head.best(torch.ones(1, 5))
    with pytest.raises(ConfigError, match="num_out is 33; 2 panels hold 32"):
        build_int8_head(pack(weight), 33)
    with pytest.raises(ConfigError, match=r"torch\.float64 \[2, 4, 16\]"):
        build_int8_head(pack(weight).double(), 20)
