"""Resume points that a later prompt has passed are worth little: they are evicted before older ones."""

from __future__ import annotations

import numpy as np

from tests.helpers.fake_executor import foretell
from tests.helpers.serving import run_all, serve
from tests.helpers.simulation import Simulation, full, sliding

HYBRID = [full(), sliding(9), sliding(9)]
BYSTANDER = [49, *range(19)]
PROMPT = list(range(20))


def found(simulation: Simulation, prompt) -> int:
    return simulation.manager.match(np.array([*prompt, 48], dtype=np.int32)).num_tokens


def chat(num_tokens: int = 8) -> tuple[Simulation, list[int]]:
    """An unrelated prompt (the bystander), then one turn of a chat. The turn leaves resume points at 20, its prompt's
    end, and after its last computed token."""
    simulation = Simulation(HYBRID, page_tokens=4)
    serve(simulation, BYSTANDER)
    serve(simulation, PROMPT, num_tokens)
    return simulation, [*PROMPT, *foretell(None, PROMPT, num_tokens)]


def test_an_answer_does_not_pass_its_own_prompt():
    simulation, turn = chat(30)
    assert found(simulation, PROMPT) == 20
    assert simulation.manager.inspect().tree.evict_one()
    assert [found(simulation, prompt) for prompt in (BYSTANDER, PROMPT, turn[:49])] == [0, 20, 49]


def test_the_next_turn_passes_the_turn_before():
    """The short block at 27 was copied and the turn's own block covers it; the end of the first prompt, at 20, led on.
    Both go before the bystander, which is older."""
    simulation, turn = chat()
    second = [*turn, *[45] * 12]
    assert serve(simulation, second) == 27
    tree = simulation.manager.inspect().tree
    assert len(tree.resume_points) == 4
    assert tree.evict_one()
    assert tree.evict_one()
    assert found(simulation, BYSTANDER) == 20
    assert found(simulation, PROMPT) == 0
    assert found(simulation, second) == 40
    assert tree.evict_one()
    assert found(simulation, BYSTANDER) == 0
    assert found(simulation, second) == 40


def test_the_end_of_a_turn_is_passed_as_soon_as_the_next_one_starts():
    """The place at 20 is passed as soon as the next turn is admitted, before its prompt is computed."""
    simulation, turn = chat()
    simulation.add("second", [*turn, *[45] * 34], 1)
    for _ in range(2):  # the second leaves the window at 20 behind
        simulation.step()
    assert found(simulation, PROMPT) == 20
    tree = simulation.manager.inspect().tree
    assert int(tree.end[tree.resume_points.first()]) == 20
    run_all(simulation)
    assert simulation.outputs["second"] == foretell(None, [*turn, *[45] * 34], 1)


def test_a_prompt_computed_anew_passes_what_lies_on_its_way():
    """The first half of a longer prompt has a window at 20 only: it is found up to there, and kept at its own end."""
    simulation, _ = chat(1)
    longer = [*PROMPT, *[45] * 12]
    assert serve(simulation, longer) == 20
    tree = simulation.manager.inspect().tree
    assert tree.evict_one()
    assert [found(simulation, prompt) for prompt in (PROMPT, BYSTANDER, longer)] == [0, 20, 32]


def test_a_place_where_prompts_part_is_not_passed():
    """The first prompt's answer and three more prompts lead on from 20. That place was last used when the last of them
    began, so it goes after the ends of all others."""
    simulation, _ = chat()
    prompts = [[*PROMPT, *[45 + index] * 8] for index in range(3)]
    assert [serve(simulation, prompt) for prompt in prompts] == [20, 20, 20]
    tree = simulation.manager.inspect().tree
    tree.touch(next(iter(tree.resume_points)))  # the bystander is used, and nothing of the family
    for _ in range(3):
        assert tree.evict_one()
        assert found(simulation, PROMPT) == 20
    assert [found(simulation, prompt) for prompt in prompts] == [20, 20, 28]
    assert found(simulation, BYSTANDER) == 20


def test_what_a_waiting_request_expects_is_not_lost_though_passed():
    simulation, turn = chat()
    simulation.manager.expect(np.array([*PROMPT, 47, 47], dtype=np.int32), None, 1)
    serve(simulation, [*turn, *[45] * 12])
    tree = simulation.manager.inspect().tree
    while len(tree.resume_points) > 1:
        assert tree.evict_one()
    assert found(simulation, PROMPT) == 20
