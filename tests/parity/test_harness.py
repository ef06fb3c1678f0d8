"""The harness must fail when an engine is wrong: synthetic engines, each wrong in one way."""

import itertools
import json

import pytest

from tests.parity import prompts
from tests.parity.harness import FIXTURE_PATH, ParityCase, ParityDifference, compare_greedy, load_cases

ALPHA = ParityCase("alpha", (2, 10), (100, 101, 102, 103), (1.0, 0.001, 3.0, 0.0005))
BETA = ParityCase("beta", (2, 20, 21), (200, 201, 202), (5.0, 0.002, 0.0001))


class TableRun:
    """Generates from a table: tokens so far -> next token. What the table lacks, the oracle's cases say."""

    def __init__(self, cases, table=None):
        self.calls = []
        self.next_token = {}
        for case in cases:
            for position, token_id in enumerate(case.token_ids):
                self.next_token[(*case.prompt_token_ids, *case.token_ids[:position])] = token_id
        self.next_token.update(table or {})

    def __call__(self, prompt_ids, max_tokens_list):
        self.calls.append((prompt_ids, max_tokens_list))
        return [self.generate(ids, count) for ids, count in zip(prompt_ids, max_tokens_list, strict=True)]

    def generate(self, prompt, max_tokens):
        token_ids = list(prompt)
        for _ in range(max_tokens):
            # After a token that the oracle did not choose, the table knows nothing: 9 stands for nonsense.
            token_ids.append(self.next_token.get(tuple(token_ids), 9))
        return token_ids[len(prompt) :]


def test_equal_tokens_take_one_batched_run_and_count_every_position():
    run = TableRun([ALPHA, BETA])
    report = compare_greedy(run, [ALPHA, BETA])
    assert run.calls == [([[2, 10], [2, 20, 21]], [4, 3])]
    assert (report.num_cases, report.num_tokens, report.num_runs, report.differences) == (2, 7, 1, ())


def test_wrong_token_at_a_wide_gap_is_an_error_that_says_where():
    run = TableRun([ALPHA, BETA], {(2, 10, 100, 101): 77})
    with pytest.raises(AssertionError, match=r"alpha at position 2: token 77, oracle 102 with gap 3\.000000"):
        compare_greedy(run, [ALPHA, BETA])


def test_gap_equal_to_the_limit_is_wide():
    run = TableRun([BETA], {(2, 20, 21, 200): 77})
    with pytest.raises(AssertionError, match=r"beta at position 1: token 77, oracle 201"):
        compare_greedy(run, [BETA], gap_limit=0.002)
    assert compare_greedy(run, [BETA], gap_limit=0.0021).num_differences == 1


def test_allowed_difference_is_recorded_and_the_run_resumes_after_the_oracles_token():
    run = TableRun([ALPHA, BETA], {(2, 10, 100): 77})
    report = compare_greedy(run, [ALPHA, BETA])
    assert run.calls[1:] == [([[2, 10, 100, 101]], [2])]
    assert report.differences == (ParityDifference("alpha", 1, 0.001, 101, 77),)
    assert (report.num_tokens, report.num_runs) == (7, 2)


def test_wrong_token_after_an_allowed_difference_is_still_found():
    run = TableRun([ALPHA], {(2, 10, 100): 77, (2, 10, 100, 101): 78})
    with pytest.raises(AssertionError, match=r"alpha at position 2: token 78, oracle 102"):
        compare_greedy(run, [ALPHA])


def test_two_differences_in_one_case_and_one_at_its_last_token():
    run = TableRun([ALPHA], {(2, 10, 100): 77, (2, 10, 100, 101, 102): 78})
    report = compare_greedy(run, [ALPHA])
    assert [(d.position, d.token_id) for d in report.differences] == [(1, 77), (3, 78)]
    assert len(run.calls) == 2  # nothing is left to generate after the last token
    assert report.num_tokens == 4


def test_too_many_allowed_differences_are_an_error():
    table = {(2, 10, 100): 77, (2, 10, 100, 101, 102): 78, (2, 20, 21, 200, 201): 79}
    run = TableRun([ALPHA, BETA], table)
    assert compare_greedy(run, [ALPHA, BETA], max_differences=3).num_differences == 3
    with pytest.raises(AssertionError, match=r"3 differences at near ties, at most 2"):
        compare_greedy(run, [ALPHA, BETA], max_differences=2)


@pytest.mark.parametrize("answers", [[[100, 101, 102]], [[100, 101, 102, 103, 104]], [], [[100, 101, 102, 103]] * 2])
def test_answers_of_another_shape_are_an_error(answers):
    with pytest.raises(AssertionError, match="run returned"):
        compare_greedy(lambda prompt_ids, max_tokens_list: answers, [ALPHA])


def test_no_cases_is_an_error():
    with pytest.raises(AssertionError, match="nothing would be compared"):
        compare_greedy(TableRun([]), [])


def test_case_without_a_gap_for_each_token_is_refused():
    with pytest.raises(ValueError, match="one gap for each token"):
        ParityCase("short", (2,), (1, 2), (0.5,))


def test_fixture_holds_every_prompt_and_48_tokens_of_each():
    fixture = json.loads(FIXTURE_PATH.read_text(encoding="utf-8"))
    cases = load_cases()
    assert [case.name for case in cases] == list(prompts.all_prompts())
    assert {len(case.token_ids) for case in cases} == {fixture["max_tokens"]} == {48}
    assert {case.prompt_token_ids[0] for case in cases} == {2}  # Gemma's bos
    assert {case.name: case.text for case in cases if case.text is not None} == prompts.SHORT_PROMPTS


def test_fixture_is_deep_enough_for_the_window_and_wide_enough_for_the_prefix_tree():
    ids = {case.name: case.prompt_token_ids for case in load_cases()}
    assert {name for name in ids if len(ids[name]) > 1500} == set(prompts.long_prompts())
    assert len(ids["code_listing"]) > 2500

    def shared(a, b):
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids[a], ids[b], strict=False))))

    assert shared("journal_north", "journal_south") == shared("journal_north", "journal_west") == 1113
    assert 1113 % 16 == 9  # inside a block
    assert shared("journal_south", "journal_west") == 1536
    assert 1536 % 16 == 0  # at the end of one


def test_fixture_has_few_near_ties():
    # Otherwise the rule for near ties would excuse a wrong engine.
    gaps = [gap for case in load_cases() for gap in case.gaps]
    assert min(gaps) >= 0
    assert sum(gap < 2e-3 for gap in gaps) <= 0.01 * len(gaps)
