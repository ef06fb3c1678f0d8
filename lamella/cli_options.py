"""Command-line flags made from a dataclass, so that a new field is a new flag; and help in groups."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from lamella.errors import LamellaError

Command = TypeVar("Command", bound=Callable[..., Any])

_SEQUENCES = (list, tuple, Sequence)
_MAPPINGS = (dict, Mapping)
_BYTES_PER_SUFFIX = {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


class GroupedOption(click.Option):
    """An option that `GroupedCommand` lists under the heading `group`."""

    def __init__(self, *arguments: Any, group: str | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.group = group


class GroupedCommand(click.Command):
    """Lists its options under headings, in the order in which these first appear; and shows errors that lamella raises
    on purpose with the flags that were typed, not the names that Python knows them by.

    flags: Python's name -> flag.
    """

    def __init__(self, *arguments: Any, flags: Mapping[str, str] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.flags = dict(flags or {})

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LamellaError as error:
            raise Refusal(" ".join(with_flags(str(error), self.flags).split())) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", None) or "Other options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Refusal(click.ClickException):
    """Shown as one line, without a traceback."""

    exit_code = 2


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """`text` with flags in the place of Python's names: a name of one word is replaced only where a value follows,
    since it may be an ordinary word."""
    names = sorted(flags, key=len, reverse=True)
    patterns = [re.escape(name) + ("" if "_" in name else "(?==)") for name in names]
    if not names:
        return text
    text = re.sub(rf"(?<![\w-])({'|'.join(patterns)})(?!\w)", lambda found: flags[found[1]], text)
    return re.sub(r"--([a-z][a-z-]*)=(True|False)\b", lambda found: _switch(found[1], found[2]), text)


def _switch(flag: str, value: str) -> str:
    return f"--{flag}" if value == "True" else f"--no-{flag}"


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
        if self.as_bytes and (size := re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]i?B)", value, re.ASCII)):
            return int(float(size[1]) * _BYTES_PER_SUFFIX[size[2]])
        try:
            number_of = self.kind(value)
            if self.kind is int or math.isfinite(number_of):
                return number_of
        except ValueError:
            if self.words is None or value in self.words:
                return value
        number = "a whole number" if self.kind is int else "a number"
        expected = 'a size such as 1073741824, "1GiB" or "1GB"' if self.as_bytes else number
        self.fail(f"{value!r} is not {' or '.join([expected, *(self.words or ())])}", param, ctx)


class Json(click.ParamType):
    """A JSON value, for fields that hold a mapping or a list of lists."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


class FieldOptions:
    """The flags of one dataclass: `@options` adds them to a command, `given(ctx)` reads them back.

    A field `max_num_seqs: int` becomes `--max-num-seqs INTEGER`, a bool `--flag/--no-flag`, a Literal a
    choice, a list a repeatable flag, a mapping or a list of lists JSON, and an `int` called `*_bytes` takes
    "2GiB". Help comes from `name: text` in the class docstring. `renamed` maps field names to other flag names, where
    two dataclasses on one command have a field in common; `omitted` fields get no flag. `groups`: heading ->
    fields, in the order in which help lists them. `shown_defaults`: where the command's default is another.
    """

    def __init__(
        self,
        dataclass_type: type,
        *,
        renamed: Mapping[str, str] | None = None,
        omitted: Collection[str] = (),
        groups: Mapping[str, Sequence[str]] | None = None,
        shown_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._renamed = dict(renamed or {})
        group_of = {name: title for title, names in (groups or {}).items() for name in names}
        place_of = {name: place for place, name in enumerate(group_of)}
        hints = typing.get_type_hints(dataclass_type)
        texts = _field_help(dataclass_type)
        self._fields = [f for f in dataclasses.fields(dataclass_type) if f.init and f.name not in omitted]
        self._fields.sort(key=lambda field: place_of.get(field.name, len(place_of)))
        self.flags = {field.name: "--" + self._flag_name(field.name).replace("_", "-") for field in self._fields}
        self._decorators = [
            _option(
                field,
                hints[field.name],
                self._flag_name(field.name),
                with_flags(texts.get(field.name, ""), self.flags),
                shown_default=(shown_defaults or {}).get(field.name, field.default),
                group=group_of.get(field.name),
            )
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


def _option(
    field: dataclasses.Field[Any], hint: Any, flag_name: str, text: str, *, shown_default: Any, group: str | None
) -> Callable[[Command], Command]:
    kebab = flag_name.replace("_", "-")
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    kinds, optional = _alternatives(hint)
    is_json = any(_is_nested(kind) for kind in kinds)
    if any(typing.get_origin(kind) in _SEQUENCES for kind in kinds) and not is_json:
        text = f"{text}  [may be repeated]".strip()
    if shown_default not in (dataclasses.MISSING, None, ()):
        if kinds == [bool]:
            shown_default = "yes" if shown_default else "no"
        text = f"{text}  [default: {shown_default}]".strip()
    grouped: dict[str, Any] = {"cls": GroupedOption, "group": group}
    declarations = [f"--{kebab}", flag_name]
    if kinds == [bool]:
        declarations = [f"--{kebab}/--no-{kebab}", flag_name]
        return click.option(*declarations, required=required, help=text, **grouped)
    for kind in kinds:
        if typing.get_origin(kind) in _SEQUENCES and not is_json:
            element = typing.get_args(kind)[0]
            return click.option(*declarations, type=element, multiple=True, required=required, help=text, **grouped)
    param_type = Json() if is_json else _param_type(field.name, kinds, optional)
    return click.option(*declarations, type=param_type, required=required, help=text, **grouped)


def _is_nested(kind: Any) -> bool:
    """A mapping, or a sequence of sequences: what only JSON can say."""
    if kind in _MAPPINGS or typing.get_origin(kind) in _MAPPINGS:
        return True
    is_sequence = typing.get_origin(kind) in _SEQUENCES
    return is_sequence and typing.get_origin(typing.get_args(kind)[0]) in _SEQUENCES


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
    raise TypeError(f"field {name!r} has the type {kinds}, which no flag can express; use a number, string or mapping")


def _alternatives(hint: Any) -> tuple[list[Any], bool]:
    """The members of a union without None, and whether None was one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = list(typing.get_args(hint)) if is_union else [hint]
    return [member for member in members if member is not types.NoneType], types.NoneType in members


def _field_help(dataclass_type: type) -> dict[str, str]:
    """The `name: text` entries of a dataclass's docstring, of each its first sentence: further ones are for readers of
    the code. A text runs to the next entry or empty line."""
    names = "|".join(re.escape(field.name) for field in dataclasses.fields(dataclass_type))
    texts = {}
    for paragraph in (inspect.getdoc(dataclass_type) or "").split("\n\n"):
        # re.split with one group gives [before, name, text, name, text, ...]
        parts = re.split(rf"\b({names}): ", " ".join(paragraph.split()))
        # What Python writes as None is a flag that is not given.
        texts.update(
            {
                name: re.sub(r"\bNone(?=[:,)])", "not given", re.split(r"\.\s+(?=[A-Z\"])", text)[0].strip(" .;"))
                for name, text in zip(parts[1::2], parts[2::2], strict=True)
            }
        )
    return texts
