"""A life of an engine with an exception at one of its lines: where it came, and what must be so all the same.

The life is fixed: requests of all kinds arrive, share prefixes, are preempted, aborted and finish. What each must come
to is told by `foretell_answer` from its prompt and parameters.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lamella
from lamella import Engine, RequestOutputKind, SamplingParams
from lamella.engine.scheduling.request import Request
from lamella.kv_cache.retention import RetentionPolicy
from lamella.model_executor.step_plan import StepPlan
from tests.helpers.fake_engine import fake_models, foretell_answer
from tests.helpers.simulation import full, sliding

MAX_MODEL_LEN = 48
PACKAGE = Path(lamella.__file__).parent
TraceFunction = Callable[[FrameType, str, Any], Any]
WATCHED = (PACKAGE / "engine", PACKAGE / "kv_cache")
BASE = [(7 * position + position // 5) % 49 + 1 for position in range(40)]
OTHER = [(11 * position + 3) % 49 + 1 for position in range(40)]
THIRD = [(13 * position + 9) % 49 + 1 for position in range(40)]


class InjectedError(Exception):
    """What nobody expects."""


class InjectedMemoryError(MemoryError):
    """As raised by any allocation."""


class InjectedInterrupt(KeyboardInterrupt):
    """As raised by Ctrl-C where the handler is not Python's own, or for a second one."""


INJECTED = (InjectedError, InjectedMemoryError, InjectedInterrupt)


class Line(NamedTuple):
    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).relative_to(PACKAGE)}:{self.line} ({self.code.co_name})"

    def __hash__(self) -> int:
        """By the code's identity: its own hash goes through all its instructions."""
        return hash((id(self.code), self.line))


# Functions whose last line nothing comes before that raises: what is done on the line above is returned there, and
# Python runs no signal handler in between (see OutputProcessor). Only a tracer can raise there.
UNBROKEN = ("_swap", "_replace")


def is_out_of_reach(line: Line) -> bool:
    code = line.code
    is_last = line.line == max(number for *_, number in code.co_lines() if number is not None)
    return is_last and code.co_name in UNBROKEN and Path(code.co_filename).name == "output_processor.py"


class LineCounter:
    """How often each watched line runs within it, and in which steps of the life."""

    def __init__(self) -> None:
        self.counts: dict[Line, int] = {}
        self.steps: defaultdict[Line, dict[int, None]] = defaultdict(dict)
        self.step = 0
        self._tracers: dict[int, TraceFunction | None] = {}  # by the code's id; None: it is not watched
        self._codes: list[CodeType] = []  # kept, so that no other code gets the id of one

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_) -> None:
        sys.settrace(None)

    def _call(self, frame, event, argument):
        code = frame.f_code
        try:
            return self._tracers[id(code)]
        except KeyError:
            is_watched = any(Path(code.co_filename).is_relative_to(folder) for folder in WATCHED)
            self._codes.append(code)
            tracer = self._tracers[id(code)] = self._tracer(code) if is_watched else None
            return tracer

    def _tracer(self, code: CodeType) -> TraceFunction:
        lines: dict[int, Line] = {}  # those of this code, so that a line is made once

        def count(frame, event, argument):
            if event == "line":
                number = frame.f_lineno
                line = lines.get(number)
                if line is None:
                    line = lines[number] = Line(code, number)
                    if not is_out_of_reach(line):
                        self.counts[line] = 0
                if line in self.counts:
                    self.counts[line] += 1
                    self.steps[line][self.step] = None
            return count

        return count


class Bomb(NamedTuple):
    """The line raises the error when it is run in that step or later, after so many times."""

    line: Line
    error: type[BaseException]
    step: int = 0
    num_passed: int = 0

    def __str__(self) -> str:
        return f"{self.error.__name__} from step {self.step}, {self.num_passed} times passed, at {self.line}"


