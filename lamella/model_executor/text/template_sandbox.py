"""Chat templates compiled so that every step they take is paid from a budget.

Jinja's own sandbox keeps templates away from Python's internals, not from memory and time. Here the compiled code calls
back into the environment wherever work depends on data: loops, calls, operators, comparisons, slices, containers, and
everything that is written. Templates render what they render in transformers, whose additions to Jinja
(`raise_exception`, `strftime_now`, a `tojson` without HTML escapes, the `generation` tag) are here as well.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, Undefined, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from lamella.model_executor.text import template_costs
from lamella.model_executor.text.template_budget import CALL_UNITS, ITEM_UNITS, STEP_UNITS, TemplateBudget

_BUILT_IN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_COMPARING_TESTS = frozenset(
    ["==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"]
)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment for chat templates. `render` may be called from several threads."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    intercepted_unops = frozenset(("+", "-"))

    def __init__(self) -> None:
        # Constant expressions are not calculated ahead, for that would be outside any budget.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[_GenerationTag, loopcontrols],
        )
        self.code_generator_class = _MeteredCode
        self._thread = threading.local()
        # Filters that give random text are of no use for prompts.
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=self._strftime_now,
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: self._metered_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._metered_test(name, function) for name, function in self.tests.items()}

    def render(self, template: jinja2.Template, budget: TemplateBudget, variables: Mapping[str, Any]) -> str:
        """The text of `template`, at the expense of `budget`. Raises whatever the template raises."""
        self._thread.budget = budget
        try:
            return "".join(template.generate(dict(variables)))
        finally:
            del self._thread.budget

    @property
    def budget(self) -> TemplateBudget:
        budget: TemplateBudget = self._thread.budget
        return budget

    # What compiled templates call.

    def tick(self, num_chars: int) -> bool:
        """Pay for one round of a loop or one run of a macro that writes `num_chars` of the template's own text."""
        self.budget.spend(STEP_UNITS + num_chars)
        return True

    def built(self, value: Any) -> Any:
        """Pay for `value`, a container that was just made, and return it."""
        self.budget.spend_size(value)
        return value

    def cut(self, value: Any) -> Any:
        """Pay for `value`, a slice that was just made, and return it."""
        self.budget.spend(len(value) * (1 if isinstance(value, (str, bytes)) else ITEM_UNITS))
        return value

    def compared(self, value: Any) -> Any:
        """`value` for a comparison; a text is compared no further than the shorter of two."""
        if not isinstance(value, str):
            self.budget.spend_size(value)
        elif len(value) > STEP_UNITS:
            self.budget.spend(len(value))
        return value

    def joined(self, context: Context, parts: Iterable[Any]) -> str:
        """The parts of `a ~ b ~ c` as one text."""
        parts = list(parts)
        for part in parts:
            template_costs.spend_text_of(self.budget, part)
        return markup_join(parts) if context.eval_ctx.autoescape else str_join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        template_costs.spend_operator(self.budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        self.budget.spend_size(arg)
        return super().call_unop(context, operator, arg)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (str, int)):
            self.budget.spend_size(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        self, function = __self, __obj
        self.budget.spend(CALL_UNITS)
        if isinstance(function, _BUILT_IN_METHODS) or isinstance(getattr(function, "__self__", None), str):
            if function.__name__ == "join" and args and not hasattr(args[0], "__len__"):
                args = (list(args[0]), *args[1:])
            template_costs.spend_method(self.budget, function.__self__, function.__name__, (*args, *kwargs.values()))
        result = super().call(__context, function, *args, **kwargs)
        if isinstance(result, (list, tuple, dict)):
            self.budget.spend_size(result)
        elif isinstance(result, (str, bytes)):
            self.budget.spend(len(result))
        template_costs.refuse_long_integer(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, types.BuiltinMethodType | types.MethodType) or not isinstance(value.__self__, str):
            return None
        if value.__name__ not in ("format", "format_map"):
            return None
        pattern, is_map = value.__self__, value.__name__ == "format_map"
        escape = pattern.escape if isinstance(pattern, Markup) else None
        formatter = _EscapeFormatter(self, escape=escape) if escape is not None else _Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if is_map:
                if kwargs or len(args) != 1:
                    raise TypeError("format_map takes one mapping")
                (kwargs,), args = args, ()
            self.budget.spend(len(pattern))
            return type(pattern)(formatter.vformat(pattern, args, kwargs))

        return functools.update_wrapper(formatted, value)

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Jinja passes some filters a context before the value.
        num_leading = 0 if getattr(function, "jinja_pass_arg", None) is None else 1
        parameters = _parameters(function)
        defaults = _named(parameters, [], {})

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(CALL_UNITS)
            given = list(args)
            leading, value, rest = given[:num_leading], given[num_leading], given[num_leading + 1 :]
            if name in ("join", "sum") and not hasattr(value, "__len__"):
                value = list(value)
            named = _named(parameters, rest, kwargs) if rest or kwargs else defaults
            template_costs.spend_filter(self.budget, name, value, named)
            if name == "sum":
                self._spend_sum(value, rest, kwargs)
            return self._received(function(*leading, value, *rest, **kwargs))

        return metered

    def _received(self, result: Any) -> Any:
        """Pay for what a filter returned and give it back. If that is a generator, its items are paid for when they are
        made."""
        if isinstance(result, (str, bytes)):
            self.budget.spend(len(result))
        elif isinstance(result, (list, tuple, dict)):
            self.budget.spend(ITEM_UNITS * len(result))
        elif isinstance(result, int):
            template_costs.refuse_long_integer(result)
        elif isinstance(result, Iterator):
            return self._paid_items(result)
        return result

    def _paid_items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.spend(ITEM_UNITS)
            yield item

    def _spend_sum(self, value: Any, rest: list[Any], kwargs: Mapping[str, Any]) -> None:
        start = kwargs.get("start", rest[1] if len(rest) > 1 else 0)
        if not isinstance(start, (int, float)):
            # Each addition of two lists copies all that has been added so far.
            self.budget.spend_size(value, 1 + len(value))

    def _metered_test(self, name: str, function: Any) -> Callable[..., Any]:
        if name == "in":
            spend: Callable[..., None] = template_costs.spend_search
        elif name in _COMPARING_TESTS:
            spend = template_costs.spend_comparison
        elif name in ("lower", "upper"):
            spend = template_costs.spend_text_of
        else:
            return function

        @functools.wraps(function)
        def metered(*args: Any) -> Any:
            spend(self.budget, *args)
            return function(*args)

        return metered

    def _strftime_now(self, format: str) -> str:
        self.budget.spend(256 * len(format))
        return datetime.now().strftime(format)


class _MeteredCode(CodeGenerator):
    """Jinja's code generator, with calls into the sandbox where work depends on data."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.body = [_tick_statement(node.body), *node.body]
        if node.test is not None:
            # A round that the loop's condition skips takes time as well.
            node.test = nodes.And(nodes.EnvironmentAttribute("tick(0)"), node.test)
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:  # noqa: N802
        node.body = [_tick_statement(node.body), *node.body]
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:  # noqa: N802
        node.body = [_tick_statement(node.body), *node.body]
        super().visit_CallBlock(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._wrapped("compared", node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {_OPERATORS[node.op]} ")
        self._wrapped("compared", node.expr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.cut(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self.write("environment.built(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.built({")
        for pair in node.items:
            # To find a key's place the whole key is read.
            self._wrapped("compared", pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.built(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def _wrapped(self, method: str, node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{method}(")
        self.visit(node, frame)
        self.write(")")


_OPERATORS = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


def _tick_statement(body: list[nodes.Node]) -> nodes.ExprStmt:
    """The statement that pays for a run of `body`. An EnvironmentAttribute becomes an attribute of the environment in
    the compiled code."""
    num_chars = sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))
    num_chars += sum(len(node.data) for node in body if isinstance(node, nodes.TemplateData))
    return nodes.ExprStmt(nodes.EnvironmentAttribute(f"tick({num_chars})"))


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote; a prompt contains it like any other text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller: Callable[[], str]) -> str:
        return caller()


class _MeteredFields:
    """What both formatters pay for."""

    _env: Any

    def format_field(self, value: Any, format_spec: str) -> Any:
        template_costs.spend_format_field(self._env.budget, value, format_spec)
        return super().format_field(value, format_spec)  # type: ignore[misc]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            template_costs.spend_text_of(self._env.budget, value)
        return super().convert_field(value, conversion)  # type: ignore[misc]


class _Formatter(_MeteredFields, SandboxedFormatter):
    pass


class _EscapeFormatter(_MeteredFields, SandboxedEscapeFormatter):
    pass


class _TemplateDict:
    """`dict` in templates: it makes dicts and has no other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` in templates, without names that lead into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name an attribute "self"
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot have the attribute {name!r}: names that begin with an underscore are unsafe"
        )


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """What is written for `value`; the compiled code makes it text."""
    budget = context.environment.budget  # type: ignore[attr-defined]
    if isinstance(value, str):
        budget.spend(len(value))
    elif not isinstance(value, (Undefined, type(None))):
        template_costs.spend_text_of(budget, value)
    return value


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _parameters(function: Callable[..., Any]) -> inspect.Signature | None:
    """What a filter takes after the value."""
    function = inspect.unwrap(function)
    num_before = 1 if getattr(function, "jinja_pass_arg", None) is None else 2
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function without a signature
        return None
    return signature.replace(parameters=list(signature.parameters.values())[num_before:])


def _named(parameters: inspect.Signature | None, rest: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a filter by name, defaults included."""
    try:
        bound = parameters.bind(*rest, **kwargs) if parameters is not None else None
    except TypeError:  # the call of the filter will raise it
        bound = None
    if bound is None:
        return {str(index): argument for index, argument in enumerate(rest)} | dict(kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
