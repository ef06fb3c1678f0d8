import numpy as np

from lamella.model_executor.step_plan import StepResult, TokenLogprobs


def logprobs_of(token_id):
    return TokenLogprobs(token_id, -1.0, 1, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))


def test_a_part_keeps_what_belongs_to_its_rows_under_their_new_places():
    tokens = {row: logprobs_of(10 + row) for row in (0, 2, 4)}
    result = StepResult(np.arange(10, 15), tokens, {1: "first", 3: "second"})
    part = result.part(np.array([4, 1, 2]))
    assert part.token_ids.tolist() == [14, 11, 12]
    assert {place: found.token_id for place, found in part.logprobs.items()} == {0: 14, 2: 12}
    assert part.unusable == {1: "first"}
    empty = result.part(np.zeros(0, dtype=np.int64))
    assert (empty.token_ids.tolist(), empty.logprobs, empty.unusable) == ([], {}, {})
