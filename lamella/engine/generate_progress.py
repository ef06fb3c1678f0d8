"""How far `LLM.generate` is, counted in tokens, so that the bar moves while a long prompt is being computed; in prompts
where these are taken one by one, since nobody knows then how many tokens are to come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from tqdm.auto import tqdm

from lamella.engine.outputs import RequestOutput
from lamella.engine.scheduling.request_rows import RunningTokens
from lamella.model_executor.progress import BAR_SECONDS, Progress


class GenerateProgress(Protocol):
    def add(self, request_id: str, most_tokens: int) -> None:
        """A request is queued. most_tokens: that its prompt and output can have together."""
        ...

    def step(self, outputs: list[RequestOutput]) -> None:
        """A step has finished the requests of `outputs`, or they were refused."""
        ...

    def close(self) -> None: ...


def generate_progress(
    num_prompts: int | None,
    use_tqdm: bool | Callable[..., tqdm[Any]],
    running: Callable[[], RunningTokens],
    *,
    is_iterated: bool = False,
) -> GenerateProgress:
    """num_prompts: None where it is not known. use_tqdm: as in `generate`. is_iterated: the prompts are taken one by
    one."""
    if callable(use_tqdm):
        return _GivenBar(use_tqdm, num_prompts, running)
    if not use_tqdm:
        return _Nothing()
    if num_prompts is None or is_iterated:
        return _Prompts(num_prompts, running)
    return _Tokens(num_prompts, running)


class _Nothing:
    def add(self, request_id: str, most_tokens: int) -> None:
        pass

    def step(self, outputs: list[RequestOutput]) -> None:
        pass

    def close(self) -> None:
        pass


class _Finished:
    """Totals over the requests that have finished: how many there are, and the tokens of their prompts and outputs."""

    def __init__(self) -> None:
        self.num_prompts = self.num_in = self.num_out = 0

    def add(self, output: RequestOutput) -> None:
        self.num_prompts += 1
        self.num_in += len(output.prompt_token_ids)
        self.num_out += sum(len(completion.token_ids) for completion in output.outputs)


class _Tokens:
    def __init__(self, num_prompts: int, running: Callable[[], RunningTokens]) -> None:
        self._most_left: dict[str, int] = {}  # of the requests that have not finished
        self._num_left = 0
        self._num_prompts = num_prompts
        self._running = running
        self._finished = _Finished()
        self._progress = Progress("Generating", 0, "tok", stream=sys.stderr)

    def add(self, request_id: str, most_tokens: int) -> None:
        self._most_left[request_id] = most_tokens
        self._num_left += most_tokens

    def step(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._finished.add(output)
            # Few requests generate as many tokens as they may, so the total shrinks when one finishes.
            self._num_left -= self._most_left.pop(output.request_id, 0)
        if self._progress.is_due:
            self._show(self._running())

    def close(self) -> None:
        self._show(RunningTokens(0, 0))
        self._progress.close()

    def _show(self, running: RunningTokens) -> None:
        finished = self._finished
        num_in, num_out = finished.num_in + running.num_in, finished.num_out + running.num_out
        note = (
            f"{finished.num_prompts} of {self._num_prompts} prompts finished, {num_in:,} prompt tokens read, "
            f"{num_out:,} tokens generated"
        )
        total = finished.num_in + finished.num_out + self._num_left
        self._progress.show(num_in + num_out, note, total)


class _Prompts:
    """Counts prompts; num_prompts: None where nobody knows how many there are. The tokens are told behind it."""

    def __init__(self, num_prompts: int | None, running: Callable[[], RunningTokens]) -> None:
        self._running = running
        self._finished = _Finished()
        self._progress = Progress("Generating", num_prompts, "prompt", stream=sys.stderr)
        self._start_seconds = time.monotonic()

    def add(self, request_id: str, most_tokens: int) -> None:
        pass

    def step(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._finished.add(output)
        if self._progress.is_due:
            self._show(self._running())

    def close(self) -> None:
        self._show(RunningTokens(0, 0))
        self._progress.close()

    def _show(self, running: RunningTokens) -> None:
        finished, seconds = self._finished, max(time.monotonic() - self._start_seconds, 1e-9)
        num_in, num_out = finished.num_in + running.num_in, finished.num_out + running.num_out
        note = (
            f"{finished.num_prompts:,} prompts finished, {num_in:,} prompt tokens read, {num_out:,} tokens generated, "
            f"{num_in / seconds:.1f} and {num_out / seconds:.1f} tok/s"
        )
        self._progress.show(finished.num_prompts, note)


class _GivenBar:
    """A bar that the caller makes counts prompts, as vLLM's does; the rates behind it count tokens."""

    def __init__(
        self, make: Callable[..., tqdm[Any]], num_prompts: int | None, running: Callable[[], RunningTokens]
    ) -> None:
        self._bar = make(total=num_prompts, desc="Generating", unit="prompt", dynamic_ncols=True)
        self._running = running
        self._finished = _Finished()
        self._next_seconds = BAR_SECONDS

    def add(self, request_id: str, most_tokens: int) -> None:
        pass

    def step(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._finished.add(output)
        seconds = self._bar.format_dict["elapsed"]
        if outputs or seconds >= self._next_seconds:
            self._next_seconds = seconds + BAR_SECONDS
            running = self._running()
            num_in, num_out = self._finished.num_in + running.num_in, self._finished.num_out + running.num_out
            seconds = max(seconds, 1e-9)
            rates = f"in {num_in / seconds:.1f} tok/s, out {num_out / seconds:.1f} tok/s"
            self._bar.set_postfix_str(rates, refresh=not outputs)
        for _ in outputs:
            self._bar.update()

    def close(self) -> None:
        self._bar.close()
