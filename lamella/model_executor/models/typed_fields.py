"""Named values from an untrusted file, read one by one with a type and a range.

Whoever reads a field says what it may be; everything else raises a ModelLoadError that names the file, the field, the
value and what would work. So a reader of a format lists fields and ranges, and never lists exceptions.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from lamella.errors import ModelLoadError

MAX_INT64 = 2**63 - 1
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_REQUIRED: Any = object()


def shown(value: object) -> str:
    """`value` for a message: its repr, cut short however long or deep it is."""
    return _SHOWN.repr(value)


class TypedFields:
    """A read-only view of an object's fields.

    place: the file, as errors name it. prefix: what errors put before a field's name ("text_config.").

    Each reader returns its default for a field that is absent, and raises ModelLoadError for one that is absent without
    a default or is not what was asked for. JSON's null stands for "absent" in the `optional_` readers alone.
    """

    __slots__ = ("_values", "place", "prefix")

    def __init__(self, values: Mapping[str, Any], place: object, prefix: str = "") -> None:
        self._values = values
        self.place = str(place)
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def has_value(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as the file has it, None where it is absent: for fields of several types."""
        return self._values.get(key)

    def error(self, key: str, wanted: str) -> ModelLoadError:
        """The error for a field that is not `wanted` ("must be ..." completes the sentence)."""
        if key not in self._values:
            return ModelLoadError(f"{self.place}: {self.prefix}{key} is missing; must be {wanted}")
        return ModelLoadError(f"{self.place}: {self.prefix}{key}={shown(self._values[key])}: must be {wanted}")

    def integer(self, key: str, default: int = _REQUIRED, *, low: int = 0, high: int = MAX_INT64) -> int:
        """An integer in [low, high]; True and 1.0 are none."""
        if key not in self._values and default is not _REQUIRED:
            return default
        value = self._values.get(key)
        if not is_integer(value) or not low <= value <= high:
            raise self.error(key, _range_text("an integer", low, high, MAX_INT64))
        return value

    def optional_integer(self, key: str, *, low: int = 0, high: int = MAX_INT64) -> int | None:
        return self.integer(key, low=low, high=high) if self.has_value(key) else None

    def number(
        self,
        key: str,
        default: float = _REQUIRED,
        *,
        above: float | None = None,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> float:
        """A finite number in [low, high], or more than `above`; True is none, nor what no float can hold."""
        if key not in self._values and default is not _REQUIRED:
            return default
        number = finite_float(self._values.get(key))
        if number is None or not low <= number <= high or (above is not None and number <= above):
            text = _range_text("a finite number", low, high, math.inf)
            raise self.error(key, text if above is None else f"{text}, more than {above:g}")
        return number

    def optional_number(
        self, key: str, *, above: float | None = None, low: float = -math.inf, high: float = math.inf
    ) -> float | None:
        return self.number(key, above=above, low=low, high=high) if self.has_value(key) else None

    def boolean(self, key: str, default: bool = _REQUIRED) -> bool:
        if key not in self._values and default is not _REQUIRED:
            return default
        value = self._values.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def optional_boolean(self, key: str) -> bool | None:
        return self.boolean(key) if self.has_value(key) else None

    def string(self, key: str, default: str = _REQUIRED, *, choices: Collection[str] = ()) -> str:
        """A string of valid Unicode, one of `choices` where they are given."""
        if key not in self._values and default is not _REQUIRED:
            return default
        value = self._values.get(key)
        if not is_text(value) or (choices and value not in choices):
            raise self.error(key, f"one of {', '.join(map(repr, choices))}" if choices else "a string of valid Unicode")
        return value

    def optional_string(self, key: str, *, choices: Collection[str] = ()) -> str | None:
        return self.string(key, choices=choices) if self.has_value(key) else None

    def object(self, key: str) -> TypedFields:
        """The fields of the object in this field."""
        value = self._values.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object of named fields")
        return TypedFields(value, self.place, f"{self.prefix}{key}.")

    def optional_object(self, key: str) -> TypedFields:
        """As `object`; without fields where it is absent or null."""
        return self.object(key) if self.has_value(key) else TypedFields({}, self.place, f"{self.prefix}{key}.")

    def overlaid(self, other: TypedFields) -> TypedFields:
        """Both objects' fields, `other`'s where both have one; errors name `other`'s place."""
        return TypedFields({**self._values, **other._values}, other.place, other.prefix)

    def objects(self, key: str) -> list[TypedFields]:
        """The objects in the list in this field."""
        value = self._list(key, "a list of objects", lambda item: isinstance(item, Mapping))
        return [TypedFields(item, self.place, f"{self.prefix}{key}[{index}].") for index, item in enumerate(value)]

    def integers(self, key: str, *, low: int = 0, high: int = MAX_INT64) -> tuple[int, ...]:
        """A list of integers in [low, high]; a numpy array of integers counts as one."""
        wanted = _range_text("a list of integers", low, high, MAX_INT64)
        return tuple(self._list(key, wanted, lambda item: is_integer(item) and low <= item <= high))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        return tuple(
            float(item)
            for item in self._list(key, "a list of finite numbers", lambda item: finite_float(item) is not None)
        )

    def strings(self, key: str) -> tuple[str, ...]:
        return tuple(self._list(key, "a list of strings of valid Unicode", is_text))

    def token_ids(self, key: str, *, high: int = 2**31 - 1) -> tuple[int, ...]:
        """One token id or a list of them, without repetitions; null and an absent field are none."""
        if not self.has_value(key):
            return ()
        value = self._values[key]
        ids = value if isinstance(value, Sequence) else (value,)
        if isinstance(value, str) or not all(is_integer(item) and 0 <= item <= high for item in ids):
            raise self.error(key, f"a token id from 0 to {high}, or a list of them")
        return tuple(dict.fromkeys(ids))

    def _list(self, key: str, wanted: str, is_item: Any) -> list[Any]:
        value: Any = self._values.get(key)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, (list, tuple)) or not all(is_item(item) for item in value):
            raise self.error(key, wanted)
        return list(value)


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def finite_float(value: object) -> float | None:
    """`value` as a float; None where it is no number, or none that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string without unpaired surrogates, which JSON can spell but no encoding can hold."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _range_text(kind: str, low: float, high: float, unbounded: float) -> str:
    if low == -math.inf:
        return kind if high == unbounded else f"{kind} of at most {high}"
    return f"{kind} of at least {low}" if high == unbounded else f"{kind} from {low} to {high}"