class Bombs:
    """Within it, each of them goes off once."""

    def __init__(self, bombs: list[Bomb]) -> None:
        self.left = list(bombs)
        self.step = 0
        self._codes = {id(bomb.line.code) for bomb in bombs}
        self._num_passed: Counter[Bomb] = Counter()

    def __enter__(self) -> None:
        if self.left:
            sys.settrace(self._call)

    def __exit__(self, *_) -> None:
        sys.settrace(None)

    def _call(self, frame, event, argument):
        if id(frame.f_code) in self._codes:  # of all calls but a few this is all that is asked
            for bomb in self.left:
                if bomb.line.code is frame.f_code and bomb.step <= self.step:
                    return self._raise
        return None

    def _raise(self, frame, event, argument):
        if event == "line":
            for bomb in self.left:
                if bomb.line == (frame.f_code, frame.f_lineno) and bomb.step <= self.step:
                    if self._num_passed[bomb] == bomb.num_passed:
                        self.left.remove(bomb)
                        raise bomb.error(str(bomb.line))
                    self._num_passed[bomb] += 1
        return self._raise


@dataclass(frozen=True)
class Setting:
    """tight: memory for little more than one request. fails_at: see FakeRunner. guilty: the request with which
    each step fails."""

    is_async: bool
    tight: bool
    policy: str
    fails_at: tuple[tuple[int, str], ...] = ()
    guilty: str | None = None

    def __str__(self) -> str:
        failing = "-failing" if self.fails_at else ""
        return f"{'async' if self.is_async else 'sync'}-{'tight' if self.tight else 'roomy'}-{self.policy}{failing}"

    def models(self):
        """See `fake_models`."""
        arguments = {"max_model_len": MAX_MODEL_LEN, "scheduling_policy": self.policy, "fails_at": dict(self.fails_at)}
        if self.tight:
            return fake_models(
                [full(2), sliding(9, 3)], page_tokens=2, extra_slabs=0, chunk_tokens=12, max_num_seqs=4, step_tokens=12,
                interval_tokens=4, retention=RetentionPolicy("tails", None, True), **arguments
            )  # fmt: skip
        return fake_models(
            [full(), sliding(5)], extra_slabs=60, chunk_tokens=16, max_num_seqs=4,
            retention=RetentionPolicy("tails", None, False), **arguments
        )  # fmt: skip

    def engine(self) -> Engine:
        with self.models():
            engine = Engine(model="fake", async_scheduling=self.is_async)
        if self.guilty is not None:
            engine.inspect().runner.disturb = self._disturb
        return engine

    def _disturb(self, phase: str, plan: StepPlan, requests: list[Request]) -> None:
        if phase == "result" and any(request.request_id == self.guilty for request in requests):
            raise RuntimeError(f"every step fails with {self.guilty}")


class Arrival(NamedTuple):
    step: int
    request_id: str
    prompt: list[int]
    params: SamplingParams
    abort_step: int | None = None


def _params(kind: RequestOutputKind, **values) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "output_kind": kind, **values})


CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
ARRIVALS = [
    Arrival(0, "long", BASE[:27], _params(CUMULATIVE, max_tokens=13, ignore_eos=True)),
    Arrival(0, "stops", BASE[:22] + OTHER[:2], _params(DELTA, max_tokens=9, stop=["3 a4", "6 b9"], ignore_eos=True)),
    Arrival(1, "first", THIRD[:31], _params(FINAL, max_tokens=1)),
    Arrival(1, "samples", OTHER[:9], _params(DELTA, n=3, max_tokens=12, logprobs=0, seed=8, ignore_eos=True)),
    Arrival(3, "penalised", OTHER[:6], _params(FINAL, max_tokens=5, frequency_penalty=1.0, repetition_penalty=1.5)),
    Arrival(4, "gone", OTHER[3:20], _params(DELTA, max_tokens=20, ignore_eos=True), abort_step=11),
    Arrival(6, "ends", BASE[:18], _params(CUMULATIVE, min_tokens=2, max_tokens=7, stop_token_ids=list(range(1, 25)))),
    Arrival(8, "again", THIRD[:21] + OTHER[30:34], _params(FINAL, max_tokens=4, seed=1)),
    Arrival(11, "waits", OTHER[:5], _params(FINAL, max_tokens=4), abort_step=11),
]  # fmt: skip
ABORTED = {one.request_id for one in ARRIVALS if one.abort_step is not None}


