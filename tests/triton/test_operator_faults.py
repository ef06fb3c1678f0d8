"""Faults planted in the operators' kernels, one at a time: each must show in a check that the kernels as they are
pass."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import lamella.model_executor.layers.triton as package
from lamella.model_executor.layers.triton import activation, heads, norm
from tests.helpers.operator_cases import (
    Kernels,
    check_add_norm,
    check_gated,
    check_heads,
    check_norm,
    check_softcap,
)

SOURCE = Path(package.__file__).parent
MODULES = ("norm", "heads", "activation")


def norms(kernels: Kernels) -> None:
    check_norm(kernels, width=120, num_rows=2, dtype=torch.float32)


def additions(kernels: Kernels) -> None:
    check_add_norm(kernels, width=120, num_rows=2, dtype=torch.float32)


def narrow_additions(kernels: Kernels) -> None:
    check_add_norm(kernels, width=640, num_rows=2, dtype=torch.bfloat16)


def biased_additions(kernels: Kernels) -> None:
    check_add_norm(kernels, width=120, num_rows=2, dtype=torch.float32, bias_dtype=torch.float32)


def bare_additions(kernels: Kernels) -> None:
    check_add_norm(kernels, width=120, num_rows=2, dtype=torch.float32, has_post=False)


def gelus(kernels: Kernels) -> None:
    check_gated(kernels, width=1030, num_rows=2, dtype=torch.float32, activation="gelu_tanh")


def exact_gelus(kernels: Kernels) -> None:
    check_gated(kernels, width=120, num_rows=2, dtype=torch.float32, activation="gelu")


def silus(kernels: Kernels) -> None:
    check_gated(kernels, width=120, num_rows=2, dtype=torch.float32, activation="silu")


def biased_silus(kernels: Kernels) -> None:
    check_gated(kernels, width=120, num_rows=2, dtype=torch.float32, activation="silu", bias_dtype=torch.bfloat16)


def caps(kernels: Kernels) -> None:
    check_softcap(kernels, width=1030, num_rows=2, dtype=torch.float16, softcap=7.0)


def uneven_heads(kernels: Kernels) -> None:
    """Padded halves, two KV heads, pages of three tokens, scales, and a token without a slot."""
    check_heads(
        kernels,
        num_heads=3,
        num_kv_heads=2,
        head_dim=24,
        num_tokens=5,
        page_tokens=3,
        unslotted=[1],
        k_scale=0.5,
        v_scale=3.0,
    )


def many_heads(kernels: Kernels) -> None:
    """More than one program takes, the last of each kind with room to spare."""
    check_heads(kernels, num_heads=20, num_kv_heads=9, head_dim=256, num_tokens=2)


def other_heads(kernels: Kernels) -> None:
    """A bias, half of each head turned, and values narrower than keys."""
    check_heads(
        kernels,
        num_heads=3,
        num_kv_heads=2,
        head_dim=40,
        v_dim=24,
        rotary_dim=20,
        num_tokens=5,
        page_tokens=3,
        bias_dtype=torch.float32,
    )


def many_other_heads(kernels: Kernels) -> None:
    check_heads(kernels, num_heads=20, num_kv_heads=9, head_dim=256, v_dim=128, num_tokens=2)


def bare_heads(kernels: Kernels) -> None:
    check_heads(kernels, num_heads=3, num_kv_heads=2, head_dim=24, num_tokens=3, rotary_dim=0, has_norms=False)


def narrow_pages(kernels: Kernels) -> None:
    check_heads(
        kernels, num_heads=1, num_kv_heads=1, head_dim=16, num_tokens=3, dtype=torch.bfloat16, cache_dtype=torch.float32
    )


@dataclass(frozen=True, slots=True)
class Fault:
    file: str
    old: str
    new: str
    shows_in: Callable[[Kernels], None]


FAULTS = {
    "mean over the padding": Fault("norm", "tl.sum(row * row, 0) / WIDTH", "tl.sum(row * row, 0) / 128", norms),
    "eps outside the root": Fault("norm", " / WIDTH + eps)", " / WIDTH) + eps", norms),
    "weight taken for one less than it is": Fault(
        "norm", "row * factor * tl.load(", "row * factor + row * factor * tl.load(", norms
    ),
    "rows taken for adjacent": Fault("norm", "row * x_row_stride", "row * WIDTH", norms),
    "padded columns read": Fault(
        "norm",
        "tl.load(x + row * x_row_stride + column, mask=present",
        "tl.load(x + row * x_row_stride + column, mask=column < BLOCK",
        norms,
    ),
    "padded columns written": Fault(
        "norm", "tl.store(residual, kept, mask=present)", "tl.store(residual, kept, mask=column < BLOCK)", additions
    ),
    "norm of what was added": Fault("norm", "normed_row(kept.to(tl.float32)", "normed_row(added", additions),
    "residual left as it was": Fault("norm", "tl.store(residual, kept, mask=present)", "pass", additions),
    "what is added is not normed": Fault("norm", ".to(tl.float32) + added", ".to(tl.float32) + values", additions),
    "weights of the two norms swapped": Fault(
        "norm", "normed_row(values, post_weight", "normed_row(values, next_weight", additions
    ),
    "eps of the two norms swapped": Fault(
        "norm", "next_weight, next_eps, column", "next_weight, post_eps, column", additions
    ),
    "bias left out": Fault("norm", "values += tl.load(bias", "values += 0 * tl.load(bias", biased_additions),
    "bias of the first column": Fault("norm", "tl.load(bias + column", "tl.load(bias + 0 * column", biased_additions),
    "what is not normed is not added": Fault(
        "norm", "    added = values\n", "    added = values * 0\n", bare_additions
    ),
    "norm of what was not rounded": Fault(
        "norm", "normed_row(kept.to(tl.float32)", "normed_row(total", narrow_additions
    ),
    "up before gate": Fault(
        "activation",
        "source = gate_up + row * row_stride + column",
        "source = gate_up + row * row_stride + (column + WIDTH) % (2 * WIDTH)",
        silus,
    ),
    "silu for gelu": Fault("activation", 'ACTIVATION == "gelu_tanh"', 'ACTIVATION == "none"', gelus),
    "gelu without its cube": Fault("activation", "(x + 0.044715 * x * x * x)", "x", gelus),
    "bias of the gate for both": Fault("activation", "bias + WIDTH + column", "bias + column", biased_silus),
    "half of the exponent": Fault("activation", "1.5957691216057308", "0.7978845608028654", gelus),
    "erf without the root": Fault("activation", "x * 0.7071067811865476", "x", exact_gelus),
    "second block lost": Fault(
        "activation", "tl.program_id(1) * BLOCK + tl.arange", "tl.program_id(1) * 0 + tl.arange", caps
    ),
    "cap not multiplied back": Fault("activation", "capped = softcap * (", "capped = (", caps),
    "tanh of half": Fault("activation", "(2.0 / softcap)", "(1.0 / softcap)", caps),
    "mean over half of a head": Fault("heads", "squares / DIM", "squares / HALF", uneven_heads),
    "norm of the first half alone": Fault("heads", "first * first + second * second", "first * first", uneven_heads),
    "weights of one half for both": Fault("heads", "weight + HALF + column", "weight + column", uneven_heads),
    "key norm on queries": Fault("heads", "            query_weight,", "            key_weight,", uneven_heads),
    "turned the other way": Fault("heads", "first * c - second * s", "first * c + second * s", uneven_heads),
    "half of a head turned": Fault("heads", "as_stored(second * c + first * s,", "as_stored(second,", uneven_heads),
    "angles of the first token": Fault(
        "heads", "sin += token * rotary_row_stride", "sin += 0 * rotary_row_stride", uneven_heads
    ),
    "keys taken from queries": Fault("heads", "source = row + query_size", "source = row", uneven_heads),
    "values taken from keys": Fault("heads", "source + key_size + element", "source + element", uneven_heads),
    "wrong slot in the page": Fault(
        "heads", "in_page = slot % PAGE_TOKENS", "in_page = (slot + 1) % PAGE_TOKENS", uneven_heads
    ),
    "pages taken for adjacent": Fault(
        "heads", "keys + page * key_page_stride", "keys + page * PAGE_TOKENS * key_size", uneven_heads
    ),
    "slot -1 is written": Fault("heads", "if slot >= 0:", "if slot >= -1:", uneven_heads),
    "scales the wrong way": Fault("heads", "tl.div_rn(x, scale)", "x * scale", uneven_heads),
    "K's scale for V": Fault("heads", "value_row, value_scale,", "value_row, key_scale,", uneven_heads),
    "one key head too many": Fault(
        "heads",
        "FP8_MANTISSA,\n                NUM_KV_HEADS,",
        "FP8_MANTISSA,\n                NUM_KV_HEADS + 1,",
        many_heads,
    ),
    "second tile lost": Fault("heads", "head = tile * TILE +", "head = tile * 0 +", many_heads),
    "tiles of K counted from those of Q": Fault("heads", "tile -= query_tiles", "tile -= 0", many_heads),
    "bias of queries on keys": Fault("heads", "bias if bias is None else bias + query_size", "bias", other_heads),
    "bias of keys on values": Fault(
        "heads", "query_size + key_size + element, present", "element, present", other_heads
    ),
    "bias of the first half for both": Fault("heads", "bias, offsets + HALF, mask", "bias, offsets, mask", other_heads),
    "no bias on what is not turned": Fault(
        "heads", "rest = with_bias(rest, bias, rest_offsets, rest_mask)", "pass", other_heads
    ),
    "mean over what is turned": Fault("heads", "squares += tl.sum(rest * rest, 1)", "pass", other_heads),
    "one weight for what is not turned": Fault(
        "heads", "weight + rest_column", "weight + 0 * rest_column", other_heads
    ),
    "what is not turned is not stored": Fault(
        "heads", "mask=rest_mask)\n\n", "mask=rest_mask & False)\n\n", other_heads
    ),
    "values taken for as wide as keys": Fault("heads", "VALUE_DIM != DIM", "VALUE_DIM == DIM", other_heads),
    "tiles of values as wide as those of keys": Fault(
        "heads", "tile * (KV_TILE * VALUE_DIM)", "tile * (KV_TILE * DIM)", many_other_heads
    ),
    "first half for both where none is turned": Fault(
        "heads", "as_stored(second, target", "as_stored(first, target", bare_heads
    ),
    "values behind the last head": Fault("heads", " & (element < value_size)", "", many_heads),
    "rounded to the model's dtype": Fault(
        "heads", "return stored(x, target", "return stored(x.to(tl.bfloat16), target", narrow_pages
    ),
}

CHECKS = {fault.shows_in.__name__: fault.shows_in for fault in FAULTS.values()}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_kernels_as_they_are_pass(check: Callable[[Kernels], None]) -> None:
    check(Kernels(norm, heads, activation))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(FAULTS)]
)
def test_a_planted_fault_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the package under another name, with one thing changed."""
    fault = FAULTS[name]
    copied = f"faulty_operators_{list(FAULTS).index(name)}"
    (tmp_path / copied).mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text(encoding="utf-8").replace(package.__name__, copied)
        if path.stem == fault.file:
            assert fault.old in text
            text = text.replace(fault.old, fault.new)
        (tmp_path / copied / path.name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        faulty = Kernels(*(importlib.import_module(f"{copied}.{module}") for module in MODULES))
        with pytest.raises(AssertionError):
            fault.shows_in(faulty)
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == copied]:
            del sys.modules[module]
