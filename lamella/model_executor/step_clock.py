"""Where a step's time goes, as far as the host sees it."""

from __future__ import annotations

import ctypes
import time


class StepClock:
    """Seconds of the parts of steps since the last `take`. A runner without one measures nothing.

    attention: rotary embedding, writing K and V, and attention. layers: the whole model but the head, so with
    attention. head: logits. sampling: the choice of tokens, without what it computes of logits. copies: of pages.
    On a device that works by itself these are the times of launching, and the step is waited for elsewhere.
    """

    __slots__ = ("_attention", "copies", "head", "layers", "sampling")

    def __init__(self) -> None:
        self._attention = ctypes.c_double(0.0)
        self.layers = self.head = self.sampling = self.copies = 0.0

    @property
    def native_attention(self) -> ctypes.c_double:
        """What native code adds attention's seconds to."""
        return self._attention

    def add_attention(self, start: float) -> None:
        """Attention has run from `start` (of `time.monotonic`) until now."""
        self._attention.value += time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Seconds by part; from now on it measures anew."""
        attention = self._attention.value
        found = {
            "copies": self.copies,
            "products": max(0.0, self.layers - attention),
            "attention": attention,
            "head": self.head,
            "sampling": self.sampling,
        }
        self._attention.value = self.layers = self.head = self.sampling = self.copies = 0.0
        return found
