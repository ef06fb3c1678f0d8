"""A life of a whole engine that a seed decides: its model and memory, its requests, and everything that goes wrong.

    python -m tests.helpers.engine_simulation --first 0 --seeds 10000

What goes wrong: memory runs out, or something unexpected or an interrupt is raised, at any call within a step, an
admission, an abort or a pin; a device has too little memory for large steps; some requests make every step fail that
they are in, at its plan, launch, result or output; callers abort many at once, do not take outputs for long, empty the
cache, pin and unpin; clocks jump.

What must be so: each request has the answer that its prompt foretells, each part of it once, or the error that it
earned; nothing is left in memory. Faults at random are spread so that no request can be taken for one that fails by
itself: at most one comes while suspects run alone.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import torch

import lamella
from lamella import Engine, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from lamella.engine.lora_request import LoRARequest
from lamella.engine.prompts import ParsedPrompt
from lamella.errors import CapacityError, StepFailedError
from lamella.kv_cache.retention import RetentionPolicy
from tests.helpers.fake_engine import fake_models, foretell_answer, word
from tests.helpers.fake_executor import VOCAB
from tests.helpers.simulation import chunked, full, sliding

MAX_MODEL_LEN = 40
MOST_CALLS_OF_STEP = 2000
MOST_STEPS_OF_STORMS = 60
PACKAGE = Path(lamella.__file__).parent
WATCHED = (str(PACKAGE / "engine"), str(PACKAGE / "kv_cache"))
KINDS = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
WORDS = np.full((VOCAB + 31) // 32, 2**32 - 1, dtype=np.uint32)


class InjectedError(Exception):
    """What nobody expects."""


class PoisonError(Exception):
    """What a request brings about itself."""


def out_of_memory() -> Exception:
    return MemoryError("injected")


def out_of_device_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory (injected)")


INJECTED: tuple[Callable[[], BaseException], ...] = (
    out_of_memory,
    out_of_device_memory,
    lambda: InjectedError("injected"),
    lambda: KeyboardInterrupt("injected"),
)


@dataclass
class Asked:
    """A request and what is to become of it. poison: the phase at which it makes steps fail, once it has so many
    tokens."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    salt: str | None
    boundaries: tuple[int, ...] = ()
    poison: str | None = None
    poisoned_from: int = 0
    is_added: bool = False
    is_aborted: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finished


class PoisonedGrammar:
    """Allows everything, until it fails while a step is planned."""

    problem = None

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def mask(self, output_ids: np.ndarray) -> np.ndarray:
        if len(output_ids) >= self._asked.poisoned_from:
            raise PoisonError(f"the grammar of {self._asked.request_id}")
        return WORDS

    def num_allowed(self, output_ids: np.ndarray, next_ids: list[int]) -> int:
        return len(next_ids)


class PoisonedDetokenizer:
    """Fails at the request's token `poisoned_from`, where the step's outputs are made."""

    def __init__(self, detokenizer, asked: Asked, sample) -> None:
        self._detokenizer, self._asked, self._sample = detokenizer, asked, sample

    def append(self, token_id: int, *, is_stop_token: bool):
        if len(self._sample.token_ids) > self._asked.poisoned_from:
            raise PoisonError(f"output of {self._asked.request_id}")
        return self._detokenizer.append(token_id, is_stop_token=is_stop_token)

    def __getattr__(self, name: str):
        return getattr(self._detokenizer, name)


