"""What can be wrong with a compiled library."""

import pytest

from lamella.errors import ConfigError
from lamella.native.library import NativeLibrary, Pointer


def test_a_build_of_other_sources_is_named_with_what_to_do(native_library: NativeLibrary) -> None:
    with pytest.raises(ConfigError, match=r"lamella_kernels_\w+\.so have no lamella_later_kernel: .*build\.py"):
        native_library.function("later_kernel", Pointer)
