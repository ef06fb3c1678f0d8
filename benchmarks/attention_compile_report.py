"""Compile every kernel for GPUs that need not be there, and say what the compilers made of it.

    python benchmarks/attention_compile_report.py --targets sm_80 sm_90 sm_100 gfx942

One line per kernel, shape and target: registers, what was spilled, shared memory, matrix instructions. The exit code
is 1 where decode or prefill spills more than SPILL_LIMITS allow, any kernel wants more shared memory than the target
has, or a matrix kernel got no matrix instruction.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamella.attention.kv_dtype import FP8_MANTISSA_BITS
from lamella.attention.triton.backend import MAX_SEGMENTS, SEGMENT_TOKENS
from lamella.attention.triton.decode import (
    MERGE_TILE,
    decode_constants,
    decode_kernel,
    merge_constants,
    merge_kernel,
)
from lamella.attention.triton.device_functions import FULL, WINDOW
from lamella.attention.triton.prefill import prefill_constants, prefill_kernel
from lamella.attention.triton.shapes import LayerShape, unpacked_mantissa
from lamella.attention.triton.tuning import Tile, choose_tile
from lamella.attention.triton.window_indices import BLOCK, NUM_WARPS, window_indices_kernel
from lamella.attention.triton.write_kv import BLOCK_ELEMENTS, write_kv_kernel

# Shared memory that one program may have, in bytes.
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")
# Widest head -> what decode and prefill may spill per thread: bytes on NVIDIA, registers on AMD.
SPILL_LIMITS = {64: 0, 128: 0, 256: 48}

_INT64_POINTERS = (
    "block_tables", "table_rows", "tables", "table_places", "first_blocks", "seq_lens", "first_keys", "query_start",
    "slots", "indptr", "indices", "window_first_keys",
)  # fmt: skip
_FLOAT32_POINTERS = ("partial_sums", "partial_stats", "sinks")
_MODEL_POINTERS = ("query", "key", "value", "out")
_PAGE_POINTERS = ("keys", "values")
_FLOATS = ("scale", "softcap", "v_scale")
# Arguments that are multiples of 16 in any real model, and that the launcher tells the compiler so.
_ALIGNED = (
    "keys", "values", "partial_sums", "partial_stats",
    "query_row_stride", "query_head_stride", "out_row_stride", "key_page_stride", "value_page_stride",
    "key_row_stride", "key_head_stride", "value_row_stride", "value_head_stride",
)  # fmt: skip
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}

WINDOW_TILE = Tile(block_m=1, block_n=1, num_warps=NUM_WARPS, num_stages=1)


@dataclass(frozen=True, slots=True)
class NamedShape:
    """shape.dtype: of the pages; a model whose pages have 8 bits computes in bf16."""

    name: str
    shape: LayerShape
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def model_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.shape.dtype in FP8_MANTISSA_BITS else self.shape.dtype


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compilation: the function, its compile-time constants and tile. is_matrix: multiplies matrices."""

    name: str
    function: Any
    constants: dict[str, Any]
    tile: Tile
    is_matrix: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """spilled: bytes per thread on NVIDIA, registers per thread on AMD."""

    registers: int
    spilled: int
    shared_bytes: int
    matrix_instructions: tuple[str, ...]


