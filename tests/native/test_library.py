"""What can be wrong with a compiled library."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lamella.attention.choice import choose_backend
from lamella.errors import ConfigError
from lamella.native import library
from lamella.native.library import NativeLibrary, Pointer


def test_a_build_of_other_sources_is_named_with_what_to_do(native_library: NativeLibrary) -> None:
    with pytest.raises(ConfigError, match=r"lamella_kernels_\w+\.so have no lamella_later_kernel: .*build\.py"):
        native_library.function("later_kernel", Pointer)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """What is loaded once and kept is loaded anew, before and after."""
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("native_library", "fresh_library")
@pytest.mark.parametrize("why", ["switched off", "not built", "cannot be loaded", "another processor"])
def test_without_kernels_one_warning_says_why_what_it_costs_and_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, why: str
) -> None:
    monkeypatch.delenv(library.SWITCH, raising=False)
    if why == "switched off":
        monkeypatch.setenv(library.SWITCH, "0")
        reason, remedy = "switched off by LAMELLA_NATIVE=0", "unset LAMELLA_NATIVE"
    elif why == "another processor":
        monkeypatch.setattr(library, "BUILDS", {})
        reason, remedy = "none for this processor", "x86-64 with AVX2"
    else:
        monkeypatch.setattr(library, "library_path", lambda build: tmp_path / f"{build}.so")
        reason, remedy = "is not there", "g++ or clang"
        if why == "cannot be loaded":
            for build in ("avx2", "avx512", "neon"):
                (tmp_path / f"{build}.so").write_bytes(b"no library")
            reason = "cannot be loaded"
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            assert choose_backend("auto", torch.device("cpu")).name == "torch"
    (warning,) = warnings_of(caplog)
    assert "no native kernels" in warning
    assert reason in warning
    assert "2.5 times as long" in warning
    assert remedy in warning


@pytest.mark.usefixtures("native_library", "fresh_library")
def test_with_kernels_or_where_torch_is_asked_for_there_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert choose_backend("auto", torch.device("cpu")).name == "native"
        library.load_library.cache_clear()
        monkeypatch.setenv(library.SWITCH, "0")
        assert choose_backend("torch", torch.device("cpu")).name == "torch"
    assert warnings_of(caplog) == []
