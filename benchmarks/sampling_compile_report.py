"""Compile the sampling kernels for one target and print, as JSON, what each needs. Arguments: the target, and what is
in the names of the kernels to compile. Not for a process that interprets kernels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention_compile_report import amd_registers, nvidia_registers
from sampling_launches import launches


def disassembly(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "EXIT" in text, text
    return text


def main(target: str, wanted: str) -> None:
    is_nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_nvidia else GPUTarget("hip", target, 64)
    for launch in launches():
        if wanted not in launch.name:
            continue
        names = list(launch.signature)
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
        source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
        compiled = triton.compile(source, target=gpu, options=launch.options)
        if is_nvidia:
            registers, spilled = nvidia_registers(compiled.asm["cubin"])
            # A few bytes of stack may be set aside and never touched.
            spilled = spilled if re.search(r"\b(LDL|STL)\b", disassembly(compiled.asm["cubin"])) else 0
        else:
            registers, spilled = amd_registers(compiled.asm["amdgcn"])
        measured = {"registers": registers, "spilled": spilled, "shared_bytes": compiled.metadata.shared}
        print(json.dumps({"name": launch.name, **measured}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