def _shape(
    rule: int,
    reach: int,
    num_kv_heads: int,
    group: int,
    k_dim: int,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> LayerShape:
    return LayerShape(
        rule=rule,
        reach=reach,
        num_kv_heads=num_kv_heads,
        group=group,
        k_dim=k_dim,
        v_dim=k_dim if v_dim is None else v_dim,
        page_tokens=16,
        dtype=dtype,
        in_float32=False,
    )


# Layers of models that people run, and the other widths.
SHAPES = (
    NamedShape("gpt-oss-20b window 128", _shape(WINDOW.value, 128, 8, 8, 64), has_sinks=True),
    NamedShape("gemma-3-27b window 1024", _shape(WINDOW.value, 1024, 16, 2, 128)),
    NamedShape("llama-3.1-8b full", _shape(FULL.value, 0, 8, 4, 128)),
    NamedShape("gemma-3-270m window 512", _shape(WINDOW.value, 512, 1, 4, 256)),
    NamedShape("gemma-2-9b window 4096", _shape(WINDOW.value, 4096, 8, 2, 256), has_softcap=True),
    NamedShape("mimo-v2-flash window 128", _shape(WINDOW.value, 128, 8, 8, 192, 128), has_sinks=True),
    NamedShape("80 dims full", _shape(FULL.value, 0, 32, 1, 80)),
    NamedShape("96 dims window 2047", _shape(WINDOW.value, 2047, 32, 1, 96)),
    NamedShape("512 dims full", _shape(FULL.value, 0, 1, 8, 512)),
    NamedShape("128 dims full, fp32", _shape(FULL.value, 0, 8, 4, 128, dtype=torch.float32)),
    NamedShape("gemma-3-27b window 1024, fp8", _shape(WINDOW.value, 1024, 16, 2, 128, dtype=torch.float8_e4m3fn)),
    NamedShape("llama-3.1-8b full, fp8", _shape(FULL.value, 0, 8, 4, 128, dtype=torch.float8_e4m3fn)),
    NamedShape("gemma-3-270m window 512, fp8", _shape(WINDOW.value, 512, 1, 4, 256, dtype=torch.float8_e4m3fn)),
    NamedShape("64 dims full, fp8 e5m2", _shape(FULL.value, 0, 8, 8, 64, dtype=torch.float8_e5m2)),
)


def kernels(named: NamedShape, target: str) -> Iterator[Kernel]:
    """Every kernel for one layer, with the tiles that `target` gets."""
    shape = dataclasses.replace(named.shape, fp8_mantissa=unpacked_mantissa(named.shape.dtype, target))
    is_matrix = shape.dtype != torch.float32
    segments = {"segment_tokens": SEGMENT_TOKENS, "max_segments": MAX_SEGMENTS}

    def tile(kernel: str) -> Tile:
        head_dim = max(shape.k_dim, shape.v_dim)
        return choose_tile(kernel, target, head_dim=head_dim, itemsize_bytes=shape.dtype.itemsize)

    constants = decode_constants(shape, tile("decode"), **segments, has_softcap=named.has_softcap)
    yield Kernel("decode", decode_kernel, constants, tile("decode"), is_matrix)
    constants = prefill_constants(shape, tile("prefill"), has_softcap=named.has_softcap, has_sinks=named.has_sinks)
    yield Kernel("prefill", prefill_kernel, constants, tile("prefill"), is_matrix)
    constants = merge_constants(shape, **segments, has_sinks=named.has_sinks)
    yield Kernel("merge", merge_kernel, constants, MERGE_TILE, False)
    plain = Tile(block_m=1, block_n=1, num_warps=4, num_stages=1)
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "K_DIM": shape.k_dim,
        "V_DIM": shape.v_dim,
        "PAGE_TOKENS": shape.page_tokens,
        "FP8_MANTISSA": FP8_MANTISSA_BITS.get(shape.dtype, 0),
        "BLOCK": BLOCK_ELEMENTS,
    }
    yield Kernel("write_kv", write_kv_kernel, constants, plain, False)
    if shape.reach:
        constants = {"RULE": shape.rule, "PAGE_TOKENS": shape.page_tokens, "BLOCK": BLOCK}
        yield Kernel("window_indices", window_indices_kernel, constants, WINDOW_TILE, False)


def compile_kernel(kernel: Kernel, named: NamedShape, target: str) -> Measured:
    """Compile it for `target`, "sm_NN" or "gfxNNN". Whatever the compiler raises passes."""
    constants = dict(kernel.constants)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.function.arg_names):
        if name == "sinks" and not named.has_sinks:
            constants[name] = None
        if name in constants:
            signature[name] = "constexpr"
        elif name in _INT64_POINTERS:
            signature[name] = "*i64"
        elif name in _FLOAT32_POINTERS:
            signature[name] = "*fp32"
        elif name in _MODEL_POINTERS:
            signature[name] = f"*{_DTYPES[named.model_dtype]}"
        elif name in _PAGE_POINTERS:
            signature[name] = "*u8" if kernel.constants.get("FP8_MANTISSA") else f"*{_DTYPES[named.shape.dtype]}"
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
        if name in _ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel.function, signature, constants, attributes)
    is_nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_nvidia else GPUTarget("hip", target, 64)
    compiled = triton.compile(source, target=gpu, options=kernel.tile.launch_options)
    text = compiled.asm["ptx" if is_nvidia else "amdgcn"]
    registers, spilled = nvidia_registers(compiled.asm["cubin"]) if is_nvidia else amd_registers(text)
    found = tuple(name for name in MATRIX_INSTRUCTIONS if name in text)
    return Measured(registers, spilled, compiled.metadata.shared, found)


def nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread. Kernels without arrays have a stack only for what was spilled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    if registers is None or stack is None:
        raise ValueError(f"cuobjdump -res-usage printed no REG and STACK: {usage!r}")
    return int(registers[1]), int(stack[1])


def amd_registers(assembly: str) -> tuple[int, int]:
    """(vector registers, of which spilled) per thread."""
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    if registers is None or spilled is None:
        raise ValueError("the AMD assembly has no .vgpr_count and .vgpr_spill_count")
    return int(registers[1]), int(spilled[1])


