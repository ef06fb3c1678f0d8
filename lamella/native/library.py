"""The compiled kernels: which build fits this processor, and how Python calls it.

`setup.py` compiles `csrc/` once for each instruction set, where there is a compiler. Nothing here is needed to run:
without a library `load_library` warns, and the torch path is taken.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lamella.errors import ConfigError
from lamella.native.fork_guard import FORK_GUARD

logger = logging.getLogger(__name__)

PANEL = 16  # columns of a packed weight, tokens of a K panel: csrc/vec.h
SWITCH = "LAMELLA_NATIVE"  # environment: "0" takes the torch path although a library is there
# torch's name for the processor's instruction set -> builds that run on it, the fastest first
BUILDS = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",), "DEFAULT": ("neon",)}

Pointer = ctypes.c_void_p
Int = ctypes.c_int64
Float = ctypes.c_float


class NativeLibrary:
    """Calls into one build. Arguments are addresses (`tensor.data_ptr()`), int64 sizes and floats.

    Threads are those of torch's OpenMP pool: `torch.set_num_threads` is obeyed, and nothing is oversubscribed.
    """

    def __init__(self, path: Path) -> None:
        FORK_GUARD.check()
        self.path = path
        self._library = ctypes.CDLL(str(path))
        FORK_GUARD.arm()

    def function(self, name: str, *argtypes: type, restype: type | None = None) -> Callable[..., Any]:
        """The exported function `lamella_<name>`; releases the GIL while it runs. Raises ConfigError where the build
        lacks it. Calls of it raise ForkedProcessError in a child that was forked from this process."""
        try:
            function = getattr(self._library, f"lamella_{name}")
        except AttributeError:
            raise ConfigError(
                f"the native kernels at {self.path} have no lamella_{name}: they were compiled from other sources; "
                f"reinstall lamella or run lamella/native/build.py, or set {SWITCH}=0 for the torch path"
            ) from None
        function.argtypes = argtypes
        function.restype = restype
        guard = FORK_GUARD

        def checked(*arguments: Any) -> Any:
            if guard.has_forked:
                guard.check()
            return function(*arguments)

        return checked


def library_path(build: str) -> Path:
    return Path(__file__).parent / f"lamella_kernels_{build}.so"


@functools.cache
def load_library() -> NativeLibrary | None:
    """The build for this processor, or None, with the reason, its cost and the remedy in the log at level WARNING, once
    in the process."""
    if os.environ.get(SWITCH, "1") == "0":
        _warn(f"they are switched off by {SWITCH}=0 in the environment", f"unset {SWITCH}")
        return None
    capability = torch.backends.cpu.get_cpu_capability()
    builds = BUILDS.get(capability, ())
    if not builds:
        _warn(
            f"there are none for this processor ({platform.machine()}, {capability})",
            "run on x86-64 with AVX2 or on 64-bit Arm",
        )
        return None
    problems = []
    for build in builds:
        path = library_path(build)
        if path.is_file():
            try:
                return NativeLibrary(path)
            except OSError as error:
                problems.append(f"{path} cannot be loaded ({error})")
        else:
            problems.append(f"{path} is not there")
    _warn(
        f"{'; '.join(problems)}; they are compiled at installation where there is a C++ compiler",
        f"install g++ or clang, and then lamella anew, or run: python {Path(__file__).with_name('build.py')}",
    )
    return None


def _warn(reason: str, remedy: str) -> None:
    logger.warning(
        "no native kernels: %s. The CPU runs on torch instead: linear layers take up to 2.5 times as long, results are "
        "not the same bits in every batch, and there is no quantization. To get them: %s.",
        reason,
        remedy,
    )
