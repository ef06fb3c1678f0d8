"""Prefixes out of one cache and into another: what is read there is what the tokens say, and memory adds up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.errors import CapacityError, RequestError
from lamella.kv_cache import invariants
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.simulation import Simulation, chunked, full, sliding

LAYERS = {
    "hybrid": [full(), sliding(9), sliding(9)],
    "several pages a slab": [full(3), sliding(9, 2), sliding(5)],
    "windows only": [sliding(9), sliding(5)],
    "chunked": [full(2), chunked(8)],
    "full only": [full()],
}
PROMPT = [(7 * index + index // 50) % 50 for index in range(61)]


def tokens_of(simulation: Simulation, tokens: np.ndarray, salt: str | None = None):
    """What each group has of the prefix, token by token and layer by layer: (first token, entries)."""
    manager, executor = simulation.manager, simulation.executor
    parts = manager.export_prefix(tokens, salt)
    for move in manager.take_moves():
        executor._copy(move.group, move.src_pages, move.dst_pages)
    found = []
    for group, part in zip(manager.layout.groups, parts, strict=True):
        first = part.first_block * manager.layout.page_tokens
        layers = {
            layer: [entry for page in part.pages.tolist() for entry in executor._entries(layer, page)]
            for layer in group.layers
        }
        found.append((first, {layer: entries[: len(tokens) - first] for layer, entries in layers.items()}))
    return found


def load(simulation: Simulation, tokens: np.ndarray, salt: str | None, found) -> bool:
    manager, executor = simulation.manager, simulation.executor
    page_tokens = manager.layout.page_tokens

    def write(moves, parts):
        for move in moves:
            executor._copy(move.group, move.src_pages, move.dst_pages)
        for (first, layers), part in zip(found, parts, strict=True):
            for layer, entries in layers.items():
                for block, page in enumerate(part.pages.tolist(), start=part.first_block):
                    kept = entries[block * page_tokens - first : (block + 1) * page_tokens - first]
                    executor._entries(layer, page)[: len(kept)] = kept

    is_new = manager.import_prefix(tokens, salt, [first for first, _ in found], write)
    invariants.check(manager)
    return is_new


def saved(layers, tokens: np.ndarray, salt=None, **options):
    source = Simulation(layers, max_model_len=90, **options)
    source.add("a", tokens, 1, salt)
    source.run()
    return tokens_of(source, tokens, salt)


@pytest.mark.parametrize("layers", LAYERS)
def test_what_was_computed_elsewhere_is_found_and_right(layers):
    """Into caches with other page sizes, that have parts of the prefix already, and whose memory is full."""
    for seed in range(3):
        draw = random.Random(seed)
        tokens = np.array(PROMPT[: draw.randint(1, 60)], dtype=np.int32)
        salt = draw.choice([None, "tenant"])
        found = saved(LAYERS[layers], tokens, salt, page_tokens=4, chunk_tokens=draw.choice((3, 61)))
        simulation = Simulation(
            LAYERS[layers], page_tokens=draw.choice((1, 2, 4)), max_model_len=90, windowed_replay=False,
            extra_slabs=draw.choice((0, 5, 400)), retention=RetentionPolicy(spare=draw.random() < 0.5),
        )  # fmt: skip
        for index in range(3):  # fills the memory, partly with the same tokens
            other = [*PROMPT[: draw.choice((0, 10, 30, 58))], *(draw.randrange(50) for _ in range(draw.randint(1, 30)))]
            simulation.add(f"before {index}", other, 3, salt)
        simulation.run()
        had_all = simulation.manager.match(np.append(tokens, 1).astype(np.int32), salt).num_tokens == len(tokens)
        assert load(simulation, tokens, salt, found) == (not had_all)
        assert not load(simulation, tokens, salt, found), "a second time there is nothing to do"
        assert simulation.manager.match(np.append(tokens, 1).astype(np.int32), salt).num_tokens == len(tokens)
        prompt = [*tokens.tolist(), 3, 4, 5]
        simulation.add("after", prompt, 4, salt)
        simulation.run()
        assert simulation.requests["after"].num_cached_tokens >= len(tokens)
        assert simulation.outputs["after"] == foretell(salt, prompt, 4)
        assert simulation.manager.reset_prefix_cache()
        assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values()), "nothing leaks"


def test_while_requests_run():
    tokens = np.array(PROMPT[:30], dtype=np.int32)
    found = saved(LAYERS["hybrid"], tokens)
    simulation = Simulation(LAYERS["hybrid"], max_model_len=90)
    simulation.add("a", [9, *PROMPT], 20)
    for _ in range(6):
        simulation.step()
    assert load(simulation, tokens, None, found)
    simulation.add("b", [*PROMPT[:30], 8], 5)
    simulation.run()
    assert simulation.requests["b"].num_cached_tokens == 30
    assert simulation.outputs["a"] == foretell(None, [9, *PROMPT], 20)
    assert simulation.outputs["b"] == foretell(None, [*PROMPT[:30], 8], 5)


def test_what_is_loaded_goes_after_what_is_ordinary_and_can_be_pinned():
    tokens = np.array(PROMPT[:30], dtype=np.int32)
    simulation = Simulation(LAYERS["hybrid"], max_model_len=90)
    assert not simulation.manager.pin("a", tokens).is_cached
    load(simulation, tokens, None, saved(LAYERS["hybrid"], tokens))
    assert [one.is_cached for one in simulation.manager.pinned()] == [True], "an order that waited for it"
    tree = simulation.manager.inspect().tree
    assert [tree.resume_points.is_favoured(node) for node in tree.resume_points] == [True]


def test_what_cannot_be_given_or_taken():
    tokens = np.array(PROMPT[:30], dtype=np.int32)
    simulation = Simulation(LAYERS["hybrid"], page_tokens=4, max_model_len=40, extra_slabs=0)
    with pytest.raises(RequestError, match="of the prefix of 30 tokens 0 are in the cache"):
        simulation.manager.export_prefix(tokens)
    simulation.add("a", [*PROMPT[:30], *range(9)], 1)
    simulation.run()
    with pytest.raises(RequestError, match="run a request with this prompt first"):
        simulation.manager.export_prefix(tokens)
    found = saved(LAYERS["hybrid"], tokens, page_tokens=4)
    large = Simulation(LAYERS["hybrid"], page_tokens=16, max_model_len=90)
    longer = np.array(PROMPT[:34], dtype=np.int32)
    with pytest.raises(RequestError, match="from token 20 on, and with page_size=16 it is needed from token 16 on"):
        load(large, longer, None, saved(LAYERS["hybrid"], longer, page_tokens=4))
    simulation.add("b", [8, *PROMPT[:35]], 4)
    simulation.step()
    simulation.step()
    simulation.step()
    with pytest.raises(CapacityError, match="the prefix of 30 tokens takes"):
        load(simulation, tokens, None, found)
    invariants.check(simulation.manager)
    simulation.run()
    assert simulation.outputs["b"] == foretell(None, [8, *PROMPT[:35]], 4)
    with pytest.raises(RequestError, match="retention='none'"):
        load(Simulation(LAYERS["hybrid"], retention=RetentionPolicy("none")), tokens, None, found)


def test_pages_are_free_again_where_writing_fails():
    tokens = np.array(PROMPT[:30], dtype=np.int32)
    simulation = Simulation(LAYERS["hybrid"], max_model_len=90)

    def write(moves, parts):
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        simulation.manager.import_prefix(tokens, None, [0, 0], write)
    invariants.check(simulation.manager)
    assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
