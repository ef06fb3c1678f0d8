"""What the kernels are launched with, for compilers without a GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from lamella.model_executor.sampling.device.choose import block_statistics_kernel, choose_kernel
from lamella.model_executor.sampling.device.device_sampler import BLOCK_COLUMNS, LAUNCH_OPTIONS
from lamella.model_executor.sampling.device.logprobs import logprobs_kernel

_TYPES = {
    "rows": "*i64", "parameters": "*fp64", "maxima": "*i32", "first_ids": "*i32", "masses": "*fp64", "scratch": "*i32",
    "best_logits": "*fp32", "token_ids": "*i64", "num_tops": "*i64", "log_totals": "*fp64", "token_logits": "*fp64",
    "ranks": "*i64", "top_ids": "*i64", "top_logits": "*fp32",
}  # fmt: skip
_ALIGNED_NUMBERS = ("row_stride", "vocab_size")  # multiples of 16 in any real model


@dataclass(frozen=True, slots=True)
class Launch:
    """One compilation. signature: argument -> type ("constexpr" for the constants); aligned: those divisible by 16."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, Any]


def launches(vocab_size: int = 262_144) -> list[Launch]:
    """Every kernel as `DeviceSampler` launches it for such a vocabulary."""
    shared = {"BLOCK": BLOCK_COLUMNS}
    padded = shared | {"BLOCKS_PADDED": triton.next_power_of_2(triton.cdiv(vocab_size, BLOCK_COLUMNS))}
    found = []
    for dtype in ("fp32", "bf16"):
        for has_draws in (False, True):
            draws = {"HAS_DRAWS": has_draws}
            found.append(
                _launch(f"block_statistics, {_what(has_draws)}", block_statistics_kernel, shared | draws, dtype)
            )
            found.append(_launch(f"choose, {_what(has_draws)}", choose_kernel, padded | draws, dtype))
        found.append(_launch("logprobs", logprobs_kernel, padded, dtype))
    return found


def _what(has_draws: bool) -> str:
    return "draws" if has_draws else "greedy"


def _launch(name: str, kernel: Any, constants: dict[str, Any], dtype: str) -> Launch:
    types = _TYPES | {"logits": f"*{dtype}"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    aligned = tuple(
        argument for argument, kind in signature.items() if kind.startswith("*") or argument in _ALIGNED_NUMBERS
    )
    return Launch(f"{name}, {dtype}", kernel, signature, constants, aligned, LAUNCH_OPTIONS)
