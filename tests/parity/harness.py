"""Compares an engine's greedy tokens with the parity fixture.

Two correct float32 implementations add in different orders, so where the oracle's two largest logits are
closer than rounding, either may win; after that the texts part, and comparing on would say nothing. So at
such a position the oracle's token is put in place and the engine goes on from there: every position of
every case is compared, each after the oracle's own words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FIXTURE_PATH = Path(__file__).parents[1] / "fixtures" / "gemma_parity.json"

GreedyRun = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts' token ids, max_tokens of each) -> generated ids of each, exactly max_tokens of them: greedy, end
tokens ignored and returned like any other."""


@dataclass(frozen=True, slots=True)
class ParityCase:
    """One prompt and what the oracle says to it.

    token_ids[p] is the oracle's choice after prompt_token_ids + token_ids[:p], and gaps[p] its largest logit
    minus the second largest there. text: None for prompts that `prompts.long_prompts` rebuilds by name.
    """

    name: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    text: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids or not self.token_ids or len(self.token_ids) != len(self.gaps):
            raise ValueError(
                f"case {self.name!r} has {len(self.prompt_token_ids)} prompt tokens, {len(self.token_ids)} tokens and "
                f"{len(self.gaps)} gaps; it needs a prompt, an answer, and one gap for each token of the answer"
            )


@dataclass(frozen=True, slots=True)
class ParityDifference:
    """The engine chose `token_id` where the oracle, by a margin of `gap`, chose `oracle_token_id`."""

    name: str
    position: int
    gap: float
    oracle_token_id: int
    token_id: int

    def __str__(self) -> str:
        return (
            f"{self.name} at position {self.position}: token {self.token_id}, oracle {self.oracle_token_id} "
            f"with gap {self.gap:.6f}"
        )


@dataclass(frozen=True, slots=True)
class ParityReport:
    num_cases: int
    num_tokens: int  # compared, each position once
    num_runs: int  # calls of `run`
    differences: tuple[ParityDifference, ...]  # all at near ties

    @property
    def num_differences(self) -> int:
        return len(self.differences)

    def __str__(self) -> str:
        details = "".join(f"\n  {difference}" for difference in self.differences)
        return f"{self.num_tokens} tokens of {self.num_cases} cases, {self.num_differences} differences{details}"


def load_cases(path: Path = FIXTURE_PATH) -> list[ParityCase]:
    """The cases of a fixture that make_fixture.py wrote."""
    return [case_from_json(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["cases"]]


def case_from_json(entry: Mapping[str, object]) -> ParityCase:
    tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return ParityCase(**tuples)  # type: ignore[arg-type]


def compare_greedy(
    run: GreedyRun, cases: Sequence[ParityCase], *, gap_limit: float = 2e-3, max_differences: int = 3
) -> ParityReport:
    """Compare `run` with the oracle on every position of every case.

    All cases go to one call of `run`, so that the engine batches them; those with an allowed difference go
    to a further call, from the prompt and the oracle's tokens up to and including that position, and so on.
    gap_limit: a difference is allowed where the oracle's gap is below it, in logits.
    max_differences: how many are allowed in all cases together.
    Raises AssertionError: a difference at a wider gap, too many differences, or a run that returns another
    number of answers or tokens than it was asked for.
    """
    if not cases:
        raise AssertionError("no cases given: nothing would be compared; load them with load_cases()")
    pending = [(case, 0) for case in cases]  # a case and how many of its tokens have been compared
    num_tokens = num_runs = 0
    differences: list[ParityDifference] = []
    while pending:
        max_tokens = [len(case.token_ids) - start for case, start in pending]
        answers = run([[*case.prompt_token_ids, *case.token_ids[:start]] for case, start in pending], max_tokens)
        num_runs += 1
        assert len(answers) == len(pending), f"run returned {len(answers)} answers to {len(pending)} prompts"
        resumed = []
        for (case, start), answer in zip(pending, answers, strict=True):
            difference = first_difference(case, start, answer)
            if difference is None:
                num_tokens += len(case.token_ids) - start
                continue
            differences.append(difference)
            assert difference.gap < gap_limit, (
                f"{difference}, which is not below {gap_limit}: not a near tie. Oracle's tokens from position {start}: "
                f"{list(case.token_ids[start:])}, run's: {list(answer)}"
            )
            next_start = difference.position + 1
            num_tokens += next_start - start
            if next_start < len(case.token_ids):
                resumed.append((case, next_start))
        assert len(differences) <= max_differences, (
            f"{len(differences)} differences at near ties, at most {max_differences} are allowed:\n  "
            + "\n  ".join(map(str, differences))
        )
        pending = resumed
    return ParityReport(len(cases), num_tokens, num_runs, tuple(differences))


def first_difference(case: ParityCase, start: int, answer: Sequence[int]) -> ParityDifference | None:
    """Where `answer`, the run's tokens from position `start` on, first departs from the oracle's; None: nowhere."""
    expected = case.token_ids[start:]
    assert len(answer) == len(expected), (
        f"{case.name}: run returned {len(answer)} tokens from position {start}, asked for {len(expected)}; "
        "it must ignore end tokens and return them"
    )
    for position, (oracle_token_id, token_id) in enumerate(zip(expected, answer, strict=True), start):
        if token_id != oracle_token_id:
            return ParityDifference(case.name, position, case.gaps[position], oracle_token_id, int(token_id))
    return None
