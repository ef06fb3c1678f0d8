"""Compiles `csrc/` into one shared library for each instruction set that the processor family has.

Run by `setup.py` at installation, and by hand: `python lamella/native/build.py`. Imports nothing of lamella, for at
installation nothing is there yet.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
# -ffp-contract=fast: products and sums fuse, the same way in every kernel. No -ffast-math: sums keep their order.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno",
         "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]  # fmt: skip
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-DLAMELLA_VECTOR_BYTES=32"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512",
               "-DLAMELLA_VECTOR_BYTES=64"],
}  # fmt: skip
ARM = {"neon": ["-DLAMELLA_VECTOR_BYTES=16"]}


def targets() -> dict[str, list[str]]:
    """Build name -> compiler flags, for the family of the processor that this runs on; empty for others."""
    machine = platform.machine().lower()
    if platform.system() != "Linux":
        return {}
    return X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else {}


def find_compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


def build(out_dir: Path = FOLDER) -> list[Path]:
    """Compile every target into `out_dir`. Raises RuntimeError without a compiler, CalledProcessError where it fails.

    The OpenMP runtime is the one that torch has loaded by the time a library is: symbols are looked up there first.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler (CXX, g++ or clang++)")
    sources = sorted(str(path) for path in (FOLDER / "csrc").glob("*.cpp"))
    built = []
    for name, flags in targets().items():
        path = out_dir / f"lamella_kernels_{name}.so"
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([compiler, *FLAGS, *flags, *sources, "-o", str(partial)], check=True)
        partial.replace(path)  # a process that runs the old file keeps it
        built.append(path)
    return built


if __name__ == "__main__":
    for path in build():
        print(path)
