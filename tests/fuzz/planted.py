"""Faults that a worker commits when it is told to, so that a test can show that each kind is noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch


def _spin() -> None:
    while True:
        pass


def _raise() -> None:
    raise KeyError("model_type")


# Committed in place of loading, under the limits that a load has.
BEFORE: dict[str, Callable[[], object]] = {
    "spin": _spin,
    "wait": lambda: time.sleep(1e6),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "allocate": lambda: torch.empty(2 << 30, dtype=torch.uint8).fill_(1),
    "raise": _raise,
}


def _flip_weight(loaded: Any) -> None:
    weight = next(value for name, value in loaded.runner.model.model.tensors.items() if "down_proj" in name)
    weight.view(torch.int32).view(-1)[7] ^= 1


# Done to a model that was loaded.
AFTER: dict[str, Callable[[Any], None]] = {"flip a weight's last bit": _flip_weight}
