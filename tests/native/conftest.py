from collections.abc import Iterator

import pytest
import torch

from lamella.native import build
from lamella.native.library import NativeLibrary, load_library


@pytest.fixture(scope="session")
def native_library() -> NativeLibrary:
    """The kernels of this checkout, built anew where they are older than their sources."""
    sources = [build.FOLDER / "build.py", *(build.FOLDER / "csrc").iterdir()]
    built = [build.FOLDER / f"lamella_kernels_{name}.so" for name in build.targets()]
    newest = max(path.stat().st_mtime for path in sources)
    if any(not path.is_file() or path.stat().st_mtime < newest for path in built):
        build.build()
    load_library.cache_clear()
    library = load_library()
    assert library is not None, "no native library: these tests need a C++ compiler"
    return library


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
