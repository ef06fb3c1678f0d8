"""A whole Engine over the model without arithmetic: all of it is real but the weights, the tokenizer and the device.

Unlike FakeExecutor's own, a token depends on the request's seed, on how many were drawn before and on its penalties, so
that an engine which loses or repeats a draw gives another answer. `foretell_answer` knows the answer from the prompt
and the parameters alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from lamella import EngineConfig, SamplingParams
from lamella.engine.loaded_adapters import LoadedAdapters
from lamella.engine.model_setup import LoadedEngine
from lamella.engine.scheduling.request import Request
from lamella.model_executor.runner import LaunchedStep
from lamella.model_executor.step_plan import StepPlan, StepResult, TokenLogprobs
from tests.helpers.fake_executor import VOCAB, tags_of
from tests.helpers.simulation import Simulation

END_TOKEN = 0


def draw(tag: bytes, seed: int, draw_index: int, counts: dict[int, int], banned) -> int:
    """The token after the one with this tag. counts: of the tokens that penalties are for, in the output."""
    numbers = repr((seed, draw_index, sorted(counts.items()))).encode()
    token = hashlib.blake2b(tag + numbers, digest_size=2).digest()[0] % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def word(token_id: int) -> str:
    return f"{chr(97 + token_id % 10)}{token_id} "


class FakeTokenizer:
    """Every token is a word that begins with one of ten letters."""

    def decode(self, ids, skip_special_tokens):
        return "".join(word(one) for one in ids)

    def decode_stream(self, skip_special_tokens):
        return SimpleNamespace(step=word, num_tentative=0, num_taken_back=0)


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None


def foretell_answer(prompt: list[int], params: SamplingParams, sample_index: int, max_model_len: int) -> Answer:
    limit = min(max_model_len - len(prompt), params.max_tokens)
    output: list[int] = []
    while True:
        tag = tags_of(None, [*prompt, *output])[-1]
        counts = {**dict.fromkeys(prompt, 0), **Counter(output)} if params.has_penalties else {}
        if params.repetition_penalty == 1.0:
            counts = {token: count for token, count in counts.items() if count}
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {END_TOKEN})
        banned = ends if len(output) < params.min_tokens else ()
        output.append(draw(tag, (params.seed + sample_index) % 2**64, len(output), counts, banned))
        text = "".join(word(one) for one in output)
        if output[-1] in params.stop_token_ids:
            return Answer(output, text[: -len(word(output[-1]))], "stop", output[-1])
        if output[-1] == END_TOKEN and not params.ignore_eos:
            return Answer(output, text[: -len(word(output[-1]))], "stop", None)
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if found:
            return Answer(output, text[: min(found)[0]], "stop", min(found)[1])
        if len(output) == limit:
            return Answer(output, text, "length", None)


class Stumbling(dict):
    def items(self):
        raise RuntimeError("the update fails")


class FakeRunner:
    """A device that computes a step when its result is asked for.

    fails_at: launches, by their number from 0, that fail: "launch", "result", or "update", where the result is one that
    the scheduler stumbles over when it has taken in half of it.
    disturb: called with "launch" or "result", the plan and its requests, where these are under way; it may raise.
    """

    disturb: Callable[[str, StepPlan, list[Request]], None] = staticmethod(lambda *_: None)

    def __init__(self, simulation: Simulation, fails_at: dict[int, str]) -> None:
        self.device = SimpleNamespace(type="cpu")
        self.backend = SimpleNamespace(name="fake")
        self._executor, self._scheduler = simulation.executor, simulation.scheduler
        self.fails_at = fails_at
        self._samples = np.zeros(0, dtype=np.int64)
        self.num_launches = 0
        self.num_copied_pages = 0
        self.num_moved_pages = 0
        self.num_trims = 0
        self._num_failed = 0  # results that failed
        self.wrong_reads: list[AssertionError] = []  # what steps found wrong: the engine would just do them again

    def trim_memory(self) -> None:
        self.num_trims += 1

    def launch(self, plan: StepPlan) -> LaunchedStep:
        how = self.fails_at.get(self.num_launches)
        self.num_launches += 1
        if how == "launch":
            raise RuntimeError("the launch fails")
        rows = self._scheduler.rows
        requests = [rows.request(row) for row in self._scheduler.scheduled_rows.tolist()]
        self.disturb("launch", plan, requests)
        contexts = [(one.salt, rows.tokens[one.row, : rows.num_tokens[one.row]].tolist()) for one in requests]
        results: list[StepResult] = []
        num_failed = self._num_failed

        def wait() -> StepResult:
            if not results:
                # What is behind a step that failed reads what that did not write.
                if num_failed < self._num_failed:
                    raise RuntimeError("a step before it fails")
                self._num_failed += 1
                if how == "result":
                    raise RuntimeError("the step fails")
                self.disturb("result", plan, requests)
                try:
                    results.append(self._compute(plan, contexts))
                except AssertionError as error:
                    self.wrong_reads.append(error)
                    raise
                self._num_failed -= 1
            return dataclasses.replace(results[0], logprobs=Stumbling()) if how == "update" else results[0]

        return LaunchedStep(None, wait)

    def _compute(self, plan: StepPlan, contexts: list[tuple[str | None, list[int]]]) -> StepResult:
        if plan.token_sources is not None:
            token_ids = plan.token_ids.copy()
            for token in np.flatnonzero(plan.token_sources >= 0).tolist():
                token_ids[token] = self._samples[plan.token_sources[token]]
                index = int(np.searchsorted(plan.query_start, token, side="right")) - 1
                contexts[index][1].append(int(token_ids[token]))
            plan = dataclasses.replace(plan, token_ids=token_ids, token_sources=None)
        self.num_copied_pages += sum(len(part.copies.src_pages) for part in plan.groups)
        self.num_moved_pages += sum(len(move.src_pages) for move in plan.moves)
        self._executor.execute(plan, contexts)
        token_ids, logprobs = [], {}
        for index, request in enumerate(plan.sample_requests.tolist()):
            salt, tokens = contexts[request]
            penalties = plan.sampling.penalties.get(index)
            counts = {}
            if penalties is not None:
                counts = dict(zip(penalties.token_ids.tolist(), penalties.output_counts.tolist(), strict=True))
            tag = tags_of(salt, tokens[: int(plan.seq_lens[request])])[-1]
            seed, draw_index = int(plan.sampling.seeds[index]), int(plan.sampling.draw_index[index])
            token = draw(tag, seed, draw_index, counts, plan.sampling.banned_token_ids.get(index, ()))
            token_ids.append(token)
            if plan.sampling.num_logprobs[index] >= 0:
                logprobs[index] = TokenLogprobs(token, -float(token), 1, np.array([token]), np.array([-float(token)]))
        self._samples = np.array(token_ids, dtype=np.int64)
        return StepResult(token_ids=self._samples, logprobs=logprobs)


@contextmanager
def fake_models(specs, fails_at: dict[int, str] | None = None, **arguments):
    """Engines made in it have that model. arguments: Simulation's."""

    def load(config: EngineConfig, *, shows_progress: bool, start_workers: Any) -> LoadedEngine:
        simulation = Simulation(specs, **arguments)
        return LoadedEngine(
            tokenizer=FakeTokenizer(),
            model_config=SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(END_TOKEN,)),
            default_params=SamplingParams(),
            layout=simulation.manager.layout,
            pool=SimpleNamespace(max_model_len=simulation.max_model_len),
            manager=simulation.manager,
            scheduler=simulation.scheduler,
            runner=FakeRunner(simulation, fails_at or {}),
            adapters=LoadedAdapters(None, {}, max_loaded=1, max_rank=None),
            source=None,
        )

    with patch("lamella.engine.engine.load_engine", load):
        yield
