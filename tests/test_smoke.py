"""Seconds long and first to run: what is broken here is broken everywhere."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lamella
from lamella import errors

PACKAGE = Path(lamella.__file__).parent
# A floor imports only itself and those after it; what stands beside the floors is named by its own entry.
FLOORS = (
    "cli",
    "planner",
    "benchmark",
    "engine",
    "model_executor",
    "attention",
    "kv_cache",
    "native",
    "argument_checks",
    "errors",
)
ABOVE = ("cli_options", "cli_prompts", "__main__", "sampling_params", "inputs", "outputs")  # with cli, on top

MANNERS = """
import logging, os, signal, sys, threading
signals = {n: signal.getsignal(n) for n in signal.valid_signals()}
environment, handlers, level = dict(os.environ), list(logging.root.handlers), logging.root.level
import lamella, lamella.inputs, lamella.outputs, lamella.sampling_params
print("transformers" in sys.modules)
print({n: signal.getsignal(n) for n in signal.valid_signals()} != signals)
print(dict(os.environ) != environment)
print((logging.root.handlers, logging.root.level) != (handlers, level))
print(threading.active_count() != 1)
"""


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def module_level_imports(tree):
    """Names imported when the module is, TYPE_CHECKING blocks included, function bodies not."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)


def floor_of(module_name):
    name = module_name.split(".")[1] if "." in module_name else module_name
    return "cli" if name in ABOVE else name


def test_everything_public_is_there():
    assert lamella.__version__ == "0.1.0"
    assert {
        "LLM",
        "SamplingParams",
        "Engine",
        "EngineConfig",
        "EngineArgs",
        "LLMEngine",
        "TokensPrompt",
        "TextPrompt",
    } <= set(lamella.__all__)
    for name in lamella.__all__:
        assert getattr(lamella, name) is not None


def test_import_leaves_the_process_as_it_was():
    result = subprocess.run(
        [sys.executable, "-c", MANNERS], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120
    )
    assert result.stderr == ""
    assert result.stdout.split() == ["False"] * 5


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.CapacityError, ValueError),
        (errors.ModelLoadError, ValueError),
        (errors.RequestError, ValueError),
        (errors.EngineClosedError, RuntimeError),
        (errors.ForkedProcessError, RuntimeError),
        (errors.InvariantError, AssertionError),
    ],
)
def test_errors_are_lamellas_and_of_a_builtin_kind(error, builtin):
    assert issubclass(error, errors.LamellaError)
    assert issubclass(error, builtin)


def test_nothing_imports_upward():
    upward = []
    for path in modules():
        own = floor_of("lamella." + path.relative_to(PACKAGE).with_suffix("").parts[0])
        if own == "__init__":
            continue
        for imported in module_level_imports(ast.parse(path.read_text(encoding="utf-8"))):
            if imported.startswith("lamella.") and floor_of(imported) in FLOORS:
                assert own in FLOORS, f"{path.name} stands on no floor"
                if FLOORS.index(floor_of(imported)) < FLOORS.index(own):
                    upward.append(f"{path.relative_to(PACKAGE)} imports {imported}")
    assert upward == []


def test_transformers_is_only_imported_where_it_is_used():
    eager = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        for imported in module_level_imports(ast.parse(path.read_text(encoding="utf-8")))
        if imported.split(".")[0] == "transformers"
    ]
    assert eager == []
