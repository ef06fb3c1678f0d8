"""How a row's samples take the masks of its request's grammar, and what becomes of a request whose grammar fails."""

from __future__ import annotations

import numpy as np

from lamella.engine.scheduling.new_tokens import append_tokens
from lamella.engine.scheduling.request_rows import RequestRows
from lamella.engine.scheduling.row_rules import RowRules, SampleEdits
from lamella.engine.scheduling.sample_grammar import SampleGrammar
from lamella.engine.scheduling.token_rules import TokenRules
from lamella.model_executor.step_plan import StepResult
from tests.helpers.made_requests import make_request


class ByLength:
    """After n tokens of output token n may come, and token n + 1."""

    problem: str | None = None

    def mask(self, output_ids: np.ndarray) -> np.ndarray:
        return np.array([0b11 << len(output_ids)], dtype=np.uint32)

    def num_allowed(self, output_ids: np.ndarray, next_ids: list[int]) -> int:
        raise AssertionError("there are no drafts here")


def ruled(rules: TokenRules | None = None, grammar: SampleGrammar | None = None):
    request = make_request("a", [1, 2])
    request.rules, request.grammar = rules, grammar
    return request


def test_each_sample_has_the_mask_of_the_output_before_it():
    row = RowRules(ruled(grammar=ByLength()))
    assert row.reads_tokens
    edits = SampleEdits({})
    tokens = np.array([1, 2, 0, 1], dtype=np.int32)
    for index, num_tokens in enumerate((2, 3, 4)):
        row.add_to(edits, index, tokens[:num_tokens], num_tokens)
    assert {index: int(mask[0]) for index, mask in edits.masks.items()} == {0: 0b11, 1: 0b110, 2: 0b1100}


def test_what_both_the_grammar_and_the_rules_allow():
    allowed = np.array([0b101], dtype=np.uint32)
    row = RowRules(ruled(TokenRules(allowed=allowed), ByLength()))
    edits = SampleEdits({})
    row.add_to(edits, 0, np.array([1, 2, 0], dtype=np.int32), 3)
    assert int(edits.masks[0][0]) == 0b100
    assert int(allowed[0]) == 0b101


def test_a_request_ends_with_its_grammars_problem():
    grammar = ByLength()
    rows = RequestRows(2, 20)
    request = ruled(grammar=grammar)
    rows.put(request, 2)
    grammar.problem = "it went too far"
    result = StepResult(np.array([0]), {}, {0: "the largest logit is -inf"})
    new_tokens = append_tokens(rows, np.array([request.row]), result)
    assert new_tokens.failed == [request]
    assert (request.finish_reason, request.stop_reason) == ("error", "it went too far")
