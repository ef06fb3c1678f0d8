"""What operators, methods and filters of a chat template cost, told before they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lamella.model_executor.text.template_budget import (
    ITEM_UNITS,
    MAX_INT_BITS,
    TemplateBudget,
    TemplateCostError,
)

_DIGITS = re.compile(r"\d+")
# Written as text, a character in a container may take ten ("\U0001f600"), and JSON's escapes take twelve.
_TEXT_FACTOR = 12
_PLAIN_TYPES = (int, float, bool, type(None))


def spend_operator(budget: TemplateBudget, operator: str, left: Any, right: Any) -> None:
    """Pay for `left operator right`."""
    if isinstance(left, int) and isinstance(right, int):
        _spend_integers(budget, operator, left, right)
    elif operator == "+":
        budget.spend(_length_units(left) + _length_units(right))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(count, int):
                budget.spend(_length_units(sequence) * max(0, count))
    elif operator == "%" and isinstance(left, (str, bytes)):
        spend_percent_format(budget, left, right)


def spend_percent_format(budget: TemplateBudget, pattern: str | bytes, values: Any) -> None:
    """Pay for `pattern % values`: each conversion may write all the values, and be as wide as it says."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    items = values if isinstance(values, tuple) else (values,)
    widths = sum(abs(item) for item in items if isinstance(item, int)) if "*" in text else 0
    budget.spend(len(text) + widths * text.count("*") + number_sum(text))
    budget.spend_size(values, text.count("%") * _TEXT_FACTOR)


def spend_method(budget: TemplateBudget, owner: Any, name: str, arguments: tuple[Any, ...]) -> None:
    """Pay for the call of a built-in method."""
    if isinstance(owner, (str, bytes)):
        budget.spend(len(owner) + sum(abs(value) for value in arguments if isinstance(value, int)))
        _spend_text_method(budget, owner, name, arguments)
    elif isinstance(owner, int):
        budget.spend(1 + owner.bit_length() + sum(abs(value) for value in arguments if isinstance(value, int)))
    elif isinstance(owner, (list, tuple)):
        budget.spend_size(owner)
        budget.spend_size(arguments)
    elif isinstance(owner, dict):
        budget.spend(ITEM_UNITS * len(owner) if name in ("copy", "fromkeys") else 1)
        budget.spend_size(arguments)
    else:
        budget.spend_size(owner)
        budget.spend_size(arguments)