class Clock:
    """Of time.monotonic and time.perf_counter: it jumps, in both directions."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._now = draw, 1e6

    def __call__(self) -> float:
        self._now += 1e-3
        if self._draw.random() < 0.01:
            self._now += self._draw.choice([-1e5, -3.0, 60.0, 1e5])
        return self._now


class AtCall:
    """Within it, the given call of a function of engine/ or kv_cache/ raises instead. Counts from 0."""

    def __init__(self, number: int, make: Callable[[], BaseException]) -> None:
        self._left, self._make = number, make
        self.has_raised = False

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and not self.has_raised and code.co_filename.startswith(WATCHED):
            if code.co_flags & inspect.CO_GENERATOR:  # one that is closed is called, too, and nobody hears of it
                return None
            self._left -= 1
            if self._left < 0:
                self.has_raised = True
                raise self._make()
        return None


class EngineLife:
    """Of the engine that `seed` decides."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        specs = draw.choice(
            [[full(), sliding(5)], [full(2), sliding(9, 3)], [sliding(6)], [full()], [full(), chunked(8), sliding(5)]]
        )
        with fake_models(
            specs,
            max_model_len=MAX_MODEL_LEN,
            page_tokens=draw.choice([1, 2, 4]),
            extra_slabs=draw.choice([0, 4, 60]),
            chunk_tokens=draw.choice([6, 16, 64]),
            max_num_seqs=draw.choice([2, 4, 6]),
            interval_tokens=draw.choice([None, 4]),
            scheduling_policy=draw.choice(["fcfs", "prefix"]),
            retention=RetentionPolicy(*draw.choice([("tails", None, False), ("tails",), ("all",)])),
            step_tokens=draw.choice([0, 16]),
        ):
            self.engine = Engine(model="fake", async_scheduling=draw.random() < 0.5)
        self.runner = self.engine.inspect().runner
        self.runner.disturb = self._disturb
        self._new_detokenizer = self.engine._outputs._detokenizer
        self.engine._outputs._detokenizer = self._poisoned_detokenizer
        self.asked = [self._ask(number) for number in range(draw.randint(3, 7))]
        self._by_id = {one.request_id: one for one in self.asked}
        # A device that has no memory for steps of more tokens, for some time.
        self._short_from = draw.choice([None, None, 0, draw.randint(0, 20)])
        self._short_until = (self._short_from or 0) + draw.choice([5, 40, 10**6])
        self._most_tokens = draw.choice([1, 2, 5])
        self._fault_rate = draw.choice([0.0, 0.05, 0.3])
        self._num_faults_alone = 0
        self._pins: list[str] = []
        self.num_steps = self.num_injected = self.num_blamed = 0

    def _ask(self, number: int) -> Asked:
        draw = self.draw
        base = draw.choice([7, 11])
        prompt = [(base * position) % (VOCAB - 1) + 1 for position in range(draw.randint(1, 26))]
        if draw.random() < 0.3:
            prompt = [*prompt, draw.randrange(VOCAB)]
        params = SamplingParams(
            n=draw.choice([1, 1, 1, 2]),
            seed=draw.randrange(1000),
            max_tokens=draw.randint(1, 9),
            output_kind=draw.choice(KINDS),
            ignore_eos=draw.random() < 0.7,
            stop=draw.choice([[], [], ["3 a4", "6 b"], ["a1"]]),
            stop_token_ids=draw.choice([[], list(range(1, 9))]),
            frequency_penalty=draw.choice([0.0, 0.0, 1.0]),
            logprobs=draw.choice([None, None, 0]),
        )
        poison = draw.choice([None] * 8 + ["plan", "launch", "result", "output"])
        return Asked(
            f"r{number}",
            prompt,
            params,
            salt=None,
            boundaries=(draw.randint(1, len(prompt)),) if draw.random() < 0.2 else (),
            poison=poison,
            poisoned_from=draw.randint(0, params.max_tokens - 1),
        )

    # What goes wrong by itself

    def _disturb(self, phase: str, plan, requests) -> None:
        is_short = self._short_from is not None and self._short_from <= self.num_steps < self._short_until
        if phase == "launch" and is_short and len(plan.token_ids) > self._most_tokens:
            raise out_of_device_memory()
        for request in requests:
            one = self._by_id.get(request.request_id)
            if one is not None and one.poison == phase and self._num_output(request) >= one.poisoned_from:
                raise PoisonError(f"{phase} of {one.request_id}")

    def _num_output(self, request) -> int:
        rows = self.engine.inspect().scheduler.rows
        num_tokens = len(request.token_ids) if request.row < 0 else int(rows.num_tokens[request.row])
        return num_tokens - request.num_prompt_tokens

    def _poisoned_detokenizer(self, conversation, sample):
        detokenizer = self._new_detokenizer(conversation, sample)
        one = self._by_id[conversation.request_id]
        if one.poison == "output":
            sample.detokenizer = detokenizer = PoisonedDetokenizer(detokenizer, one, sample)
        return detokenizer

    def _parsed(self, one: Asked) -> ParsedPrompt:
        prompt = {"prompt_token_ids": one.prompt}
        if one.boundaries:
            prompt["prefix_boundary"] = one.boundaries[0]
        return self.engine.parse(prompt, one.params)

    # A life

    def run(self) -> None:
        """Raises AssertionError where something is not as it must be."""
        clock = Clock(self.draw)
        with patch.object(time, "monotonic", clock), patch.object(time, "perf_counter", clock):
            self._live()
        self._check()

    def _live(self) -> None:
        draw, engine = self.draw, self.engine
        arrivals = list(self.asked)
        while arrivals or engine.has_unfinished_requests():
            while arrivals and (draw.random() < 0.4 or not engine.has_unfinished_requests()):
                self._insist(lambda: self._add(arrivals[0]))
                del arrivals[0]
            self._meddle()
            if draw.random() < 0.9:  # else the caller is slow, and others come first
                self._attempt(lambda: self._take(engine.step()))
                self.num_steps += 1
            assert self.num_steps < MOST_CALLS_OF_STEP, "it goes on for ever"

    def _meddle(self) -> None:
        """What callers do between steps."""
        draw, engine = self.draw, self.engine
        what = draw.random()
        if what < 0.03 and self.num_steps < MOST_STEPS_OF_STORMS:  # later ones would end what hangs
            running = [one.request_id for one in self.asked if one.is_added and not one.is_over]
            storm = draw.sample(running, draw.randint(0, len(running)))
            for request_id in storm:
                self._by_id[request_id].is_aborted = True
            if storm:
                self._insist(lambda: self._take(engine.abort([*storm, "unknown"])))
        elif what < 0.05:
            self._attempt(engine.reset_prefix_cache)
        elif what < 0.08:
            self._attempt(lambda: self._pin(draw.choice(self.asked)))
        elif what < 0.1 and self._pins:
            name = self._pins[0]
            self._insist(lambda: self._unpin(name))
            self._pins.remove(name)
        elif what < 0.12:
            self._refuse()
        if draw.random() < 0.1:
            engine.check_invariants()

    def _refuse(self) -> None:
        """Calls that are refused, and change nothing."""
        engine, draw = self.engine, self.draw
        call = draw.choice(
            [
                lambda: engine.add_request("bad", [], SamplingParams()),
                lambda: engine.add_request("bad", [VOCAB], SamplingParams()),
                lambda: engine.add_request("bad", [1], SamplingParams(logprobs=VOCAB + 1)),
                lambda: engine.add_request("bad", [1], SamplingParams(), lora_request=LoRARequest("x", 1, "/nowhere")),
                lambda: engine.unpin_prefix("unknown"),
            ]
        )
        try:
            call()
        except RequestError:
            return
        raise AssertionError("what cannot run was accepted")

    def _add(self, one: Asked) -> None:
        if one.request_id not in self.engine._outputs and not one.is_added:
            parsed = self._parsed(one)
            if one.poison == "plan":
                parsed = ParsedPrompt(
                    parsed.text,
                    parsed.token_ids,
                    parsed.cache_salt,
                    prefix_boundaries=parsed.prefix_boundaries,
                    new_grammar=lambda: PoisonedGrammar(one),
                )
            self.engine.add_parsed(one.request_id, parsed, one.params)
        one.is_added = True

    def _pin(self, one: Asked) -> None:
        with suppress(CapacityError):
            self._pins.append(self.engine.pin_prefix(one.prompt).name)

    def _unpin(self, name: str) -> None:
        if name in {one.name for one in self.engine.pinned_prefixes()}:
            self.engine.unpin_prefix(name)

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            one = self._by_id[output.request_id]
            assert not one.is_over, f"{one.request_id} has an output after its last"
            one.outputs.append(output)

    def _insist(self, call: Callable[[], object]) -> None:
        assert any(self._attempt(call) for _ in range(20)), "a call never comes to pass"

    def _attempt(self, call: Callable[[], object]) -> bool:
        """The call, in which something may go wrong. Returns whether it came to its end."""
        draw = self.draw
        is_alone = bool(self.engine._failures.groups)
        if not is_alone:
            self._num_faults_alone = 0
        wanted = draw.random() < self._fault_rate and not (is_alone and self._num_faults_alone)
        if not wanted:
            call()
            return True
        fault = AtCall(int(draw.expovariate(1 / 60)), draw.choice(INJECTED))
        try:
            with fault:
                call()
        except (InjectedError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
            if "injected" not in str(error):
                raise
            return False
        finally:
            if fault.has_raised:
                self.num_injected += 1
                self._num_faults_alone += 1
        return True

    # What must be so

    def _check(self) -> None:
        engine, loaded = self.engine, self.engine.inspect()
        assert self.runner.wrong_reads == [], self.runner.wrong_reads
        for one in self.asked:
            assert one.is_over, f"{one.request_id} has no last output"
            self._check_request(one)
        for name in self._pins:
            self._unpin(name)
        assert not loaded.launched
        assert not loaded.scheduler.running
        assert not len(loaded.scheduler.queue)
        assert not loaded.scheduler._aside
        assert len(loaded.scheduler.rows._free_rows) == len(loaded.scheduler.rows.requests)
        engine.check_invariants()
        for pinned in engine.pinned_prefixes():  # one whose name an interrupt kept from the caller
            engine.unpin_prefix(pinned)
        assert all(usage.owned == 0 for usage in loaded.manager.usage().values())
        assert engine.reset_prefix_cache()
        arena = loaded.manager.inspect().arena
        assert arena.num_free_slabs == arena.num_slabs - 1
        assert loaded.manager.inspect().tree.roots() == {}

    def _check_request(self, one: Asked) -> None:
        last = one.outputs[-1]
        if last.error is not None:
            assert one.poison is not None, f"{one.request_id} has done nothing: {last.error}"
            assert isinstance(last.error, StepFailedError)
            # It failed alone twice, once of itself; the last time may be one of the faults at random.
            cause = str(last.error.__cause__)
            assert "injected" in cause or cause.endswith(f" of {one.request_id}"), cause
            self.num_blamed += 1
        if one.params.output_kind is RequestOutputKind.FINAL_ONLY:
            assert len(one.outputs) == 1
        for index in range(one.params.n):
            self._check_sample(one, [output.outputs[index] for output in one.outputs], index)

    def _check_sample(self, one: Asked, parts, index: int) -> None:
        expected = foretell_answer(one.prompt, one.params, index, MAX_MODEL_LEN)
        last = parts[-1]
        token_ids, text = last.token_ids, last.text
        if one.params.output_kind is RequestOutputKind.DELTA:
            token_ids = [*itertools.chain(*(part.token_ids for part in parts))]
            text = "".join(part.text for part in parts)
        if last.finish_reason in ("abort", "error"):
            assert last.finish_reason == "error" or one.is_aborted
            assert (last.finish_reason == "error") <= (one.outputs[-1].error is not None)
            assert token_ids == expected.token_ids[: len(token_ids)]
            whole = "".join(map(word, token_ids))  # no stop string has come
            assert text == whole or (one.poison == "output" and whole.startswith(text))
            return
        found = (token_ids, text, last.finish_reason, last.stop_reason)
        assert found == expected, f"{one.request_id} sample {index}: {found}, foretold {tuple(expected)}"


def problem_with(seed: int) -> str | None:
    """What is wrong with the life of this seed; None: nothing."""
    try:
        EngineLife(seed).run()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


@click.command()
@click.option("--first", type=int, default=0, show_default=True)
@click.option("--seeds", "num_seeds", type=click.IntRange(min=1), default=1000, show_default=True)
def main(first: int, num_seeds: int) -> None:
    """Exits with 1 if a life was wrong."""
    logging.disable(logging.CRITICAL)
    num_wrong = 0
    for seed in range(first, first + num_seeds):
        problem = problem_with(seed)
        if problem is not None:
            num_wrong += 1
            print(f"seed {seed}: {problem}", flush=True)
    print(f"{num_seeds} lives from seed {first} on, {num_wrong} wrong")
    raise SystemExit(bool(num_wrong))


if __name__ == "__main__":
    main()