class Life:
    """What came out of an engine that went through ARRIVALS."""

    def __init__(self, engine: Engine, tracer: LineCounter | Bombs | None = None, *, guilty: str | None = None) -> None:
        """guilty: the request with which each step fails."""
        self.engine = engine
        self._tracer = tracer
        self._arrivals = list(ARRIVALS)
        self._leaving = [one for one in ARRIVALS if one.abort_step is not None]
        self._step = 0
        self._batches = []
        self.num_raised = 0
        self._guilty = guilty
        self._num_left = 0  # bombs, when suspects began to run alone

    def run(self) -> None:
        """To be called again where a real interrupt ended it: whatever line that came at, it goes on."""
        engine, arrivals, leaving = self.engine, self._arrivals, self._leaving
        while not self.is_over:
            while arrivals and arrivals[0].step <= self._step:
                self._insist(lambda: self._add(arrivals[0]))
                del arrivals[0]
            while leaving and leaving[0].abort_step <= self._step:
                self._insist(lambda: self._batches.append(engine.abort(leaving[0].request_id)))
                del leaving[0]
            self._try(lambda: self._batches.append(engine.step()))
            self._step += 1
            assert self._step < 400, "not finished after 400 steps"
            if self._tracer:
                self._tracer.step = self._step

    @property
    def is_over(self) -> bool:
        return not (self._arrivals or self.engine.has_unfinished_requests())

    def _try(self, call) -> bool:
        try:
            with self._armed():
                call()
        except (*INJECTED, RuntimeError) as error:
            if not isinstance(error, INJECTED) and "fails" not in str(error):
                raise
            self.num_raised += 1
            self.engine.check_invariants()
            return False
        return True

    def _armed(self):
        """What watches or disturbs the next call. While suspects run alone, no more than one bomb goes off, and none
        where a launch may fail by itself, or where an innocent one has failed alone: it might rightly be taken for
        guilty."""
        if isinstance(self._tracer, Bombs):
            runner, failures = self.engine.inspect().runner, self.engine._failures
            may_fail = any(launch >= runner.num_launches for launch in runner.fails_at)
            has_failed = failures.num_tries_alone > 0 and failures.only != {self._guilty}
            if not failures.groups:
                self._num_left = len(self._tracer.left)
            elif may_fail or has_failed or len(self._tracer.left) < self._num_left:
                return nullcontext()
        return self._tracer or nullcontext()

    def _insist(self, call) -> None:
        assert any(self._try(call) for _ in range(20)), "it never comes to pass"

    def _add(self, one: Arrival) -> None:
        if one.request_id not in self.engine._outputs:  # the call before was interrupted when it was done
            self.engine.add_parsed(one.request_id, self.engine.parse(one.prompt, one.params), one.params)

    def _outputs(self):
        outputs = {}
        for output in itertools.chain(*self._batches):
            earlier = outputs.setdefault(output.request_id, [])
            assert not (earlier and earlier[-1].finished), "an output after the last"
            earlier.append(output)
        return outputs

    def check(self) -> None:
        """Every request has its answer, each part of it once, or is the guilty one; nothing is left in memory."""
        assert self.engine.inspect().runner.wrong_reads == []
        by_request = self._outputs()
        errors = {request_id: outputs[-1].error for request_id, outputs in by_request.items() if outputs[-1].error}
        assert list(errors) == ([] if self._guilty is None else [self._guilty]), f"ended with an error: {errors}"
        for error in errors.values():  # one of its two failures alone may have been a bomb
            assert (
                isinstance(error.__cause__, INJECTED) or str(error.__cause__) == f"every step fails with {self._guilty}"
            )
        assert set(by_request) == {one.request_id for one in ARRIVALS}
        for one in ARRIVALS:
            outputs = by_request[one.request_id]
            assert outputs[-1].finished
            if one.params.output_kind is FINAL:
                assert len(outputs) == 1
            for index in range(one.params.n):
                self._check_sample(one, [output.outputs[index] for output in outputs], index)
        loaded = self.engine.inspect()
        assert self.engine.stats().num_generated_tokens == _num_tokens(by_request), "tokens are counted otherwise"
        assert not self.engine.inspect().launched
        assert not loaded.scheduler.running
        assert not len(loaded.scheduler.queue)
        assert len(loaded.scheduler.rows._free_rows) == len(loaded.scheduler.rows.requests)
        self.engine.check_invariants()
        assert all(usage.owned == 0 for usage in loaded.manager.usage().values())
        assert self.engine.reset_prefix_cache()
        assert loaded.manager.inspect().arena.num_free_slabs == loaded.manager.inspect().arena.num_slabs - 1
        assert loaded.manager.inspect().tree.roots() == {}
        assert not len(loaded.manager.inspect().tree.expected)

    def _check_sample(self, one: Arrival, parts, index: int) -> None:
        expected = foretell_answer(one.prompt, one.params, index, MAX_MODEL_LEN)
        if one.params.output_kind is DELTA:
            token_ids = [*itertools.chain(*(part.token_ids for part in parts))]
            text = "".join(part.text for part in parts)
            logprobs = [*itertools.chain(*(part.logprobs or () for part in parts))]
        else:
            token_ids, text, logprobs = parts[-1].token_ids, parts[-1].text, parts[-1].logprobs
        if parts[-1].finish_reason in ("abort", "error"):  # whose errors are in order
            assert parts[-1].finish_reason == "error" or one.request_id in ABORTED
            assert token_ids == expected.token_ids[: len(token_ids)]
            assert expected.text.startswith(text)
            return
        assert (token_ids, text, parts[-1].finish_reason, parts[-1].stop_reason) == expected, one.request_id
        if one.params.logprobs is not None:
            assert [list(entry) for entry in logprobs] == [[token] for token in token_ids]