def _spend_text_method(budget: TemplateBudget, text: Any, name: str, arguments: tuple[Any, ...]) -> None:
    first: Any = arguments[0] if arguments else None
    if name == "expandtabs":
        width = first if isinstance(first, int) else 8
        num_tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
        budget.spend(num_tabs * max(0, width))
    elif name == "replace" and len(arguments) > 1:
        spend_replace(budget, text, first, arguments[1])
    elif name == "join":
        spend_join(budget, first, text)
    elif name in ("split", "rsplit", "splitlines"):
        has_separator = isinstance(first, type(text)) and first
        num_parts: int = text.count(first) if has_separator else len(text) // 2
        budget.spend(ITEM_UNITS * (num_parts + 1))
    elif name == "striptags":  # of text that is marked as HTML
        budget.spend(len(text) ** 2 // 256)
    elif name == "translate" and isinstance(first, Mapping):
        widest = max((len(value) for value in first.values() if isinstance(value, str)), default=1)
        budget.spend(len(text) * widest)


def spend_replace(budget: TemplateBudget, text: Any, old: Any, new: Any) -> None:
    kind: type = str if isinstance(text, str) else bytes
    if all(isinstance(item, kind) for item in (text, old, new)):
        budget.spend(len(text) + text.count(old) * len(new))


def spend_join(budget: TemplateBudget, items: Any, separator: Any) -> None:
    """Pay for `separator.join(items)`; items that can be gone through once only must have been made a list."""
    if isinstance(items, (str, bytes)):
        budget.spend(len(items) * (1 + _length_units(separator)))
    elif isinstance(items, (list, tuple, set, frozenset, Mapping)):
        budget.spend_size(items, 1 if all(isinstance(item, str) for item in items) else _TEXT_FACTOR)
        budget.spend(len(items) * (_length_units(separator) + ITEM_UNITS))


def spend_format_field(budget: TemplateBudget, value: Any, spec: str) -> None:
    """Pay for one field of `str.format`."""
    budget.spend(len(spec) + number_sum(spec))
    spend_text_of(budget, value)


def spend_text_of(budget: TemplateBudget, value: Any) -> None:
    """Pay for writing `value` as text."""
    budget.spend_size(value, 1 if isinstance(value, str) else _TEXT_FACTOR)


def spend_search(budget: TemplateBudget, needle: Any, place: Any) -> None:
    """Pay for `needle in place`."""
    if isinstance(place, (str, range)):
        budget.spend(len(place) if isinstance(place, str) else ITEM_UNITS * len(place))
    elif isinstance(place, (list, tuple)):
        # Comparing two texts of different length takes one look.
        budget.spend(ITEM_UNITS * len(place))
        for item in place:
            if not isinstance(item, (str, *_PLAIN_TYPES)):
                budget.spend_size(item)
    budget.spend_size(needle)


def spend_comparison(budget: TemplateBudget, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget.spend(min(len(left), len(right)))
    else:
        budget.spend_size(left)
        budget.spend_size(right)


def number_sum(text: str) -> int:
    """The sum of the numbers written in a format: its widths and precisions are among them."""
    numbers = [found.group() for found in _DIGITS.finditer(text)]
    if any(len(number) > 9 for number in numbers):
        raise TemplateCostError("it formats a text to a width of a billion characters or more")
    return sum(map(int, numbers))


# Filters. Each function gets the value and the arguments, all by position as the filter declares them.


def spend_filter(budget: TemplateBudget, name: str, value: Any, arguments: Mapping[str, Any]) -> None:
    """Pay for `value | name`. `arguments`: every argument by its name, defaults included."""
    special = _FILTERS.get(name)
    if special is not None:
        special(budget, value, arguments)
    elif name in _SHALLOW:
        _list_filter(budget, value, arguments)
    else:
        spend_text_of(budget, value)
        for argument in arguments.values():
            spend_text_of(budget, argument)


_CHEAP = ("attr", "count", "d", "default", "first", "items", "last", "length", "random", "safe")
_SHALLOW = frozenset(["map", "reject", "rejectattr", "reverse", "select", "selectattr"])


def _nothing(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    """The filter costs nothing beyond the price of a call."""


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _list_filter(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    if hasattr(value, "__len__"):
        budget.spend(ITEM_UNITS * len(value))


def _center(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    spend_text_of(budget, value)
    budget.spend(_number(arguments.get("width")))


def _indent(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    width = arguments.get("width")
    num_lines = len(value.splitlines()) + 1 if isinstance(value, str) else 1
    budget.spend(_length_units(value) + num_lines * (len(width) if isinstance(width, str) else _number(width)))


def _wordwrap(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    _slow_text(budget, value, arguments)
    wrap = arguments.get("wrapstring")
    budget.spend(_length_units(value) * (_length_units(wrap) + ITEM_UNITS))


def _slow_text(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    """Filters whose time may grow with the square of the text's length."""
    length = _length_units(value)
    budget.spend(length * _TEXT_FACTOR + length * length // 256)
    for argument in arguments.values():
        budget.spend_size(argument, _TEXT_FACTOR)


def _replace(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    texts = []
    for item in (value, arguments.get("old"), arguments.get("new")):
        spend_text_of(budget, item)
        texts.append(str(item))  # as the filter does
    spend_replace(budget, *texts)


def _join(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    spend_join(budget, value, arguments.get("d"))


def _format(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    spend_text_of(budget, value)
    values = arguments.get("kwargs") or arguments.get("args")
    if isinstance(value, str):
        spend_percent_format(budget, value, values)


def _batch(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    _list_filter(budget, value, arguments)
    budget.spend(ITEM_UNITS * (_number(arguments.get("linecount")) + _number(arguments.get("slices"))))


def _round(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    budget.spend(_number(arguments.get("precision")) ** 2 + 1)


def _tojson(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    indent = arguments.get("indent")
    width = len(indent) if isinstance(indent, str) else _number(indent)
    separators = arguments.get("separators")
    extra = sum(map(_length_units, separators)) if isinstance(separators, (list, tuple)) else 0
    budget.spend_size(value, _TEXT_FACTOR + extra)
    if width:
        pending = [(value, 1)]
        while pending:  # every item stands on a line of its own, behind the indent of its depth
            item, depth = pending.pop()
            children = list(item.values()) if isinstance(item, Mapping) else item
            if isinstance(children, (list, tuple)):
                budget.spend((len(children) + 1) * depth * width)
                pending.extend((child, depth + 1) for child in children)


def _sort(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    budget.spend_size(value, 20)  # as many comparisons per item for a million of them


def _words(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    budget.spend_size(value, ITEM_UNITS // 2)  # each word is found and kept, and may be of one character and a space


def _integer(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    length = _length_units(value)
    budget.spend(length + length * length // 1024)


def _urlencode(budget: TemplateBudget, value: Any, arguments: Mapping[str, Any]) -> None:
    budget.spend_size(value, _TEXT_FACTOR)


_FILTERS: dict[str, Callable[[TemplateBudget, Any, Mapping[str, Any]], None]] = {
    **dict.fromkeys(_CHEAP, _nothing),
    **dict.fromkeys(("sort", "dictsort", "groupby", "unique", "min", "max"), _sort),
    **dict.fromkeys(("striptags", "urlize", "xmlattr"), _slow_text),
    **dict.fromkeys(("title", "wordcount"), _words),
    "batch": _batch,
    "slice": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "int": _integer,
    "join": _join,
    "list": _list_filter,
    "replace": _replace,
    "round": _round,
    "tojson": _tojson,
    "urlencode": _urlencode,
    "wordwrap": _wordwrap,
}


def _length_units(value: Any) -> int:
    """Units to copy `value` without what its items hold."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return ITEM_UNITS * (len(value) + 1)
    return 1


def refuse_long_integer(value: Any) -> None:
    """Calculating with it could take long, and nothing else in the template would show that."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateCostError(f"it calculates with integers of more than {MAX_INT_BITS} bits")


def _spend_integers(budget: TemplateBudget, operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "**":
        bits = max(bits, left.bit_length() * max(0, right))
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MAX_INT_BITS:
        raise TemplateCostError(f"it calculates with integers of more than {MAX_INT_BITS} bits")
    budget.spend(1 + bits // 16)
