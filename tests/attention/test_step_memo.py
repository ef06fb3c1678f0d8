"""What a step's layers share: worked out once, for metadata that it belongs to, and gone with the step."""

from __future__ import annotations

import ast
import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import lamella
from lamella.attention import native_backend, torch_decode, torch_prefill
from lamella.attention.reference import ReferenceBackend
from lamella.attention.step_memo import StepMemo
from lamella.attention.torch_backend import TorchBackend
from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import load_engine
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from tests.helpers.attention_cases import Ragged, make_case, memo_entries
from tests.helpers.hand_plans import PagedSequences, Turn
from tests.helpers.sampling import make_batch
from tests.helpers.tiny_gemma import save_tiny_gemma

SHAPE = {"num_kv_heads": 2, "k_dim": 16, "v_dim": 16, "itemsize_bytes": 4}
SLIDING = SlidingWindowSpec(window_tokens=11, **SHAPE)
# Three tokens of which the last is sampled behind, a decode, and a prompt: every layer but the last takes in all.
TURNS = [Turn(0, 20, 21, 1), Turn(1, 20, 23, 1), Turn(2, 0, 30, 1)]


def memos_alive() -> int:
    return sum(type(one) is StepMemo for one in gc.get_objects())


class Watched:
    """A runner's model that notes at each step how many memos there are when it has run, and what each group's has."""

    def __init__(self, model) -> None:
        self._model = model
        self.num_alive: list[int] = []
        self.entries: list[list[set[str]]] = []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, token_ids, positions, attention):
        hidden = self._model(token_ids, positions, attention)
        self.num_alive.append(memos_alive())
        self.entries.append([{name for name, _ in memo_entries(metadata)} for metadata in attention.metadata])
        return hidden


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny_gemma(path)
    return str(path)


def run_steps(folder: str, backend: str) -> Watched:
    config = EngineConfig(model=folder, attention_backend=backend, max_model_len=64, kv_cache_memory_bytes=2**22)
    runner = load_engine(config).runner
    runner.model = watched = Watched(runner.model)
    paged = PagedSequences(runner, [list(range(6, 40))] * 3, keeps_windows=True)
    runner.execute(paged.plan([Turn(0, 0, 20, 0), Turn(1, 0, 20, 0)], make_batch()))
    runner.execute(paged.plan(TURNS, make_batch({}, {}, {})))
    return watched


@pytest.mark.parametrize(
    ("backend", "first", "second"),
    [
        ("native", {"native_batches"}, {"native_batches"}),
        (
            "torch",
            {"slot_bounds", "torch_write", "torch_prefill"},
            {"slot_bounds", "torch_write", "torch_prefill", "torch_decode"},
        ),
    ],
)
def test_a_step_s_memos_go_with_it(folder, backend, first, second):
    before = memos_alive()
    watched = run_steps(folder, backend)
    assert watched.entries == [[first, first], [second, second]], "of the sliding group and the full one"
    assert all(alive >= before + 2 for alive in watched.num_alive)
    assert memos_alive() == before


@pytest.mark.parametrize(
    ("backend", "place", "name", "expected"),
    [
        # For a step's sliding and full group, and for the tokens that leave the last layer, a part of the full group's.
        # In the first step that part has none: native makes a batch without tiles, torch is not asked.
        ("native", native_backend, "make_batch", 3 + 3),
        ("torch", torch_decode, "plan_decode", 0 + 3),
        ("torch", torch_prefill, "plan_prefill", 2 + 2),
    ],
)
def test_six_layers_plan_once_for_each_group(folder, monkeypatch, backend, place, name, expected):
    made, original = [], getattr(place, name)

    def counted(*args):
        made.append(args)
        return original(*args)

    monkeypatch.setattr(place, name, counted)
    run_steps(folder, backend)
    assert len(made) == expected


def test_metadata_that_is_made_from_other_metadata_starts_empty():
    """What was found out for the one need not hold for the other."""
    case = make_case(SLIDING, [Ragged(20), Ragged(9, 40)], num_heads=4, page_tokens=16)
    expected, arena = case.run(TorchBackend())
    some = case.metadata.of_tokens(np.array([0, 5, 6]))
    assert memo_entries(case.metadata)
    assert memo_entries(some) == {}
    # The decode alone is another context: without its first keys.
    other = dataclasses.replace(case.metadata, first_keys=torch.tensor([15, 0]), first_keys_host=np.array([15, 0]))
    assert memo_entries(other) == {}
    assert other.parts == {}
    found, exact = torch.empty_like(expected[:1]), torch.empty_like(expected[:1])
    for backend, out in ((TorchBackend(), found), (ReferenceBackend(), exact)):
        backend.decode(case.params, case.cache(backend, arena), case.query[:1], other, out)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, expected[:1], rtol=1e-3, atol=1e-3)


def test_layers_of_one_group_that_see_differently_far_do_not_share():
    case = make_case(FullAttentionSpec(**SHAPE), [Ragged(20), Ragged(9, 40)], num_heads=4, page_tokens=16)
    case.run(TorchBackend())
    narrower = dataclasses.replace(case.params, spec=SLIDING)
    _, arena = case.run(TorchBackend())
    found, exact = torch.empty_like(case.query), torch.empty_like(case.query)
    for backend, out in ((TorchBackend(), found), (ReferenceBackend(), exact)):
        cache = case.cache(backend, arena)
        backend.decode(narrower, cache, case.query[:1], case.metadata, out[:1])
        backend.prefill(narrower, cache, case.query[1:], case.metadata, out[1:])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_no_value_keeps_what_it_likes():
    """A dictionary of anything in a value, or one that goes by where objects lie in memory, says nothing of what is in
    it and may outlive what it was worked out from."""
    found = []
    for path in sorted(Path(lamella.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.AnnAssign(annotation=annotation) if "dict[Any" in ast.unparse(annotation):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
                case ast.Call(func=ast.Name(id="id")):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
