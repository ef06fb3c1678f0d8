"""Ctrl-C waits for the end of a step.

Python raises KeyboardInterrupt between any two instructions of the main thread. The engine stands that (a step is done
or undone as a whole), but undoing costs what was computed, so for the time of a step the interrupt is noted, and raised
when the step is over. Blocking the signal in the main thread would not do: another thread takes it then, and Python
runs the handler in the main thread all the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class HeldInterrupts:
    """Holds an interrupt back only in the main thread, and only where SIGINT has Python's own handler; elsewhere `run`
    just does the work. A handler that somebody else set is never touched.

    A second interrupt is raised at once, in place of the first: whoever interrupts twice does not want to wait.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._own = self._note  # kept, as each look-up of a method makes a new object

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, then raise KeyboardInterrupt if one came meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, self._own):
            return work()
        # Until the next line has set the handler, an interrupt is raised here, with nothing changed. After it, `_note`
        # handles interrupts.
        signal.signal(signal.SIGINT, self._own)
        try:
            work()
        finally:
            self._put_back()
            # An interrupt that comes from here on is raised at once, as Python does.
            if self._has_come:
                self._has_come = False
                raise KeyboardInterrupt

    def _put_back(self) -> None:
        if signal.getsignal(signal.SIGINT) is not self._own:
            return  # the work has set another handler
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        except BaseException:  # signal.signal first handles an interrupt that has come: `_note` raises for a second one
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._has_come = False
            raise

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_running(frame):
            # An exception came before `run` could put the handler back.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        elif not self._has_come:
            self._has_come = True
            return
        self._has_come = False
        signal.default_int_handler(signum, frame)

    def _is_running(self, frame: FrameType | None) -> bool:
        """Whether `frame` is inside of `run`. The stack is asked and not a flag, which an exception could leave
        wrong."""
        while frame is not None:
            if frame.f_code is HeldInterrupts.run.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False
