"""The libraries that vLLM's CPU guide advises to preload: TCMalloc, and Intel's OpenMP runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamella.errors import ConfigError

TCMALLOC = "libtcmalloc_minimal.so.4"
OPENMP = "libiomp5.so"
PACKAGES = {TCMALLOC: "Debian package libtcmalloc-minimal4", OPENMP: "Python package intel-openmp"}
_SYSTEM_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib")


@dataclass(frozen=True, slots=True)
class Preload:
    """paths: in the order of LD_PRELOAD. missing: names of those that were looked for in vain."""

    paths: tuple[Path, ...]
    missing: tuple[str, ...] = ()

    def describe(self) -> str:
        found = ", ".join(map(str, self.paths)) or "nothing"
        return found + "".join(f"; {name} not found ({PACKAGES[name]} has it)" for name in self.missing)


def find_preload(python: Path, system_folders: Sequence[str] = _SYSTEM_FOLDERS) -> Preload:
    """What there is in the environment of the interpreter `python`, else in `system_folders` (glob patterns)."""
    found = {name: next(_places(name, python, system_folders), None) for name in (TCMALLOC, OPENMP)}
    paths = tuple(path for path in found.values() if path is not None)
    return Preload(paths, tuple(name for name, path in found.items() if path is None))


def given_preload(text: str) -> Preload:
    """Paths with ":" between them; "" for none. Raises ConfigError where a file does not exist."""
    paths = tuple(Path(part) for part in text.split(":") if part)
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"vllm_preload: {path} does not exist; give library files with ':' between them")
    return Preload(paths)


def _places(name: str, python: Path, system_folders: Sequence[str]) -> Iterator[Path]:
    # Not resolved: a virtual environment's interpreter is a link out of it.
    folders = [python.absolute().parent.parent / "lib"]
    for pattern in system_folders:
        folders += sorted(Path("/").glob(pattern.lstrip("/")))
    return (path for folder in folders if (path := folder / name).is_file())
