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

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention_compile_report import SHARED_LIMITS, amd_registers, nvidia_registers
from lamella.model_executor.layers.triton import activation, clamped, grouped, heads, norm
from lamella.model_executor.models.mlp_config import GateClamp

LAUNCH_OPTIONS = ("num_warps", "enable_fp_fusion")
ITEMSIZE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Types of arguments that are not the model's; integers are strides.
_TYPES = {
    "weight": "*fp32", "post_weight": "*fp32", "next_weight": "*fp32", "query_weight": "*fp32", "key_weight": "*fp32",
    "slots": "*i64", "eps": "fp32", "post_eps": "fp32", "next_eps": "fp32", "softcap": "fp32",
    "key_scale": "fp32", "value_scale": "fp32",
    "order": "*i64", "begins": "*i32", "factors": "*fp32", "weights": "*fp32",
    "limit": "fp32", "slope": "fp32", "up_offset": "fp32",
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
        yield Launch("add_norm", name, norm.add_norm_kernel, constants | {"bias": None}, 4 * row_bytes, dtype)
    constants, row_bytes = norm.norm_constants(5376), 5376 * ITEMSIZE_BYTES["bf16"]
    for name, absent, num_moved in (
        ("width 5376, y as it is", ("bias", "post_weight"), 4),
        ("width 5376, y with a bias", ("post_weight",), 4),
        ("width 5376, both norms and a bias", (), 4),
        ("width 5376, no norm of the sum", ("bias", "next_weight"), 3),
    ):
        given = constants | dict.fromkeys(absent)
        yield Launch("add_norm", name, norm.add_norm_kernel, given, num_moved * row_bytes)
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
        constants |= {"bias": None, "key_scale": None, "value_scale": None}
        row_bytes = (2 * (num_heads + 2 * num_kv_heads) + 1) * head_dim * ITEMSIZE_BYTES[dtype]  # with cos and sin
        yield Launch("heads", name, heads.heads_kernel, constants, row_bytes, dtype)
    yield from _launches_of_other_heads()
    constants = heads.heads_constants(32, 16, 128, page_tokens=16, fp8_mantissa=3) | {"bias": None}
    types = (("keys", "*u8"), ("values", "*u8"))
    row_bytes = 2 * 2 * 32 * 128 + 3 * 2 * 16 * 128 + 2 * 128
    yield Launch("heads", "gemma-3-27b, fp8 with scales", heads.heads_kernel, constants, row_bytes, types=types)
    for name, width, kind in (
        ("gemma-3-270m", 2048, "gelu_tanh"),
        ("gemma-3-27b", 21504, "gelu_tanh"),
        ("width 14336", 14336, "silu"),
    ):
        constants = activation.gated_constants(width, kind)
        yield Launch("gated", f"{name}, {kind}", activation.gated_kernel, constants | {"bias": None}, 3 * width * 2)
    yield Launch("gated", "width 14336, silu, bias", activation.gated_kernel, constants, 3 * 14336 * 2)
    yield from _launches_of_experts()
    vocab = 262144
    yield Launch(
        "softcap",
        f"{vocab} logits",
        activation.softcap_kernel,
        activation.softcap_constants(vocab),
        vocab * (2 + 4),
        types=(("out", "*fp32"),),
    )


def _launches_of_other_heads() -> Iterator[Launch]:
    """Heads with a bias, without norms, with rotary embedding of a part or none, and values of another size."""
    no_norms, no_rotary = ("query_weight", "key_weight"), ("cos", "sin")
    for name, (num_heads, num_kv_heads, k_dim, v_dim), rotary_dim, absent in (
        ("smollm2-135m", (9, 3, 64, 64), 64, ("bias", *no_norms)),
        ("qwen2.5-0.5b", (14, 2, 64, 64), 64, no_norms),
        ("32 heads of 80, 32 rotated", (32, 32, 80, 80), 32, no_norms),
        ("32 heads of 96 normed, 72 rotated", (32, 8, 96, 96), 72, ("bias",)),
        ("32 heads of 128, none rotated", (32, 8, 128, 128), 0, ("bias", *no_norms, *no_rotary)),
        ("64 heads of 192 and 128", (64, 8, 192, 128), 64, ("bias", *no_norms)),
        ("16 heads of 64 and 256, everything", (16, 4, 64, 256), 64, ()),
    ):
        constants = heads.heads_constants(
            num_heads, num_kv_heads, k_dim, page_tokens=16, v_dim=v_dim, rotary_dim=rotary_dim
        )
        constants |= dict.fromkeys((*absent, "key_scale", "value_scale"))
        row_elements = 2 * (num_heads * k_dim + num_kv_heads * (k_dim + v_dim)) + rotary_dim
        yield Launch("heads", name, heads.heads_kernel, constants, row_elements * ITEMSIZE_BYTES["bf16"])


def _launches_of_experts() -> Iterator[Launch]:
    """Row bytes of a product: a pair's inputs and outputs, the weights not counted."""
    bf16, weights = torch.bfloat16, (("weight", "*bf16"),)
    for name, count, top_k, hidden, width, num_tokens, dtype in (
        ("gpt-oss-20b, 1 token", 32, 4, 2880, 2880, 1, bf16),
        ("gpt-oss-20b, 256 tokens", 32, 4, 2880, 2880, 256, bf16),
        ("gpt-oss-20b, 4096 tokens", 32, 4, 2880, 2880, 4096, bf16),
        ("qwen3-30b-a3b, 64 tokens", 128, 8, 2048, 768, 64, bf16),
        ("mimo-v2-flash, 8192 tokens", 256, 8, 4096, 2048, 8192, bf16),
        ("qwen3-30b-a3b, 4096 tokens, fp32", 128, 8, 2048, 768, 4096, torch.float32),
    ):
        kind, types = ("bf16", weights) if dtype is bf16 else ("fp32", ())
        for part, num_out, num_in, pairs_per_row in (("up", 2 * width, hidden, top_k), ("down", hidden, width, 1)):
            constants = grouped.grouped_constants(num_tokens * top_k, count, num_out, num_in, pairs_per_row, dtype)
            constants |= dict.fromkeys(("factors",) if "gpt-oss" in name else ("bias", "factors"))
            moved = (num_out + num_in) * dtype.itemsize
            yield Launch(f"grouped, {part}", name, grouped.grouped_kernel, constants, moved, kind, types)
    constants = grouped.grouped_constants(16, 16, 16384, 5120, 1, bf16) | {"bias": None}
    name = "llama-4-scout, weighted inputs"
    yield Launch("grouped, up", name, grouped.grouped_kernel, constants, 2 * 21504, types=weights)
    constants = grouped.combine_constants(2880, 4) | {"shared": None}
    yield Launch("combine", "gpt-oss-20b", grouped.combine_kernel, constants, 5 * 2880 * 2)
    clamp = GateClamp(limit=7.0, slope=1.702, up_offset=1.0)
    constants = clamped.clamped_constants(2880, "silu", clamp)
    yield Launch("clamped", "gpt-oss-20b", clamped.clamped_kernel, constants | {"bias": None}, 3 * 2880 * 2)


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
