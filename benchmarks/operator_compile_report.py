"""Compile the fused operators for GPUs that need not be there, and say what the compilers made of them.

    python benchmarks/operator_compile_report.py --targets sm_80 sm_90 sm_100 gfx942

One line per kernel, shape and target: registers, what was spilled, shared memory, and the bytes that the kernel moves
for one row. The exit code is 1 where anything was spilled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention_compile_report import SHARED_LIMITS, amd_registers, nvidia_registers
from lamella.model_executor.layers.triton import activation, heads, norm

LAUNCH_OPTIONS = ("num_warps", "enable_fp_fusion")
ITEMSIZE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Types of arguments that are not the model's; integers are strides.
_TYPES = {
    "weight": "*fp32", "post_weight": "*fp32", "next_weight": "*fp32", "query_weight": "*fp32", "key_weight": "*fp32",
    "slots": "*i64", "eps": "fp32", "post_eps": "fp32", "next_eps": "fp32", "softcap": "fp32",
    "key_scale": "fp32", "value_scale": "fp32",
    "x_row_stride": "i32", "y_row_stride": "i32", "row_stride": "i32", "rotary_row_stride": "i32",
    "key_page_stride": "i32", "value_page_stride": "i32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One compilation. constants: with the launch options. row_bytes: what the kernel reads and writes for a row,
    norm weights aside."""

    kernel: str
    shape: str
    function: Any
    constants: dict[str, Any]
    row_bytes: int
    dtype: str = "bf16"
    types: tuple[tuple[str, str], ...] = ()  # that differ from the model's and _TYPES

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.constants.items() if name in LAUNCH_OPTIONS}

    @property
    def signature(self) -> dict[str, str]:
        special = _TYPES | dict(self.types)
        return {
            name: "constexpr" if name in self.constants else special.get(name, f"*{self.dtype}")
            for name in self.function.arg_names
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """spilled: bytes per thread on NVIDIA, registers per thread on AMD."""

    registers: int
    spilled: int
    shared_bytes: int


def launches() -> Iterator[Launch]:
    """Kernels for the layers of models that people run, and at the edges of what the kernels take."""
    for name, width, dtype in (
        ("gemma-3-270m", 640, "bf16"),
        ("gemma-3-1b", 1152, "bf16"),
        ("gemma-3-27b", 5376, "bf16"),
        ("width 16384", norm.MAX_WIDTH, "bf16"),
        ("gemma-3-270m, fp32", 640, "fp32"),
        ("width 16384, fp32", norm.MAX_WIDTH, "fp32"),
    ):
        row_bytes, constants = width * ITEMSIZE_BYTES[dtype], norm.norm_constants(width)
        yield Launch("norm", name, norm.norm_kernel, constants, 2 * row_bytes, dtype)
        yield Launch("add_norm", name, norm.add_norm_kernel, constants, 4 * row_bytes, dtype)
    for name, num_heads, num_kv_heads, head_dim, dtype in (
        ("gemma-3-270m", 4, 1, 256, "bf16"),
        ("gemma-3-27b", 32, 16, 128, "bf16"),
        ("64 heads of 64", 64, 8, 64, "bf16"),
        ("32 heads of 80", 32, 32, 80, "bf16"),
        ("gemma-3-27b, queries alone", 32, 0, 128, "bf16"),
        ("gemma-3-27b, K and V alone", 0, 16, 128, "bf16"),
        ("gemma-3-27b, fp32", 32, 16, 128, "fp32"),
    ):
        constants = heads.heads_constants(num_heads, num_kv_heads, head_dim, page_tokens=16)
        constants |= {"key_scale": None, "value_scale": None}
        row_bytes = (2 * (num_heads + 2 * num_kv_heads) + 1) * head_dim * ITEMSIZE_BYTES[dtype]  # with cos and sin
        yield Launch("heads", name, heads.heads_kernel, constants, row_bytes, dtype)
    constants = heads.heads_constants(32, 16, 128, page_tokens=16, fp8_mantissa=3)
    types = (("keys", "*u8"), ("values", "*u8"))
    row_bytes = 2 * 2 * 32 * 128 + 3 * 2 * 16 * 128 + 2 * 128
    yield Launch("heads", "gemma-3-27b, fp8 with scales", heads.heads_kernel, constants, row_bytes, types=types)
    for name, width, kind in (
        ("gemma-3-270m", 2048, "gelu_tanh"),
        ("gemma-3-27b", 21504, "gelu_tanh"),
        ("width 14336", 14336, "silu"),
    ):
        constants = activation.gated_constants(width, kind)
        yield Launch("gated", f"{name}, {kind}", activation.gated_kernel, constants, 3 * width * 2)
    vocab = 262144
    yield Launch(
        "softcap",
        f"{vocab} logits",
        activation.softcap_kernel,
        activation.softcap_constants(vocab),
        vocab * (2 + 4),
        types=(("out", "*fp32"),),
    )


def compile_launch(launch: Launch, target: str) -> Measured:
    """Compile it for `target`, "sm_NN" or "gfxNNN". Whatever the compiler raises passes."""
    signature = launch.signature
    constants = {name: value for name, value in launch.constants.items() if name not in LAUNCH_OPTIONS}
    # What torch allocates is aligned, and so are the strides of any real model; slots may be part of a larger buffer.
    aligned: dict[tuple[int], list[list[Any]]] = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind == "i32" or (kind.startswith("*") and name != "slots")
    }
    source = ASTSource(launch.function, signature, constants, aligned)
    is_nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_nvidia else GPUTarget("hip", target, 64)
    compiled = triton.compile(source, target=gpu, options=launch.options)
    registers, spilled = nvidia_registers(compiled.asm["cubin"]) if is_nvidia else amd_registers(compiled.asm["amdgcn"])
    return Measured(registers, spilled, compiled.metadata.shared)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the fused operators and report what they need of a GPU.")
    parser.add_argument("--targets", nargs="+", choices=sorted(SHARED_LIMITS), default=sorted(SHARED_LIMITS))
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: kernels are interpreted and cannot be compiled; unset it")

    print("| target | kernel | shape | warps | registers | spilled | shared memory, bytes | moved per row, bytes |")
    print("|---|---|---|---|---|---|---|---|")
    num_launches, spilling = 0, []
    for target in options.targets:
        for launch in launches():
            if options.shapes not in launch.shape:
                continue
            num_launches += 1
            measured = compile_launch(launch, target)
            if measured.spilled:
                spilling.append(f"{target} {launch.kernel}, {launch.shape}: {measured.spilled} spilled")
            print(
                f"| {target} | {launch.kernel} | {launch.shape} | {launch.constants['num_warps']} | "
                f"{measured.registers} | {measured.spilled} | {measured.shared_bytes} | {launch.row_bytes:,} |",
                flush=True,
            )
    print(f"\n{num_launches} compilations with Triton {triton.__version__}")
    for line in spilling:
        print(f"not as it must be: {line}")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
