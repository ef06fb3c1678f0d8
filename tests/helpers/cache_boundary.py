"""Who touches what of a block manager, found in the source: nobody is to go behind its contract.

A block manager is known by how it comes: a parameter or variable annotated BlockManager, one that is called, or an
attribute that is named, `manager` or `_manager`, and whatever one of these is assigned to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

from lamella.kv_cache.block_manager import BlockManager

NAMES = ("manager", "_manager")
# What is for `invariants`, tests and tools alone.
INSPECTIONS = frozenset({"inspect"})
DATA = frozenset({"layout", "settings"})


class Access(NamedTuple):
    line: int
    attribute: str


def contract() -> frozenset[str]:
    """What others may use of a BlockManager: its public methods, each of which has a docstring, and frozen data."""
    return DATA | {name for name in vars(BlockManager) if not name.startswith("_")}


def accesses(path: Path) -> list[Access]:
    """Every attribute of a block manager that the module reads, writes or calls."""
    return [*_accesses_of(ast.parse(path.read_text(encoding="utf-8")), set(NAMES))]


def _accesses_of(scope: ast.AST, known: set[str]) -> Iterator[Access]:
    """known: names that are block managers where the scope begins."""
    nodes = list(_nodes_of(scope))
    known = set(known)
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        arguments = scope.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        known |= {one.arg for one in every if one is not None and _names_the_class(one.annotation)}
    for _ in range(2):  # a name may be given to a second one before
        for node in nodes:
            for target, value in _assignments(node):
                if isinstance(node, ast.AnnAssign) and _names_the_class(node.annotation):
                    known.add(target)
                elif value is not None:
                    (known.add if _is_manager(value, known) else known.discard)(target)
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_manager(node.value, known):
            yield Access(node.lineno, node.attr)
        elif _is_attribute_call(node) and _is_manager(node.args[0], known):
            name = node.args[1] if len(node.args) > 1 else None
            yield Access(node.lineno, str(name.value) if isinstance(name, ast.Constant) else "any attribute")
        if node is not scope and _is_scope(node):
            yield from _accesses_of(node, known)


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """All of the scope's nodes, those of scopes inside excepted."""
    pending = [*ast.iter_child_nodes(scope)]
    while pending:
        node = pending.pop(0)
        yield node
        if not _is_scope(node):
            pending += ast.iter_child_nodes(node)


def _is_attribute_call(node: ast.AST) -> TypeGuard[ast.Call]:
    is_call = isinstance(node, ast.Call) and bool(node.args)
    return is_call and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr", "vars")


def _is_scope(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, what it is given) of the names that the node assigns to, one by one where tuples meet."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        pairs = [(node.target, node.value)]
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs += zip(target.elts, value.elts, strict=True)


def _is_manager(value: ast.expr, known: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in known
    if isinstance(value, ast.NamedExpr):
        return _is_manager(value.value, known)
    if isinstance(value, ast.Call):
        return _names_the_class(value.func)
    return isinstance(value, ast.Attribute) and value.attr in NAMES


def _names_the_class(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return BlockManager.__name__ in annotation.value
    return any(
        BlockManager.__name__ in (getattr(node, "id", None), getattr(node, "attr", None))
        for node in ast.walk(annotation)
    )
