"""Keywords written for vLLM: those that ask for nothing are accepted, those with another name here are renamed, and all
others are refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from lamella.argument_checks import nearest_name, shown
from lamella.errors import LamellaError, UnsupportedArgumentError

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True, slots=True)
class Absent:
    """An argument of vLLM's that lamella does not have.

    instead: what lamella does or has instead. harmless: the values that ask for nothing and are accepted; None: all
    are. A value that is None or empty never asks for anything.
    """

    instead: str
    harmless: tuple[Any, ...] | None = ()

    def asks_for_nothing(self, value: Any) -> bool:
        if value is None or self.harmless is None or (isinstance(value, Sized) and not len(value)):
            return True
        if isinstance(value, (list, tuple)):  # one value per prompt
            return all(self.asks_for_nothing(one) for one in value)
        return any(isinstance(value, bool) == isinstance(one, bool) and _is_equal(value, one) for one in self.harmless)


@dataclass(frozen=True, slots=True)
class Renamed:
    """An argument that has another name here. fields: turns its value into what to give instead, name -> value."""

    fields: Callable[[Any], dict[str, Any]]
    says: str


Foreign = Mapping[str, Absent | Renamed]
ANY = None


def absent(instead: str, **harmless: tuple[Any, ...] | None) -> dict[str, Absent]:
    """Several absent arguments that share the explanation `instead`. harmless: name -> its harmless values."""
    return {name: Absent(instead, values) for name, values in harmless.items()}


def translate(
    owner: str,
    keywords: Mapping[str, Any],
    *,
    known: Iterable[str],
    foreign: Foreign,
    error: type[LamellaError],
    none_is_default: Iterable[str] = (),
) -> dict[str, Any]:
    """`keywords` with vLLM's arguments dropped or renamed. Arguments that are None are dropped where None means the
    default (`none_is_default`).

    owner: the callable's name. known: the names of its own arguments. Raises TypeError for an unknown name, with the
    known one it is like; UnsupportedArgumentError for an argument of vLLM's that asks for what is not here; `error`
    where one thing is given under two names.
    """
    known = frozenset(known)
    own = {name: value for name, value in keywords.items() if name in known}
    for name in none_is_default:
        if name in own and own[name] is None:
            del own[name]
    for name, value in keywords.items():
        if name in known:
            continue
        entry = foreign.get(name)
        if entry is None:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}{nearest_name(name, (*known, *foreign))}"
            )
        if isinstance(entry, Absent):
            if not entry.asks_for_nothing(value):
                raise UnsupportedArgumentError(
                    f"{name}={shown(value)}: {owner} has no such argument, which is vLLM's; {entry.instead}"
                )
            continue
        for own_name, own_value in entry.fields(value).items():
            if own_name in own and own[own_name] != own_value:
                raise error(
                    f"{name}={shown(value)} is {own_name}={shown(own_value)} here, which contradicts "
                    f"{own_name}={shown(own[own_name])}; give one of the two"
                )
            own[own_name] = own_value
    return own


def refuse_foreign(
    owner: str, keywords: Mapping[str, Any], *, known: Iterable[str], foreign: Mapping[str, Absent]
) -> None:
    """For a callable that takes vLLM's other arguments as `**keywords`: see `translate`."""
    translate(owner, keywords, known=known, foreign=foreign, error=UnsupportedArgumentError)


def takes_vllm_keywords(
    foreign: Foreign, error: type[LamellaError], none_is_default: Iterable[str] = ()
) -> Callable[[Class], Class]:
    """Class decorator: the dataclass's `__init__` also takes vLLM's keywords, see `translate`."""

    def decorate(made: Class) -> Class:
        build = made.__init__  # type: ignore[misc]
        known = [field.name for field in dataclasses.fields(made)]
        own = frozenset(known)

        @functools.wraps(build)
        def __init__(self: Any, *values: Any, **keywords: Any) -> None:  # noqa: N807
            if not own.issuperset(keywords) or any(keywords.get(name, name) is None for name in none_is_default):
                keywords = translate(
                    made.__name__, keywords, known=known, foreign=foreign, error=error, none_is_default=none_is_default
                )
            build(self, *values, **keywords)

        made.__init__ = __init__  # type: ignore[misc]
        return made

    return decorate


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:  # comparing may raise: arrays have no single truth value, and types may bring code of their own
        return False
