"""Which rows get what of which adapter, and updates in 16 bits; whole engines are in tests/engine/test_adapters.py."""

import numpy as np
import pytest
import torch

from lamella.errors import InvariantError
from lamella.model_executor.layers.adapters import Adapter, LowRankUpdate, RowAdapters, UpPart
from lamella.model_executor.layers.native_adapters import native_adapters
from lamella.model_executor.layers.torch_adapters import torch_adapter

CPU = torch.device("cpu")


class Recorded:
    """An update that keeps what it was asked for."""

    def __init__(self):
        self.rows = []

    def add_to(self, y, x, rows, columns):
        self.rows.append((rows.tolist(), columns))


def update(seed=0):
    """Rank 3 for the outputs 0 to 4, rank 2 for 7 to 9."""
    generator = torch.Generator().manual_seed(seed)
    down, first, second = (torch.randn(shape, generator=generator) for shape in ((5, 6), (5, 3), (3, 2)))
    return LowRankUpdate(down, (UpPart(0, 5, 0, first), UpPart(7, 10, 3, second)))


def test_each_adapter_gets_the_rows_of_its_requests():
    first, second = Recorded(), Recorded()
    adapters = {3: Adapter({"a": first}), 8: Adapter({"a": second, "b": second})}
    rows = RowAdapters(np.array([0, 8, 3, 3, 0, 8]), adapters, CPU)
    whole = slice(0, 4)
    x = y = torch.zeros(6, 4)
    for name in ("a", "b", "c"):
        rows.add_to(y, name, x, whole)
    assert first.rows == [([2, 3], whole)]
    assert second.rows == [([1, 5], whole), ([1, 5], whole)]
    assert (rows.touch("a"), rows.touch("c"), rows.touch("c", "b")) == (True, False, True)


def test_of_some_rows():
    taken = Recorded()
    rows = RowAdapters(np.array([0, 8, 3, 3, 0, 8]), {3: Adapter({"a": taken}), 8: Adapter({})}, CPU)
    wanted = torch.tensor([1, 3, 4])
    part = rows.of_rows(wanted)
    assert part.num_rows == 3
    part.add_to(torch.zeros(3, 4), "a", torch.zeros(3, 4), slice(0, 4))
    assert taken.rows == [([1], slice(0, 4))]
    assert rows.of_rows(wanted) is part  # layer after layer asks for the same
    assert rows.of_rows(torch.tensor([2])) is not part
    assert rows.of_rows(None) is rows
    assert native_adapters(rows.of_rows(torch.tensor([0, 4]))) is None


def test_an_adapter_that_is_not_loaded_is_a_fault():
    with pytest.raises(InvariantError, match=r"rows of adapter 4; \[3\] are loaded"):
        RowAdapters(np.array([3, 4]), {3: Adapter({})}, CPU)


@pytest.mark.parametrize("rows", [[0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_updates_are_float32_whatever_the_model_computes_in(dtype, rows):
    made = update()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, width, generator=generator).to(dtype) for width in (6, 10))
    low = x.double() @ made.down.double().T
    added = torch.zeros(4, 10, dtype=torch.float64)
    added[:, :5] = low[:, :3] @ made.ups[0].weight.double().T
    added[:, 7:] = low[:, 3:] @ made.ups[1].weight.double().T
    expected = y.clone()
    expected[rows] = (y.double() + added)[rows].to(dtype)
    found = y.clone()
    torch_adapter({"a": made}, CPU).updates["a"].add_to(found, x, torch.tensor(rows), slice(0, 10))
    assert torch.equal(found, expected) if dtype == torch.bfloat16 else torch.allclose(found, expected, atol=1e-5)
    part = y[:, 5:].clone()
    torch_adapter({"a": made}, CPU).updates["a"].add_to(part, x, torch.tensor(rows), slice(5, 10))
    assert torch.equal(part, found[:, 5:])