def _num_tokens(by_request) -> int:
    return sum(
        len(part.token_ids)
        for one in ARRIVALS
        for output in by_request[one.request_id][0 if one.params.output_kind is DELTA else -1 :]
        for part in output.outputs
    )


FAILING = ((2, "launch"), (6, "result"), (10, "update"))
SETTINGS = [
    Setting(is_async, tight, policy, fails_at, "again" if fails_at else None)
    for is_async in (False, True)
    for tight, policy, fails_at in (
        (False, "fcfs", ()),
        (False, "prefix", ()),
        (False, "fcfs", FAILING),
        (True, "fcfs", ()),
        (True, "prefix", ()),
        (True, "prefix", FAILING),
    )
]


def lines_of(setting: Setting) -> LineCounter:
    """The watched lines that an undisturbed life comes to."""
    counter = LineCounter()
    life = Life(setting.engine(), counter, guilty=setting.guilty)
    life.run()
    life.check()
    return counter


def problem_with(setting: Setting, bombs: list[Bomb]) -> tuple[str | None, list[Bomb]]:
    """What is wrong with a life in which these go off (None: nothing), and which did not."""
    tracer = Bombs(bombs)
    life = Life(setting.engine(), tracer, guilty=setting.guilty)
    try:
        life.run()
        life.check()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}", tracer.left
    return None, tracer.left


def problems_with(setting: Setting, lines: list[Line], counter: LineCounter, *, num_together: int, seed=0) -> list[str]:
    """What is wrong with lives in which each of the lines raises once. Several go off in one life, in steps drawn at
    random; where that life is wrong, each has one of its own, and so have those that it did not come to."""
    draw = random.Random(seed)
    order = draw.sample(lines, len(lines))
    problems = []
    for first in range(0, len(order), num_together):
        bombs = [
            Bomb(line, INJECTED[index % len(INJECTED)], step=draw.choice(list(counter.steps[line])))
            for index, line in enumerate(order[first : first + num_together])
        ]
        problem, left = problem_with(setting, bombs)
        for bomb in left if problem is None else bombs:
            alone = bomb._replace(step=0, num_passed=draw.randrange(counter.counts[bomb.line]))
            alone_problem, is_left = problem_with(setting, [alone])
            if alone_problem or is_left:
                problems.append(f"{alone}: {alone_problem or 'was not come to'}")
                problem = None
        if problem is not None:
            problems.append(f"{'; '.join(map(str, bombs))}: {problem}")
    return problems
