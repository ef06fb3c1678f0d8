"""Command-line flags made from a dataclass, so that a new field is a new flag."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_SEQUENCES = (list, tuple, Sequence)
_MAPPINGS = (dict, Mapping)
_BYTES_PER_SUFFIX = {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


class Number(click.ParamType):
    """A number (`kind` int or float), or one of `words`; any word where `words` is None.

    `as_bytes` also takes a size with a unit: "2GiB", "1.5GB", "512MiB". "none" gives None where `optional`.
    """

    def __init__(self, kind: type, *, words: tuple[str, ...] | None, optional: bool, as_bytes: bool) -> None:
        self.kind, self.words, self.optional, self.as_bytes = kind, words, optional, as_bytes
        self.name = "bytes" if as_bytes else kind.__name__

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if self.optional and value.lower() == "none":
            return None
        if self.as_bytes and (size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", value)):
            return int(float(size[1]) * _BYTES_PER_SUFFIX[size[2]])
        try:
            return self.kind(value)
        except ValueError:
            if self.words is None or value in self.words:
                return value
        number = "a whole number" if self.kind is int else "a number"
        expected = 'a size such as 1073741824, "1GiB" or "1GB"' if self.as_bytes else number
        self.fail(f"{value!r} is not {' or '.join([expected, *(self.words or ())])}", param, ctx)


class Json(click.ParamType):
    """A JSON value, for fields that hold a mapping."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


class FieldOptions:
    """The flags of one dataclass: `@options` adds them to a command, `given(ctx)` reads them back.

    A field `max_num_seqs: int` becomes `--max-num-seqs INTEGER`, a bool `--flag/--no-flag`, a Literal a
    choice, a list a repeatable flag, a mapping JSON, and an `int` called `*_bytes` takes "2GiB". Help
    comes from `name: text` in the class docstring. `renamed` maps field names to other flag names, where
    two dataclasses on one command have a field in common; `omitted` fields get no flag.
    """

    def __init__(
        self, dataclass_type: type, *, renamed: Mapping[str, str] | None = None, omitted: Collection[str] = ()
    ) -> None:
        self._renamed = dict(renamed or {})
        hints = typing.get_type_hints(dataclass_type)
        texts = _field_help(dataclass_type)
        self._fields = [f for f in dataclasses.fields(dataclass_type) if f.init and f.name not in omitted]
        self._decorators = [
            _option(field, hints[field.name], self._flag_name(field.name), texts.get(field.name, ""))
            for field in self._fields
        ]

    def __call__(self, command: Command) -> Command:
        for decorate in reversed(self._decorators):  # the last one applied is listed first
            command = decorate(command)
        return command

    def given(self, ctx: click.Context) -> dict[str, Any]:
        """Field name -> value, for the flags given on the command line and no others."""
        names = {field.name: self._flag_name(field.name) for field in self._fields}
        values = {
            name: ctx.params[flag]
            for name, flag in names.items()
            if ctx.get_parameter_source(flag) is click.core.ParameterSource.COMMANDLINE
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _flag_name(self, field_name: str) -> str:
        return self._renamed.get(field_name, field_name)


def _option(field: dataclasses.Field[Any], hint: Any, flag_name: str, text: str) -> Callable[[Command], Command]:
    kebab = flag_name.replace("_", "-")
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if field.default not in (dataclasses.MISSING, None, ()):
        text = f"{text}  [default: {field.default}]".strip()
    kinds, optional = _alternatives(hint)
    declarations = [f"--{kebab}", flag_name]
    if kinds == [bool]:
        declarations = [f"--{kebab}/--no-{kebab}", flag_name]
        return click.option(*declarations, required=required, help=text)
    for kind in kinds:
        if typing.get_origin(kind) in _SEQUENCES:
            element = typing.get_args(kind)[0]
            return click.option(*declarations, type=element, multiple=True, required=required, help=text)
    param_type = _param_type(field.name, kinds, optional)
    return click.option(*declarations, type=param_type, required=required, help=text)


def _param_type(name: str, kinds: list[Any], optional: bool) -> click.ParamType:
    words = tuple(word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind))
    for number in (float, int):
        if number in kinds:
            any_word = str in kinds
            as_bytes = name.endswith("_bytes")
            return Number(number, words=None if any_word else words, optional=optional, as_bytes=as_bytes)
    if str in kinds:
        return click.STRING
    if words:
        return click.Choice(words)
    if any(kind in _MAPPINGS or typing.get_origin(kind) in _MAPPINGS for kind in kinds):
        return Json()
    raise TypeError(f"field {name!r} has the type {kinds}, which no flag can express; use a number, string or mapping")


def _alternatives(hint: Any) -> tuple[list[Any], bool]:
    """The members of a union without None, and whether None was one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = list(typing.get_args(hint)) if is_union else [hint]
    return [member for member in members if member is not types.NoneType], types.NoneType in members


def _field_help(dataclass_type: type) -> dict[str, str]:
    """`name: text` entries of a dataclass's docstring; a text runs to the next entry or empty line."""
    names = "|".join(re.escape(field.name) for field in dataclasses.fields(dataclass_type))
    texts = {}
    for paragraph in (inspect.getdoc(dataclass_type) or "").split("\n\n"):
        # re.split with one group gives [before, name, text, name, text, ...]
        parts = re.split(rf"\b({names}): ", " ".join(paragraph.split()))
        texts.update({name: text.strip(" .;") for name, text in zip(parts[1::2], parts[2::2], strict=True)})
    return texts
