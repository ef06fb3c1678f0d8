"""Runs that are interrupted by real signals at random moments, and go on.

    python -m tests.soak.real_interrupts --runs 2000

Each run is a life of an engine (tests/helpers/interrupted_lives.py), or a call of LLM.generate that is interrupted and
made again, with one SIGINT, or two close together, at a random moment of it. The signal is sent by a timer's handler in
the main thread, or by a second thread. Wrong is a run whose answers are not those that its prompts foretell, that
leaves anything in memory, or whose handler of SIGINT is another afterwards.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import Counter

import click

from lamella import LLM
from tests.helpers.fake_engine import foretell_answer
from tests.helpers.interrupted_lives import ARRIVALS, MAX_MODEL_LEN, SETTINGS, Life, Setting

SENDERS = ("timer", "thread")


class Sender:
    """Sends SIGINT to this process, `seconds` after `start` and after each other."""

    def __init__(self, seconds: list[float], kind: str) -> None:
        self._left = list(seconds)
        self._kind = kind

    @property
    def is_done(self) -> bool:
        return not self._left

    def start(self) -> None:
        if self._kind == "thread":
            threading.Thread(target=self._send_all).start()
        elif self._left:
            signal.signal(signal.SIGALRM, self._send_next)
            signal.setitimer(signal.ITIMER_REAL, self._left[0])

    def _send_all(self) -> None:
        while self._left:
            time.sleep(self._left[0])
            os.kill(os.getpid(), signal.SIGINT)
            del self._left[0]

    def _send_next(self, signum, frame) -> None:
        """The handler of the timer's signal. It counts the signal first: the next one may go off within this call, and
        end it at any place."""
        del self._left[0]
        if self._left:
            signal.setitimer(signal.ITIMER_REAL, self._left[0])
        signal.raise_signal(signal.SIGINT)


def _insist(call) -> None:
    """The call, again where an interrupt ends it."""
    while True:
        try:
            return call()
        except KeyboardInterrupt:
            continue


def _go_on(work, is_over, seconds: list[float], kind: str) -> int:
    """Call `work` until it is over, under interrupts; how many of them ended it."""
    sender, ended, unstarted = Sender(seconds, kind), [], [1]

    def attempt() -> None:
        if unstarted:
            unstarted.clear()
            sender.start()
        while not (is_over() and sender.is_done):
            try:
                if is_over():
                    time.sleep(1e-4)
                else:
                    work()
            except KeyboardInterrupt:
                ended.append(1)
        time.sleep(0.002)  # the system may take its time to deliver the last one

    # Twice, for a second interrupt may come while the first is dealt with here.
    _insist(lambda: _insist(attempt))
    return len(ended)


def interrupted_life(setting: Setting, seconds: list[float], sender: str) -> int:
    """Returns how many interrupts ended a call."""
    life = Life(setting.engine())
    num_ended = _go_on(life.run, lambda: life.is_over, seconds, sender)
    _require_default_handler()
    life.check()
    return num_ended


def interrupted_generate(setting: Setting, seconds: list[float], sender: str) -> int:
    asked = [one for one in ARRIVALS if one.abort_step is None]
    prompts, params = [one.prompt for one in asked], [one.params for one in asked]
    with setting.models():
        llm = LLM("fake", async_scheduling=setting.is_async, scheduling_policy=setting.policy)
    outputs: list = []
    num_ended = _go_on(
        lambda: outputs.append(llm.generate(prompts, params, use_tqdm=False)), lambda: outputs, seconds, sender
    )
    _require_default_handler()
    for repeated in (outputs[0], llm.generate(prompts, params, use_tqdm=False)):
        assert len(repeated) == len(asked)
        for one, output in zip(asked, repeated, strict=True):
            for index, part in enumerate(output.outputs):
                answer = (part.token_ids, part.text, part.finish_reason, part.stop_reason)
                assert answer == foretell_answer(one.prompt, one.params, index, MAX_MODEL_LEN), one.request_id
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_invariants()
    assert all(usage.owned == 0 for usage in llm.engine.stats().kv_cache.pages.values())
    assert llm.reset_prefix_cache()
    return num_ended


def _require_default_handler() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "SIGINT has another handler now"


def soak(num_runs: int, seed: int) -> tuple[Counter, list[str]]:
    """What happened, by kind of run, and what was wrong."""
    draw = random.Random(seed)
    settings = [setting for setting in SETTINGS if not setting.fails_at]
    happened: Counter = Counter()
    wrong = []
    lengths = {}
    for number in range(num_runs):
        setting, sender = settings[number % len(settings)], SENDERS[number // len(settings) % len(SENDERS)]
        work = draw.choice([interrupted_life, interrupted_life, interrupted_generate])
        key = (setting, work)
        if key not in lengths:
            started = time.monotonic()
            work(setting, [], SENDERS[0])
            lengths[key] = time.monotonic() - started
        seconds = [max(1e-3, draw.random() * lengths[key])]
        if draw.random() < 0.2:  # impatience
            seconds.append(max(1e-6, draw.random() * 2e-3))
        started = time.monotonic()
        try:
            noticed = work(setting, seconds, sender)
        except (Exception, KeyboardInterrupt) as error:
            wrong.append(f"run {number}: {work.__name__} {setting} {sender} {seconds}: {type(error).__name__}: {error}")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            noticed = "?"
        # What machines have is not constant: follow it.
        lengths[key] = 0.8 * lengths[key] + 0.2 * min(time.monotonic() - started, 2 * lengths[key])
        happened[work.__name__, sender, f"{noticed} interrupts in calls"] += 1
    return happened, wrong


@click.command()
@click.option("--runs", "num_runs", type=click.IntRange(min=1), default=2000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(num_runs: int, seed: int) -> None:
    """Exits with 1 if a run was wrong."""
    logging.disable(logging.WARNING)
    happened, wrong = soak(num_runs, seed)
    for kind, count in sorted(happened.items()):
        print(f"{count:6d}  {', '.join(kind)}")
    for line in wrong:
        print(line)
    print(f"{num_runs} runs with a real interrupt, {len(wrong)} wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