def problem(kernel: Kernel, named: NamedShape, target: str, measured: Measured) -> str | None:
    """What is not as it must be, or None."""
    shape = named.shape
    if measured.shared_bytes > SHARED_LIMITS[target]:
        return f"{measured.shared_bytes} bytes of shared memory, {target} has {SHARED_LIMITS[target]}"
    if kernel.is_matrix and not measured.matrix_instructions:
        return "no matrix instruction"
    limit = SPILL_LIMITS.get(max(shape.k_dim, shape.v_dim))
    if kernel.name in ("decode", "prefill") and limit is not None and measured.spilled > limit:
        return f"{measured.spilled} spilled, {limit} allowed"
    return None


def _is_in_sample(kernel: str, shape: int, target: int, num_targets: int) -> bool:
    """Targets take turns: one compiles the decode of every second shape, one the prefill of every fourth of the other
    shapes (both take seconds), and each a quarter of the rest."""
    if kernel == "decode":
        return shape % 2 == 0 and shape // 2 % num_targets == target
    if kernel == "prefill":
        return shape % 4 == 1 and shape // 4 % num_targets == target
    return (shape + target) % 4 == 0


def selected(options: argparse.Namespace) -> Iterator[tuple[str, NamedShape, Kernel]]:
    """(target, layer, kernel) of each compilation that the command line asks for. What does not depend on the shape
    comes once."""
    names = {named.name for named in SHAPES}
    seen = set()
    for turn, target in enumerate(options.targets):
        for index, named in enumerate(SHAPES):
            if not any(part == named.name or (part in named.name and part not in names) for part in options.shapes):
                continue
            for kernel in kernels(named, target):
                key = (target, kernel.name, tuple(kernel.constants.items()), named.shape.dtype)
                if key in seen or (options.kernels is not None and kernel.name not in options.kernels):
                    continue
                if options.sample and not _is_in_sample(kernel.name, index, turn, len(options.targets)):
                    continue
                seen.add(key)
                yield target, named, kernel


def compile_named(target: str, shape: str, kernel: str) -> Measured:
    """`compile_kernel` by names, which is what goes from process to process."""
    named = next(named for named in SHAPES if named.name == shape)
    return compile_kernel(next(one for one in kernels(named, target) if one.name == kernel), named, target)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the attention kernels and report what they need of a GPU.")
    parser.add_argument("--targets", nargs="+", choices=sorted(SHARED_LIMITS), default=sorted(SHARED_LIMITS))
    parser.add_argument(
        "--shapes", nargs="+", default=[""], help="only shapes of these names, or with these in their names"
    )
    parser.add_argument("--kernels", nargs="+", default=None, help="only these kernels, such as decode and prefill")
    parser.add_argument("--sample", action="store_true", help="only part of it, but every kernel for every target")
    parser.add_argument("--by-shape", action="store_true", help="print a table with a column per target at the end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: kernels are interpreted and cannot be compiled; unset it")

    print("| target | kernel | shape | registers | spilled | shared memory, bytes | matrix instructions |")
    print("|---|---|---|---|---|---|---|")
    problems = []
    cells: dict[tuple[str, str], dict[str, str]] = {}  # kernel and shape -> target -> what the table has
    compilations = list(selected(options))
    # Started anew, not forked: what torch and the compilers keep of threads does not survive a fork.
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        names = ((target, named.name, kernel.name) for target, named, kernel in compilations)
        results = pool.map(compile_named, *zip(*names, strict=True)) if compilations else ()
        for (target, named, kernel), measured in zip(compilations, results, strict=True):
            cells.setdefault((kernel.name, named.name), {})[target] = (
                f"{measured.registers} / {measured.spilled} / {measured.shared_bytes / 1024:.0f}"
            )
            wrong = problem(kernel, named, target, measured)
            if wrong is not None:
                problems.append(f"{target} {kernel.name}, {named.name}: {wrong}")
            print(
                f"| {target} | {kernel.name} | {named.name} | {measured.registers} | {measured.spilled} | "
                f"{measured.shared_bytes} | {', '.join(measured.matrix_instructions) or '-'} |",
                flush=True,
            )
    if options.by_shape:
        print("\nregisters / spilled / shared memory in KiB\n")
        print("| kernel | shape | " + " | ".join(options.targets) + " |")
        print("|---|---|" + "---|" * len(options.targets))
        for (kernel_name, shape_name), by_target in sorted(cells.items(), key=lambda item: item[0][0]):
            columns = " | ".join(by_target.get(target, "") for target in options.targets)
            print(f"| {kernel_name} | {shape_name} | {columns} |")
    print(f"\n{len(compilations)} compilations with Triton {triton.__version__}")
    for line in problems:
        print(f"not as it must be: {line}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
