"""The thread that steps an engine for callers in other threads and event loops."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable

from lamella.engine.engine import Engine
from lamella.engine.outputs import CompletionOutput, RequestOutput
from lamella.engine.prompts import ParsedPrompt
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.streaming.admission_gate import AdmissionGate
from lamella.engine.streaming.mailbox import Mailbox, wake
from lamella.errors import EngineClosedError, EngineCrashedError, LamellaError, RequestError
from lamella.native.fork_guard import FORK_GUARD

logger = logging.getLogger(__name__)

MOST_FAILURES_IN_A_ROW = 16


class EngineThread:
    """Owns the engine: it alone adds requests, steps and aborts. What others want done is queued, and done between two
    steps.

    A step that raises is tried again, as `Engine.step` asks for, MOST_FAILURES_IN_A_ROW times. After that, and after
    anything else that is raised here, the thread ends: every caller that is waiting gets an EngineCrashedError with the
    cause, and so does whoever comes later.
    """

    def __init__(self, engine: Engine, gate: AdmissionGate) -> None:
        self._engine = engine
        self._gate = gate
        self._mailboxes: dict[str, Mailbox] = {}  # of the engine's requests
        # Whoever destroys a stream puts something here, which may happen amid anything. SimpleQueue bears that.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_failures = 0
        self._is_stopping = False
        self.is_over = False
        self.cause: BaseException | None = None
        # A daemon, lest a program that forgets `close` never ends; it is stopped before the interpreter goes.
        self._thread = threading.Thread(target=self._run, name="lamella-engine", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    # For all threads

    def add(self, mailbox: Mailbox, prompt: ParsedPrompt, params: SamplingParams) -> None:
        self._calls.put(functools.partial(self._add, mailbox, prompt, params))

    def leave(self, mailbox: Mailbox) -> None:
        """The caller is gone: end the request, wherever it is. Nothing happens where it has ended."""
        self._calls.put(functools.partial(self._leave, mailbox))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._calls.put(functools.partial(self._abort, list(request_ids)))

    def leave_closed_loops(self) -> None:
        """End the requests whose event loops are gone, which others are waiting for the places of."""
        self._calls.put(self._leave_closed_loops)

    def ask_to_stop(self) -> None:
        self._calls.put(self._note_stop)

    def stop(self) -> None:
        """End the thread after the step that runs, and close the engine."""
        if not FORK_GUARD.has_forked:  # a child has not got the thread
            self.ask_to_stop()
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._engine.close()

    def closed_error(self) -> EngineClosedError:
        if self.cause is None:
            return EngineClosedError("the engine is closed: make a new one")
        error = EngineCrashedError(
            f"the engine's thread ended by {type(self.cause).__name__}: {self.cause}; make a new engine"
        )
        error.__cause__ = self.cause
        return error

    # In the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_calls()
                if not self._is_stopping and self._engine.has_unfinished_requests():
                    self._step()
        except BaseException as error:
            logger.error("the engine's thread ends; all requests get an error", exc_info=True)
            self.cause = error
        finally:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        left = self._gate.clear(self.closed_error)
        for mailbox in left:
            mailbox.fail(self.closed_error)
        wake(left)
        self._mailboxes.clear()
        try:
            self._engine.close()
        except Exception:
            logger.error("the engine could not be closed", exc_info=True)
        atexit.unregister(self.stop)

    def _take_calls(self) -> None:
        """Do what others want done; wait for that where there is nothing else to do."""
        if not self._engine.has_unfinished_requests():
            if self._mailboxes:  # whose callers would wait for ever
                raise (
                    EngineClosedError("the engine was closed by itself, while requests ran")
                    if self._engine.is_closed
                    else LamellaError(
                        "something else stepped the engine, or aborted its requests: leave it to its thread"
                    )
                )
            self._calls.get()()
        for _ in range(self._calls.qsize()):  # those that come meanwhile have their turn after a step
            self._calls.get()()

    def _step(self) -> None:
        outputs: list[RequestOutput] = []
        if not self._try(lambda: outputs.extend(self._engine.step())):
            return
        self._num_failures = 0
        orphans = wake([mailbox for output in outputs if (mailbox := self._deliver(output)) is not None])
        for mailbox in orphans:
            self._leave(mailbox)

    def _deliver(self, output: RequestOutput) -> Mailbox | None:
        """Returns the mailbox if its caller is to be woken."""
        mailbox = self._mailboxes.get(output.request_id)
        if mailbox is None:
            return None
        if output.finished:  # its place is free before anybody can know that it has ended
            del self._mailboxes[output.request_id]
            self._gate.leave(mailbox)
        return mailbox if mailbox.put(output) else None

    def _try(self, work: Callable[[], None]) -> bool:
        """Whether it was done. Raises what it raised where too many such calls in a row have failed."""
        try:
            work()
        except EngineClosedError:
            raise
        except Exception:
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES_IN_A_ROW:
                raise
            logger.warning(
                "a call of the engine failed, %d of at most %d in a row",
                self._num_failures,
                MOST_FAILURES_IN_A_ROW,
                exc_info=True,
            )
            return False
        return True

    def _add(self, mailbox: Mailbox, prompt: ParsedPrompt, params: SamplingParams) -> None:
        request_id = mailbox.request_id
        if not self._gate.is_inside(mailbox):  # it was ended meanwhile
            return
        if request_id in self._mailboxes:
            error: Exception = RequestError(
                f"request_id={request_id!r} is in use: wait for it to finish or choose another"
            )
        else:
            self._mailboxes[request_id] = mailbox
            try:
                return self._engine.add_parsed(request_id, prompt, params)
            except Exception as caught:
                error = caught
            del self._mailboxes[request_id]
            self._end_in_engine([request_id])  # it may have been queued all the same
        self._gate.leave(mailbox)
        mailbox.fail(lambda: error)
        wake([mailbox])

    def _leave(self, mailbox: Mailbox) -> None:
        if self._mailboxes.get(mailbox.request_id) is mailbox:
            del self._mailboxes[mailbox.request_id]
            self._end_in_engine([mailbox.request_id])
        self._gate.leave(mailbox)

    def _leave_closed_loops(self) -> None:
        for mailbox in self._gate.of_closed_loops():
            self._leave(mailbox)

    def _abort(self, request_ids: list[str]) -> None:
        """Their callers get a last output."""
        inside = [request_id for request_id in request_ids if request_id in self._mailboxes]
        woken = [self._deliver(output) for output in self._end_in_engine(inside)]
        for request_id in request_ids:
            for mailbox in self._gate.of(request_id):
                if self._mailboxes.get(request_id) is not mailbox:  # the engine does not know it yet
                    self._gate.leave(mailbox)
                    mailbox.put(_aborted(mailbox))
                    woken.append(mailbox)
        wake([mailbox for mailbox in woken if mailbox is not None])

    def _end_in_engine(self, request_ids: list[str]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while request_ids and not self._try(lambda: outputs.extend(self._engine.abort(request_ids))):
            pass
        return outputs

    def _note_stop(self) -> None:
        self._is_stopping = True


def _aborted(mailbox: Mailbox) -> RequestOutput:
    samples = [CompletionOutput(index, "", [], finish_reason="abort") for index in range(mailbox.num_samples)]
    return RequestOutput(mailbox.request_id, None, [], outputs=samples, finished=True)
