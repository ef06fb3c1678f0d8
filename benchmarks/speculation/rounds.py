"""The same prompts with and without speculation, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lamella import LLM, SamplingParams
from speculation.tasks import Task


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts. num_steps: of the engine, prompts included."""

    seconds: float
    num_tokens: int
    num_steps: int
    num_drafts: int
    num_accepted: int
    token_ids: list[list[int]]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    task: Task
    batch_size: int
    without: list[Run]
    with_drafts: list[Run]

    @property
    def ratios(self) -> list[float]:
        """Per round, the time without over the time with."""
        return [plain.seconds / fast.seconds for plain, fast in zip(self.without, self.with_drafts, strict=True)]

    @property
    def median_ratio(self) -> float:
        return median(self.ratios)

    def tokens_per_step(self, runs: Sequence[Run]) -> float:
        """Of one request: a step of a batch counts for each of its requests."""
        return sum(run.num_tokens for run in runs) / sum(run.num_steps for run in runs) / self.batch_size


def run_batch(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Run:
    """Nothing is cached before."""
    engine = llm.engine
    engine.reset_prefix_cache()
    before, started = engine.stats(), time.perf_counter()
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = [output.outputs[0] for output in llm.chat(conversations, params, use_tqdm=False)]
    seconds, after = time.perf_counter() - started, engine.stats()
    return Run(
        seconds=seconds,
        num_tokens=sum(len(output.token_ids) for output in outputs),
        num_steps=after.num_steps - before.num_steps,
        num_drafts=after.drafts.num_proposed - before.drafts.num_proposed,
        num_accepted=after.drafts.num_accepted - before.drafts.num_accepted,
        token_ids=[output.token_ids for output in outputs],
        texts=[output.text for output in outputs],
    )


def compare(plain: LLM, fast: LLM, task: Task, batch_size: int, num_rounds: int, temperature: float) -> Comparison:
    """Each round takes the next prompts, and begins with the other engine than the one before. Raises AssertionError
    where the tokens are not the same."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=task.max_tokens)
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for number in range(num_rounds):
        places = [(number * batch_size + place) % len(task.prompts) for place in range(batch_size)]
        prompts = [task.prompts[place] for place in places]
        for is_fast in (False, True) if number % 2 == 0 else (True, False):
            runs[is_fast].append(run_batch(fast if is_fast else plain, prompts, params))
        assert runs[False][-1].token_ids == runs[True][-1].token_ids, f"{task.name}: tokens differ with speculation"
    return Comparison(task, batch_size, runs[False], runs[True])


def edit_distance(first: Sequence[object], second: Sequence[object]) -> int:
    """The fewest insertions, deletions and replacements that turn one sequence into the other (Levenshtein)."""
    ids = {one: number for number, one in enumerate({*first, *second})}
    other = np.array([ids[one] for one in second], dtype=np.int64)
    costs = np.arange(len(other) + 1)
    steps = np.arange(len(other) + 1)
    for number, one in enumerate(first, start=1):
        kept = np.minimum(costs[1:] + 1, costs[:-1] + (other != ids[one]))
        costs = np.concatenate([[number], kept])
        costs = np.minimum.accumulate(costs - steps) + steps  # insertions, from left to right
    return int(costs[-1])


def code_in(text: str) -> str:
    """What stands in an answer's first code block; the whole text where there is none."""
    _, opening, rest = text.partition("```")
    return rest.partition("\n")[2].partition("```")[0] if opening else text
