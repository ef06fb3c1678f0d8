"""Prefixes that are never evicted: found whole whatever else goes, within a budget, and in no request's way."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lamella.errors import CapacityError, RequestError
from lamella.kv_cache import invariants
from lamella.kv_cache.prefix_match import NO_MATCH
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_executor import foretell
from tests.helpers.late_simulation import LateSimulation
from tests.helpers.simulation import Simulation, chunked, full, sliding

LAYERS = {
    "hybrid": [full(), sliding(9), sliding(9)],
    "several pages a slab": [full(3), sliding(9, 2), sliding(5)],
    "windows only": [sliding(9), sliding(5)],
    "chunked": [full(2), chunked(8)],
    "full only": [full()],
}
PROMPT = [(7 * index + index // 50) % 50 for index in range(61)]
PAGE_TOKENS = 4


def pin(simulation: Simulation, name: str, tokens: list[int], salt: str | None = None):
    pinned = simulation.manager.pin(name, np.array(tokens, dtype=np.int32), salt)
    invariants.check(simulation.manager)
    return pinned


def compute(simulation: Simulation, tokens: list[int], num_tokens: int = 1) -> None:
    name = f"r{len(simulation.requests)}"
    simulation.add(name, tokens, num_tokens)
    simulation.run()
    assert simulation.outputs[name] == foretell(None, tokens, num_tokens)


def num_found(simulation: Simulation, tokens: list[int], salt: str | None = None) -> int:
    return simulation.manager.match(np.array([*tokens, 1], dtype=np.int32), salt).num_tokens


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("simulation_class", [Simulation, LateSimulation])
def test_what_is_pinned_is_all_that_is_found_when_the_rest_is_evicted(layers, simulation_class):
    """Against a list of token sequences: where nothing slides a prompt finds all that it shares with any pin; else it
    must share all of one."""
    draw = random.Random(len(layers))
    is_full = layers == "full only"
    for _ in range(5):
        simulation = simulation_class(
            LAYERS[layers], chunk_tokens=draw.choice((5, 16, 61)), max_model_len=90, windowed_replay=False,
            step_tokens=draw.choice((0, 48)), never_idle=True,
        )  # fmt: skip
        pins, computed = {}, []
        for index in range(3):
            tokens = [*PROMPT[: draw.randint(1, 60)], *(draw.randrange(50) for _ in range(draw.randint(0, 2)))]
            pins[f"pin {index}"] = tokens
            if draw.random() < 0.5:  # pinned first, and computed by the next prompt that begins with it
                assert not pin(simulation, f"pin {index}", tokens).is_cached or num_found(simulation, tokens)
                computed.append([*tokens, *(draw.randrange(50) for _ in range(draw.randint(0, 9)))])
                compute(simulation, computed[-1], 2)
            else:
                computed.append(tokens)
                compute(simulation, tokens)
                pin(simulation, f"pin {index}", tokens)
        assert [one.is_cached for one in simulation.manager.pinned()] == [True] * 3
        assert simulation.manager.reset_prefix_cache(), "nothing but pins is left"
        for _ in range(20):
            tokens = draw.choice([*pins.values()])
            asked = [*tokens[: draw.randint(1, len(tokens))], draw.randrange(50)]
            shared = {name: num_common(one, asked) for name, one in pins.items()}
            kept = [count for name, count in shared.items() if is_full or count == len(pins[name])]
            found = num_found(simulation, asked)
            assert found >= max(kept, default=0)
            assert found <= max(num_common(one, asked) for one in computed)
        for name in pins:
            simulation.manager.unpin(name)
        assert simulation.manager.reset_prefix_cache()
        assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values()), "nothing leaks"


@pytest.mark.parametrize("layers", LAYERS)
def test_the_longest_request_runs_beside_all_that_may_be_pinned(layers):
    for extra_slabs, seed in ((3, 0), (14, 1)):
        draw = random.Random(seed)
        simulation = Simulation(LAYERS[layers], max_model_len=40, extra_slabs=extra_slabs, page_tokens=PAGE_TOKENS)
        manager = simulation.manager
        refused = 0
        while refused < 3:
            tokens = [draw.randrange(50) for _ in range(draw.randint(1, 25))]
            before = manager.pinned()
            reason = ""
            try:
                pin(simulation, f"pin {len(before)}", tokens)
            except CapacityError as error:
                reason = str(error)
            if not reason:
                compute(simulation, tokens)
                continue
            assert f"a pinned prefix of {len(tokens)} tokens takes" in reason
            assert "max_model_len=40" in reason
            assert manager.pinned() == before
            refused += 1
        assert all(one.is_cached for one in manager.pinned())
        pinned = [simulation.manager.inspect().pins.orders[one.name].token_ids.tolist() for one in manager.pinned()]
        for index in range(5):  # some begin with a part of what is pinned, which they need not be able to lock
            base = draw.choice(pinned)[: draw.randint(0, 25)] if pinned else []
            prompt = [*base, *(draw.randrange(50) for _ in range(30 - len(base)))]
            simulation.add(f"long {index}", prompt, 10)
        simulation.run()
        for index in range(5):
            request = simulation.requests[f"long {index}"]
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            assert simulation.outputs[f"long {index}"] == foretell(None, prompt, 10)
        for tokens in pinned:
            assert num_found(simulation, tokens) == len(tokens)


def test_the_budget_is_counted_in_pages_and_shared_blocks_once():
    layers = LAYERS["hybrid"]
    roomy = Simulation(layers, max_model_len=90)
    one = pin(roomy, "one", PROMPT[:22])
    # 6 full blocks; windows of 9 from 22 - 4 on: token 10 and later, in blocks 2 to 5
    groups = {group.name: group.page_bytes for group in roomy.manager.layout.groups}
    assert one.num_bytes == 6 * groups["full"] + 4 * groups["sliding_9"]
    two = pin(roomy, "two", [*PROMPT[:20], 9, 9, 9])  # shares 5 whole blocks
    assert two.num_bytes == 1 * groups["full"] + 4 * groups["sliding_9"]
    other = pin(roomy, "other", PROMPT[:22], "tenant")
    assert other.num_bytes == one.num_bytes, "prompts of another salt share nothing"
    limited = Simulation(layers, max_model_len=90, max_pinned_bytes=one.num_bytes + two.num_bytes)
    assert pin(limited, "one", PROMPT[:22]) == one
    assert pin(limited, "two", [*PROMPT[:20], 9, 9, 9]) == two
    with pytest.raises(CapacityError, match=f"keep {one.num_bytes + two.num_bytes} of at most"):
        pin(limited, "three", [3])
    limited.manager.unpin("two")
    pin(limited, "three", [3])


def test_names_are_used_once_and_settings_must_keep_prefixes():
    simulation = Simulation(LAYERS["hybrid"])
    pin(simulation, "a", [1, 2, 3])
    with pytest.raises(RequestError, match="name='a' is that of a pinned prefix of 3 tokens"):
        pin(simulation, "a", [4])
    with pytest.raises(RequestError, match=r"name='b' is no pinned prefix: pinned are 'a'"):
        simulation.manager.unpin("b")
    simulation.manager.unpin("a")
    with pytest.raises(RequestError, match="there are none"):
        simulation.manager.unpin("a")
    with pytest.raises(RequestError, match="enable_prefix_caching=False"):
        pin(Simulation(LAYERS["hybrid"], enable_prefix_caching=False), "a", [1])
    with pytest.raises(RequestError, match="retention='none'"):
        pin(Simulation(LAYERS["hybrid"], retention=RetentionPolicy("none")), "a", [1])


def test_what_is_unpinned_ages_like_anything_else():
    simulation = Simulation(LAYERS["hybrid"], max_model_len=90)
    compute(simulation, PROMPT[:22])
    pin(simulation, "a", PROMPT[:22])
    simulation.manager.reset_prefix_cache()
    assert num_found(simulation, PROMPT[:22]) == 22
    simulation.manager.unpin("a")
    assert num_found(simulation, PROMPT[:22]) == 22, "it is cached until memory is wanted"
    assert simulation.manager.reset_prefix_cache()
    assert num_found(simulation, PROMPT[:22]) == 0


def test_pins_outlive_a_cache_that_is_cleared_and_wait_to_be_computed_again():
    simulation = Simulation(LAYERS["hybrid"], max_model_len=90)
    compute(simulation, PROMPT[:22])
    pin(simulation, "a", PROMPT[:22])
    for lose in (simulation.manager.clear, lambda: simulation.manager.reset_prefix_cache(pinned=True)):
        lose()
        invariants.check(simulation.manager)
        assert [one.is_cached for one in simulation.manager.pinned()] == [False]
        assert all(usage == (0, 0, 0) for usage in simulation.manager.usage().values())
        compute(simulation, [*PROMPT[:22], 4, 4])
        assert [one.is_cached for one in simulation.manager.pinned()] == [True]
        assert simulation.manager.reset_prefix_cache()
        assert num_found(simulation, PROMPT[:22]) == 22


def test_admission_counts_what_is_pinned_and_not_used():
    simulation = Simulation(LAYERS["hybrid"], max_model_len=90)
    manager = simulation.manager
    before = manager.demand(30, NO_MATCH, []).num_bytes
    compute(simulation, PROMPT[:22])
    assert manager.demand(30, NO_MATCH, []).num_bytes == before
    pinned = pin(simulation, "a", PROMPT[:22])
    assert manager.demand(30, NO_MATCH, []).num_bytes == before + pinned.num_bytes
    prompt = np.array([*PROMPT[:22], *range(8)], dtype=np.int32)
    with_prefix = manager.demand(30, manager.match(prompt), []).num_bytes
    full_page_bytes = manager.layout.groups[0].page_bytes
    assert with_prefix == before + pinned.num_bytes - 5 * full_page_bytes, "five whole blocks are the request's own"
