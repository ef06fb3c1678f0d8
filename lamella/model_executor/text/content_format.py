"""Whether a chat template takes a message's content in parts, or as one text."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes


def takes_content_parts(template: nodes.Template) -> bool:
    """Whether the template goes through the parts of some message's content.

    It does when it loops over a content or looks into one of its parts, also under another name: a variable that was
    set to it, or a macro's parameter that it was passed as.
    """
    names = _content_names(template)
    if any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For)):
        return True
    accesses: list[Any] = list(template.find_all((nodes.Getitem, nodes.Getattr)))
    return any(_is_part(access.node, names) for access in accesses)


def _is_part(node: nodes.Node, names: set[str]) -> bool:
    """Whether the node is content[number]. A template that looks into that takes it for a part, since a character has
    no fields."""
    if not isinstance(node, nodes.Getitem) or not isinstance(node.arg, nodes.Const):
        return False
    return isinstance(node.arg.value, int) and _is_content(node.node, names)


def _content_names(template: nodes.Template) -> set[str]:
    """Variables and parameters that may hold a message's content."""
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        before = len(names)
        for assignment in template.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
                names.add(assignment.target.name)
        for call in template.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name not in macros:
                continue
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            passed = [*zip(parameters, call.args, strict=False), *((given.key, given.value) for given in call.kwargs)]
            names.update(name for name, value in passed if name in parameters and _is_content(value, names))
        if len(names) == before:
            return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether the value may be a message's content, or a selection from it."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return node.name in _SELECTIONS and node.node is not None and _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return any(_is_content(value, names) for value in (node.expr1, node.expr2) if value is not None)
    if isinstance(node, (nodes.Or, nodes.And)):
        return _is_content(node.left, names) or _is_content(node.right, names)
    if isinstance(node, nodes.Call):  # message.get("content")
        return (
            isinstance(node.node, nodes.Getattr)
            and node.node.attr == "get"
            and bool(node.args)
            and isinstance(node.args[0], nodes.Const)
            and node.args[0].value == "content"
        )
    return False


_SELECTIONS = frozenset(["d", "default", "list", "reject", "rejectattr", "reverse", "select", "selectattr", "sort"])
