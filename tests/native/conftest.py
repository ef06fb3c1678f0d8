"""Native tests run on the sources as they are: the package's build, or a new one where that is older or missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lamella.native import build, library

SOURCES = Path(library.__file__).parent / "csrc"


def _build_names() -> list[str]:
    return [name for name in library.BUILDS.get(torch.backends.cpu.get_cpu_capability(), ()) if name in build.targets()]


def _is_current(names: list[str]) -> bool:
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    paths = [library.library_path(name) for name in names]
    return any(path.is_file() for path in paths) and all(
        path.stat().st_mtime >= newest for path in paths if path.is_file()
    )


@pytest.fixture(scope="session", autouse=True)
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[library.NativeLibrary]:
    """Skips only where there is neither a library nor a compiler for this processor."""
    names = _build_names()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(library.SWITCH, raising=False)
        if not _is_current(names):
            if not names:
                pytest.skip("the native kernels are not built for this kind of processor")
            if build.find_compiler() is not None:
                folder = tmp_path_factory.mktemp("native")
                build.build(folder)
                patch.setattr(library, "library_path", lambda name: folder / f"lamella_kernels_{name}.so")
            elif not any(library.library_path(name).is_file() for name in names):
                pytest.skip("there is no native library, and no C++ compiler to build it: install g++ or clang")
        library.load_library.cache_clear()
        loaded = library.load_library()
        assert loaded is not None
        yield loaded
    library.load_library.cache_clear()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The shapes here are tiny. Tests that need more threads set them; afterwards there are as many as before."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
