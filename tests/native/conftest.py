import pytest

from lamella.native import build
from lamella.native.library import load_library


@pytest.fixture(scope="session", autouse=True)
def native_library():
    """The kernels of this checkout: built where a compiler is and they are older than their sources."""
    sources = [build.FOLDER / "build.py", *(build.FOLDER / "csrc").iterdir()]
    built = [build.FOLDER / f"lamella_kernels_{name}.so" for name in build.targets()]
    newest = max(path.stat().st_mtime for path in sources)
    if any(not path.is_file() or path.stat().st_mtime < newest for path in built):
        build.build()
    load_library.cache_clear()
    library = load_library()
    assert library is not None, "no native library: these tests need a C++ compiler"
    return library
