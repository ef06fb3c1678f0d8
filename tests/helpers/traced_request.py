"""The request that docs/reading_order.md follows, run step by step, and the tables of that page.

`python -m tests.helpers.traced_request` prints the tables, to be put between the page's markers.
"""

from __future__ import annotations

import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella import Engine, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

PROMPT = list(range(100, 140))
NUM_GENERATED = 12
PAGE_TOKENS = WINDOW_TOKENS = 16
SHOWN_STEPS = (1, 2, 3, 9, 10, 12)
SLIDING, FULL = "sliding_16", "full"


@dataclass(frozen=True, slots=True)
class Node:
    """One block in the prefix tree. pages, held: by group; held: by how many resume points."""

    end: int
    pages: dict[str, int]
    held: dict[str, int]
    is_resume_point: bool


@dataclass(frozen=True, slots=True)
class TracedStep:
    """plan: what ran. num_needed: of each layer that does not take in all tokens, how many it does (as
    `ReceptiveField.needed_tokens`). tables: by group, the row's pages after the step, up to the last block that any
    group has."""

    plan: Any
    num_needed: dict[int, int]
    tables: dict[str, list[int]]
    nodes: tuple[Node, ...]
    new_token: int

    def planned(self, group: str) -> Any:
        """The group's part of the plan."""
        return self.plan.groups[list(self.tables).index(group)]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    steps: tuple[TracedStep, ...]
    num_found: int  # tokens that a second prompt found in the cache, which goes on from the first one's end


@dataclass(frozen=True, slots=True)
class _Inside:
    """What the trace reads of an engine's parts: the one place that knows where it lies."""

    runner: Any
    groups: list[str]
    tables: np.ndarray  # [num_groups, num_rows, max_blocks]
    tree: Any


def _inside(engine: Engine) -> _Inside:
    parts = engine.inspect()
    cache = parts.manager.inspect()
    return _Inside(parts.runner, [group.name for group in parts.layout.groups], cache.rows.pages, cache.tree)


def trace_request(folder: Path) -> TracedRequest:
    """folder: a tiny Gemma 3 (`save_tiny_gemma`) with a window of 16 tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_GENERATED, ignore_eos=True)
    with Engine(
        model=str(folder),
        max_model_len=128,
        max_num_seqs=4,
        page_size=PAGE_TOKENS,
        kv_cache_memory_bytes=2**20,
        async_scheduling=False,
        check_invariants=True,
    ) as engine:
        inside = _inside(engine)
        plans: list[Any] = []
        num_needed: list[dict[int, int]] = []
        launch = inside.runner.launch

        def watched_launch(plan: Any) -> Any:
            needed = inside.runner.receptive_field.needed_tokens(plan)
            num_needed.append({layer: len(tokens) for layer, tokens in needed.items()})
            plans.append(deepcopy(plan))  # the planner writes to its arrays again two steps later
            return launch(plan)

        inside.runner.launch = watched_launch
        engine.add_request("a", PROMPT, params)
        steps, tokens = [], list(PROMPT)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
            tokens = [*PROMPT, *output.outputs[0].token_ids]
            steps.append(TracedStep(plans[-1], num_needed[-1], _tables(inside), _nodes(inside), tokens[-1]))
        engine.add_request("b", [*tokens, 7, 8, 9], SamplingParams(temperature=0, max_tokens=1))
        (second,) = engine.step()
        assert second.num_cached_tokens is not None
        return TracedRequest(tuple(steps), second.num_cached_tokens)


def _tables(inside: _Inside) -> dict[str, list[int]]:
    pages = inside.tables[:, 0]  # the only request is in row 0
    used = np.flatnonzero((pages >= 0).any(axis=0))
    width = int(used[-1]) + 1 if len(used) else 0
    return {name: pages[group, :width].tolist() for group, name in enumerate(inside.groups)}


def _nodes(inside: _Inside) -> tuple[Node, ...]:
    tree = inside.tree
    nodes = [
        Node(
            end=tree.end_of(node),
            pages={name: int(tree.page[group, node]) for group, name in enumerate(inside.groups)},
            held={name: int(tree.holds[group, node]) for group, name in enumerate(inside.groups)},
            is_resume_point=node in tree.resume_points,
        )
        for node in tree.nodes()
    ]
    return tuple(sorted(nodes, key=lambda node: node.end))


def plan_table(traced: TracedRequest) -> str:
    rows = [
        "step | token ids | positions | context | sliding table | full table | sliding slots | full slots | samples"
    ]
    for number in SHOWN_STEPS:
        step = traced.steps[number - 1]
        plan = step.plan
        cells = [str(number), _span(plan.token_ids), _span(plan.positions), str(plan.seq_lens[0])]
        for group in (SLIDING, FULL):
            part = step.planned(group)
            pages = part.block_tables[0]
            cells.append(f"from block {part.first_blocks[0]}: {_pages(pages[pages >= 0].tolist())}")
        cells += [_span(step.planned(group).slot_mapping) for group in (SLIDING, FULL)]
        rows.append(" | ".join([*cells, str(step.new_token)]))
    return _table(rows)


def state_table(traced: TracedRequest) -> str:
    rows = ["after step | sliding pages of the row | full pages of the row | prefix tree (end: sliding, full)"]
    for number in SHOWN_STEPS:
        step = traced.steps[number - 1]
        nodes = [
            f"{node.end}: {_pages([node.pages[SLIDING], node.pages[FULL]])}" + (" ◆" if node.is_resume_point else "")
            for node in step.nodes
        ]
        cells = [str(number), *(_pages(step.tables[group]) or "none" for group in (SLIDING, FULL)), " → ".join(nodes)]
        rows.append(" | ".join(cells))
    return _table(rows)


def _table(rows: list[str]) -> str:
    head, *body = rows
    return "\n".join(f"| {row} |" for row in [head, " | ".join(["---"] * len(head.split(" | "))), *body])


def _pages(pages: list[int]) -> str:
    return ", ".join("-" if page < 0 else str(page) for page in pages)


def _span(numbers: np.ndarray) -> str:
    """Runs of neighbours: [64, 65, 66, 128] -> "64…66, 128"."""
    runs: list[list[int]] = []
    for number in numbers.tolist():
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}…{last}" for first, last in runs)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_gemma(Path(folder))
        traced = trace_request(Path(folder))
    print(plan_table(traced), state_table(traced), sep="\n\n")


if __name__ == "__main__":
    main()
