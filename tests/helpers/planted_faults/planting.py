"""Faults to plant: each breaks one rule of the real code while its context is open.

A fault replaces a method of a class (or a name in a module), so it acts on all objects that are made or
used inside the context. What it replaces must exist, or opening the context fails with AttributeError,
which no test takes for a fault that was noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def replaces(
    owner: Any, attribute: str, faults: dict[str, Callable[[], AbstractContextManager[Any]]] = FAULTS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function in `faults` as the fault of its own name: it is called in place of `owner.attribute`, with
    the original as first argument."""

    def register(faulty: Callable[..., Any]) -> Callable[..., Any]:
        faults[faulty.__name__] = lambda: replaced(owner, attribute, faulty)
        return faulty

    return register


@contextmanager
def replaced(owner: Any, attribute: str, faulty: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, attribute)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return faulty(original, *args, **kwargs)

    with mock.patch.object(owner, attribute, stand_in):
        yield
