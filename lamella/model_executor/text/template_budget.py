"""What rendering one chat template may cost, counted instead of timed, so that the same template always ends alike.

One unit is one character written or read. Whatever else a template does is charged in units by what it takes of time
and memory: a round of a loop, a call, an item of a list. A template comes from the model's folder, which is not
trusted. It is stopped before the first step that it cannot pay for.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

STEP_UNITS = 64  # a round of a loop
ITEM_UNITS = 128  # an item of a container: to make it, or to look at it
CALL_UNITS = 512  # a call, which may be of a macro, or a filter
BASE_UNITS = 64 << 20  # at most 256 MiB of text, a million rounds of loops or 131,072 calls: about a second
UNITS_PER_INPUT_UNIT = 64  # templates copy and compare what they are given, some of it for every message
MAX_INT_BITS = 1 << 16  # arithmetic on longer integers is no longer quick


class TemplateCostError(Exception):
    """A template asked for more than its budget. No ValueError or TypeError: filters catch those."""


class TemplateBudget:
    """The units that one rendering has left."""

    __slots__ = ("_remaining", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._remaining = total

    def spend(self, units: int) -> None:
        self._remaining -= units
        if self._remaining < 0:
            raise TemplateCostError(
                f"it asks for more than {self.total} units of work (characters written, {STEP_UNITS} for a round of a "
                "loop)"
            )

    def spend_size(self, value: Any, times: int = 1) -> None:
        """Pay `times` times for reading all of `value`."""
        if times > 0:
            self.spend(times * size_units(value, self._remaining // times))


def size_units(value: Any, limit: int) -> int:
    """Units to read all of `value`, with everything that is reached more than once counted as often as it is reached,
    because that is how often text and comparisons visit it. Stops counting above `limit`, so cycles do no harm."""
    if isinstance(value, (str, bytes)):
        return len(value)
    total = 0
    pending = [value]
    while pending and total <= limit:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            total += ITEM_UNITS * (2 * len(item) + 1)
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
            total += ITEM_UNITS * (len(item) + 1)
            pending.extend(item)
        elif isinstance(item, range):
            total += ITEM_UNITS * (len(item) + 1)
        elif isinstance(item, int):
            total += 16 + item.bit_length() // 4
        else:
            total += ITEM_UNITS
            # Jinja's namespaces; told by their type, because undefined values raise when asked for an attribute.
            if any(base.__name__ == "Namespace" for base in type(item).__mro__):
                pending.append(item._Namespace__attrs)
    return total
