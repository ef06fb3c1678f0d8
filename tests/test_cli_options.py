from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from lamella.cli_options import FieldOptions


@dataclass
class Sample:
    """All kinds of fields.

    path: where it is. count: how many,
        over two lines; 3 is usual.
    mode: fast or slow.
    """

    path: str
    count: int = 3
    share: float = 0.5
    enabled: bool = True
    verbose: bool | None = None
    limit: int | None = None
    length: int | str | None = None
    depth: int | Literal["auto"] = "auto"
    budget_bytes: int | None = None
    mode: Literal["fast", "slow"] = "fast"
    name: str | None = None
    words: Sequence[str] = ()
    ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    hidden: object = None


OPTIONS = FieldOptions(Sample, renamed={"name": "other_name"}, omitted=["hidden"])


@click.command()
@OPTIONS
@click.pass_context
def command(ctx, **_):
    ctx.obj.update(OPTIONS.given(ctx))


def given(*arguments):
    values = {}
    result = CliRunner().invoke(command, ["--path", "p", *arguments], obj=values)
    assert result.exit_code == 0, result.output
    assert values.pop("path") == "p"
    return values


def test_flags_not_given_are_not_reported():
    assert given() == {}


def test_a_value_equal_to_the_default_is_reported():
    assert given("--count", "3") == {"count": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--count", "-4"], {"count": -4}),
        (["--share", "0.25"], {"share": 0.25}),
        (["--share", "1"], {"share": 1.0}),
        (["--enabled"], {"enabled": True}),
        (["--no-enabled"], {"enabled": False}),
        (["--no-verbose"], {"verbose": False}),
        (["--limit", "9"], {"limit": 9}),
        (["--limit", "none"], {"limit": None}),
        (["--length", "100"], {"length": 100}),
        (["--length", "auto"], {"length": "auto"}),
        (["--depth", "auto"], {"depth": "auto"}),
        (["--depth", "2"], {"depth": 2}),
        (["--budget-bytes", "1234"], {"budget_bytes": 1234}),
        (["--budget-bytes", "2GiB"], {"budget_bytes": 2147483648}),
        (["--budget-bytes", "1.5 MB"], {"budget_bytes": 1500000}),
        (["--budget-bytes", "64KiB"], {"budget_bytes": 65536}),
        (["--mode", "slow"], {"mode": "slow"}),
        (["--other-name", "x"], {"name": "x"}),
        (["--words", "a", "--words", "b"], {"words": ["a", "b"]}),
        (["--ids", "4", "--ids", "5"], {"ids": [4, 5]}),
        (["--extra", '{"a": [1]}'], {"extra": {"a": [1]}}),
    ],
)
def test_values(arguments, expected):
    actual = given(*arguments)
    assert actual == expected
    assert {name: type(value) for name, value in actual.items()} == {n: type(v) for n, v in expected.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "x"], "'x' is not a whole number"),
        (["--count", "none"], "'none' is not a whole number"),
        (["--depth", "deep"], "'deep' is not a whole number or auto"),
        (["--budget-bytes", "2GG"], "'2GG' is not a size"),
        (["--budget-bytes", "1.5"], "'1.5' is not a size"),
        (["--extra", "{"], "'{' is not JSON"),
        (["--mode", "medium"], "'fast', 'slow'"),
        (["--hidden", "1"], "No such option"),
    ],
)
def test_bad_values_are_usage_errors(arguments, message):
    result = CliRunner().invoke(command, ["--path", "p", *arguments], obj={})
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_field_without_a_default_is_required():
    result = CliRunner().invoke(command, [], obj={})
    assert result.exit_code == 2
    assert "Missing option '--path'" in result.stderr


def test_help_comes_from_the_docstring():
    texts = {parameter.name: parameter.help for parameter in command.params}
    assert texts["path"] == "where it is"
    assert texts["count"] == "how many, over two lines; 3 is usual  [default: 3]"
    assert texts["mode"] == "fast or slow  [default: fast]"
    assert texts["limit"] == ""


def test_a_type_that_no_flag_can_express_is_refused():
    with pytest.raises(TypeError, match="field 'hidden'"):
        FieldOptions(Sample)
