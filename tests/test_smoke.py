"""Seconds long and first to run: what is broken here is broken everywhere."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
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
    "ray",
    "batch_files",
    "benchmark",
    "integrations",
    "engine",
    "observability",
    "model_executor",
    "attention",
    "kv_cache",
    "native",
    "plot_path",
    "output_path",
    "text_lines",
    "argument_checks",
    "errors",
)
BESIDE_ENGINE = ("distributed",)  # engines and their steps in several processes: of the engine's floor
ABOVE = (
    "cli_options",
    "cli_prompts",
    "cli_chat",
    "cli_models",
    "__main__",
    "sampling_params",
    "lora",
    "inputs",
    "outputs",
    "metrics",
)  # with cli, on top

# What scheduling may import, besides itself. Of the cache, that is its boundary, and what passes it.
SCHEDULING_NEEDS = {
    "lamella.errors",
    "lamella.model_executor.step_plan",
    *(f"lamella.kv_cache.{name}" for name in ("block_manager", "counters", "expectations", "prefix_match", "spec")),
}
# Words by which code would tell families of models apart. Comments and docstrings may name them.
FAMILIES = re.compile(r"gemma|llama|mistral|qwen|phi\d|gpt_?oss|mimo", re.IGNORECASE)
NAMES_NO_FAMILY = {
    "model_executor/text/gguf_tokenizer.py",  # "llama" is GGUF's word for SentencePiece
    "model_executor/text/gguf_pre_tokenizers.py",  # GGUF's words for ways to split text
    "model_executor/text/gguf_sentencepiece.py",  # what Gemma's files leave to their reader is of its vocabulary
    "model_executor/text/special_tokens.py",  # classes of tokenizers
    "model_executor/weights/demo_models.py",  # demo models by name
    "model_executor/weights/model_source.py",
}

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


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_within():
    """module -> modules of lamella that it imports, at whatever place: in functions and for type checkers, too."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name in paths}
            elif isinstance(node, ast.ImportFrom):
                deeper = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {one if one in paths else node.module for one in deeper} & paths.keys()
    return found


def words_of_code(tree):
    """Names and strings in code; docstrings are none."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.ClassDef(name=word) | ast.FunctionDef(name=word):
                yield word
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases)
                yield getattr(node, "module", None) or ""
            case ast.Constant(value=str(word)) if id(node) not in docstrings:
                yield word


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
    return "cli" if name in ABOVE else "engine" if name in BESIDE_ENGINE else name


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
        (errors.WorkerLostError, RuntimeError),
        (errors.ReplicaLostError, RuntimeError),
        (errors.ForkedProcessError, RuntimeError),
        (errors.InvariantError, AssertionError),
    ],
)
def test_errors_are_lamellas_and_of_a_builtin_kind(error, builtin):
    assert issubclass(error, errors.LamellaError)
    assert issubclass(error, builtin)


def test_nothing_imports_upward():
    upward = []
    for module, imported in imports_within().items():
        own = floor_of(module)
        if module == "lamella":
            continue
        for name in imported:
            if floor_of(name) in FLOORS:
                assert own in FLOORS, f"{module} stands on no floor"
                if FLOORS.index(floor_of(name)) < FLOORS.index(own):
                    upward.append(f"{module} imports {name}")
    assert upward == []


def test_no_circle_of_files():
    try:
        TopologicalSorter(imports_within()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_scheduling_knows_no_models():
    own = "lamella.engine.scheduling"
    assert f"{own}.scheduler" in imports_within()
    foreign = {
        f"{module} imports {name}"
        for module, imported in imports_within().items()
        if module.startswith(own)
        for name in imported
        if not name.startswith(own) and name not in SCHEDULING_NEEDS
    }
    assert foreign == set()


def test_families_are_named_among_models_alone():
    naming = set()
    for path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith(("model_executor/models/", "planner/")) and any(
            map(FAMILIES.search, words_of_code(tree_of(path)))
        ):
            naming.add(place)
    assert naming - NAMES_NO_FAMILY == set()


def test_families_run_no_layers():
    """A family is read from its config and its names. Without tensors, layers and attention it cannot compute."""
    from lamella.model_executor.models.registry import FAMILIES

    assert len(FAMILIES) >= 4
    for family in FAMILIES:
        module = family.config_from_json.__module__
        imported = set(module_level_imports(tree_of(PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py"))))
        parts = {".".join(name.split(".")[:3]) for name in imported} | {name.split(".")[0] for name in imported}
        assert not parts & {"torch", "numpy", "lamella.model_executor.layers", "lamella.attention"}, module


def test_test_modules_import_helpers_and_not_each_other():
    # Its battery is made of other modules' tests.
    but = "properties/test_planted_faults.py"
    tests = Path(__file__).parent
    importing = [
        str(path.relative_to(tests))
        for path in tests.rglob("test_*.py")
        for name in module_level_imports(tree_of(path))
        if re.match(r"tests\..*\btest_", name)
    ]
    assert sorted(set(importing) - {but}) == []


def test_who_schedules_runs_and_describes_models_has_a_test_file_of_its_name():
    tests = Path(__file__).parent
    alone = ("model_executor/runner.py", "engine/engine.py", "engine/llm.py")
    paths = [path.relative_to(PACKAGE) for path in modules() if path.name != "__init__.py"]
    folders = {Path("engine/scheduling"), Path("model_executor/models")}
    wanted = [path for path in paths if path.parent in folders or path.as_posix() in alone]
    assert len(wanted) > 25
    assert [str(path) for path in wanted if not (tests / path.parent / f"test_{path.name}").is_file()] == []


def test_transformers_is_only_imported_where_it_is_used():
    eager = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        for imported in module_level_imports(tree_of(path))
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
        root = PACKAGE.parent
        benchmarks = [*(root / "benchmarks").rglob("*.py")]
        foreign = "vllm_driver.py"  # its manager is vLLM's
        for path in [*modules(), *(path for path in benchmarks if path.name != foreign)]:
            if path.relative_to(root).parts[:2] == ("lamella", "kv_cache"):
                continue
            tools = cache_boundary.INSPECTIONS if path not in benchmarks else frozenset()
            for access in cache_boundary.accesses(path):
                found.append(access.attribute)
                if access.attribute not in allowed - tools:
                    behind.append(f"{path.relative_to(root)}:{access.line} touches {access.attribute}")
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
