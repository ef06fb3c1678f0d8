"""Seconds long and first to run: what is broken here is broken everywhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lamella
from lamella import errors
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from tests.helpers import cache_boundary
from tests.helpers.simulation import full, sliding

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


def test_tests_and_tools_look_into_an_engine_by_its_inspection_alone():
    hidden = re.compile(r"\b\w+\._(loaded|require_open|require_settled|launched)\b")
    root = PACKAGE.parent
    files = [path for folder in ("tests", "benchmarks", "examples") for path in (root / folder).rglob("*.py")]
    files += [path for path in modules() if path.relative_to(PACKAGE).parts[0] != "engine"]
    assert len(files) > 200
    looks = [str(path.relative_to(root)) for path in files if hidden.search(path.read_text(encoding="utf-8"))]
    assert looks == []


class TestTheCachesBoundary:
    """Nobody outside of `kv_cache` goes behind the contract of BlockManager."""

    def test_the_contract_is_documented_and_all_that_is_public(self):
        manager = BlockManager(
            build_layout([full(), sliding(9)], page_tokens=4), num_slabs=9, num_rows=1, max_model_len=32,
            interval_tokens=4,
        )  # fmt: skip
        assert {name for name in vars(manager) if not name.startswith("_")} == cache_boundary.DATA
        methods = cache_boundary.contract() - cache_boundary.DATA
        assert [name for name in sorted(methods) if not getattr(BlockManager, name).__doc__] == []

    def test_nobody_outside_goes_behind_it(self):
        allowed = cache_boundary.contract()
        found, behind = [], []
        for path in modules():
            own = path.relative_to(PACKAGE).parts[0]
            if own == "kv_cache":
                continue
            tools = cache_boundary.INSPECTIONS if own != "benchmark" else frozenset()
            for access in cache_boundary.accesses(path):
                found.append(access.attribute)
                if access.attribute not in allowed - tools:
                    behind.append(f"{path.relative_to(PACKAGE)}:{access.line} touches {access.attribute}")
        assert behind == []
        assert {"begin", "grow", "commit", "release", "plan_step"} <= set(found), "the check sees nothing"

    def test_it_sees_who_does(self, tmp_path):
        """Every way to come by a manager, and what is not one."""
        source = """
class Scheduler:
    def __init__(self, manager: BlockManager, cache: "BlockManager | None", table):
        self.manager = manager
        manager.tree.refs
        cache.rows = 1
        renamed, other = manager, table
        renamed.arena.free(0, 1)
        other.arena
        def inner():
            return renamed.step_pages
        made = BlockManager(table)
        made._supply
        setattr(manager, "in_flight", True)
        getattr(self.manager, table)

    def step(self, loaded):
        self.manager.grow(0, 1, 2)
        loaded.manager.moves
        with_manager = loaded._manager
        with_manager.copies
        manager = loaded.coordinator
        manager.block_pool
        (again := loaded.manager).pages
        again.nodes
"""
        path = tmp_path / "scheduler.py"
        path.write_text(source)
        seen = sorted(access.attribute for access in cache_boundary.accesses(path))
        expected = ["tree", "rows", "arena", "step_pages", "_supply", "in_flight", "any attribute"]
        expected += ["grow", "moves", "copies", "pages", "nodes"]
        assert seen == sorted(expected)
