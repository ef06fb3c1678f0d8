"""docs/reading_order.md says what is so: the request that it follows, and how long the way is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.traced_request import (
    FULL,
    NUM_GENERATED,
    PAGE_TOKENS,
    PROMPT,
    SLIDING,
    WINDOW_TOKENS,
    plan_table,
    state_table,
    trace_request,
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reading_order.md").read_text(encoding="utf-8")
SPINE = re.findall(r"^\d+\. `(lamella/[\w/]+\.py)`", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny_gemma(folder)
    return model, trace_request(folder)


@pytest.fixture(scope="module")
def traced(run):
    return run[1]


def marked(name: str) -> str:
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    return found


def test_the_page_shows_the_tables_of_the_run(traced):
    assert marked("plan") == plan_table(traced)
    assert marked("state") == state_table(traced)


def test_the_tokens_are_those_of_transformers(run):
    model, traced = run
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_GENERATED):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert [step.new_token for step in traced.steps] == tokens[len(PROMPT) :]


def test_tables_cover_what_the_queries_see_and_no_more(traced):
    """By the rule of a window, position by position."""
    for step in traced.steps:
        positions = step.plan.positions
        seen = {key for query in positions.tolist() for key in range(max(0, query - WINDOW_TOKENS + 1), query + 1)}
        for group, keys in ((SLIDING, seen), (FULL, set(range(int(positions[-1]) + 1)))):
            part = step.planned(group)
            first, pages = int(part.first_blocks[0]), part.block_tables[0]
            pages = pages[pages >= 0].tolist()
            blocks = {key // PAGE_TOKENS for key in keys}
            if group == SLIDING and len(positions) == 1:  # a decode slides at block boundaries
                boundary = int(positions[0]) // PAGE_TOKENS * PAGE_TOKENS
                blocks |= {max(0, boundary - WINDOW_TOKENS + 1) // PAGE_TOKENS}
            assert list(range(first, first + len(pages))) == sorted(blocks)
            page_of = dict(zip(range(first, first + len(pages)), pages, strict=True))
            slots = [page_of[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at in positions.tolist()]
            assert part.slot_mapping.tolist() == slots


def test_what_the_page_tells_in_words(traced):
    prefill, *decodes = traced.steps
    assert len(traced.steps) == NUM_GENERATED == 12
    assert (prefill.plan.num_decodes, [step.plan.num_decodes for step in decodes]) == (0, [1] * 11)
    assert prefill.tables == {SLIDING: [-1, 8, 12], FULL: [16, 18, 20]}
    assert all(step.tables == prefill.tables for step in decodes[:8])
    assert decodes[8].tables == decodes[9].tables == {SLIDING: [-1, -1, 12, 24], FULL: [16, 18, 20, 22]}
    assert traced.steps[-1].tables == {SLIDING: [], FULL: []}

    def ends(step, *, kept: bool = False):
        return [node.end for node in step.nodes if node.is_resume_point or not kept]

    assert all(ends(step) == [16, 32] and ends(step, kept=True) == [32] for step in traced.steps[:8])
    assert all(ends(step) == [16, 32, 48] and ends(step, kept=True) == [48] for step in traced.steps[8:11])
    assert ends(traced.steps[-1]) == [16, 32, 48, 51]
    assert ends(traced.steps[-1], kept=True) == [48, 51]
    # The resume point at the prompt's end holds the window's block and one more, though the row has let that go.
    assert [node.held[SLIDING] for node in prefill.nodes] == [1, 1]
    # Each node has a page of either group: none of the request's pages is freed at its end, all are cached.
    assert all(page >= 0 for node in traced.steps[-1].nodes for page in node.pages.values())
    assert traced.num_found == 51


def test_only_the_last_layer_leaves_anything_out_of_the_prompt(traced):
    """Each layer's K and V of all 40 tokens have pages that stay, so every layer takes in all; of what leaves the last
    layer, the token that is sampled from is enough."""
    assert traced.steps[0].num_needed == {6: 1}
    assert all(step.num_needed == {} for step in traced.steps[1:])


def test_the_spine_is_as_long_as_the_readme_says():
    assert len(SPINE) == len(set(SPINE)) == 15
    num_lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SPINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (files, lines) = re.search(r"(\w+) files of ([\d,]+) lines", " ".join(readme.split())).groups()
    assert files == "fifteen"
    said = int(lines.replace(",", ""))
    assert said % 100 == 0
    assert abs(said - num_lines) <= 0.1 * num_lines, f"they are {num_lines} lines"
