"""Python's side of `csrc/attention.cpp` and `csrc/rope.cpp`: their structures and their calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from lamella.errors import InvariantError
from lamella.native.arguments import check_device, check_indices, check_vector, rotary_or_empty
from lamella.native.library import PANEL, Float, Int, NativeLibrary, Pointer, load_library

MAX_INT = 2**63 - 1


class Pages(ctypes.Structure):
    """One layer's pages; see csrc/pages.h for their layout. Addresses are of page 0.

    The kernels do not read the last field: it is what slots and page ids are checked against before they get them.
    """

    _fields_ = (
        ("keys", Pointer),
        ("values", Pointer),
        ("unit_floats", Int),
        ("page_tokens", Int),
        ("num_kv_heads", Int),
        ("k_dim", Int),
        ("v_dim", Int),
        ("num_ids", Int),
    )

    @property
    def num_slots(self) -> int:
        return self.num_ids * self.page_tokens


class Batch(ctypes.Structure):
    """One group's ragged batch and its tiles; addresses of int64 arrays that the caller keeps alive.

    The kernels do not read the last two fields: they are what a call is checked against.
    """

    _fields_ = (
        ("block_tables", Pointer),
        ("table_stride", Int),
        ("query_start", Pointer),
        ("seq_lens", Pointer),
        ("first_blocks", Pointer),
        ("first_keys", Pointer),
        ("tiles", Pointer),  # [num_tiles, 2]: request, its first query; what costs most comes first
        ("num_tiles", Int),
        ("tile_queries", Int),
        ("first_row", Int),  # row of the batch that row 0 of query and out is
        ("num_rows", Int),  # of query and out
        ("stop_id", Int),  # one more than the largest page id in the tables
    )


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch, and the arrays whose addresses it has."""

    batch: Batch
    arrays: tuple[np.ndarray, ...]


class RopeInput(ctypes.Structure):
    _fields_ = (
        ("qkv", Pointer),
        ("token_stride", Int),
        ("num_tokens", Int),
        ("num_heads", Int),
        ("query_weight", Pointer),
        ("key_weight", Pointer),
        ("eps", Float),
        ("rotary_dim", Int),
        ("cos", Pointer),
        ("sin", Pointer),
        ("table_stride", Int),
        ("positions", Pointer),
        ("slots", Pointer),
    )


class AttentionKernels:
    """The attention functions of one library. Tensors are float32 on the CPU, slots and positions int64."""

    def __init__(self, library: NativeLibrary) -> None:
        self.path = library.path
        self._attention = library.function(
            "attention", Pointer, Pointer, Pointer, Pointer, Int, Int, Int, Float, Float, Pointer, restype=Int
        )
        self._write_kv = library.function("write_kv", Pointer, Pointer, Int, Pointer, Int, Pointer, Int)
        self._qk_norm_rope_write = library.function("qk_norm_rope_write", Pointer, Pointer, Pointer)

    def attend(
        self,
        pages: Pages,
        batch: Batch,
        query: torch.Tensor,
        out: torch.Tensor,
        *,
        window_tokens: int,
        chunk_tokens: int,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """query [rows, num_heads, k_dim] -> out [rows, num_heads, v_dim], both contiguous. A window, chunk or cap of 0
        means that there is none.

        Raises InvariantError for shapes that do not fit, MemoryError where there is no memory for the tiles.
        """
        if query.dim() != 3 or query.shape[1] % max(1, pages.num_kv_heads) or not pages.num_kv_heads:
            raise InvariantError(
                f"query {tuple(query.shape)}: must be [rows, a multiple of {pages.num_kv_heads} heads, {pages.k_dim}]"
            )
        num_heads = query.shape[1]
        _check_heads("query", query, num_heads, pages.k_dim)
        _check_heads("out", out, num_heads, pages.v_dim)
        if not len(query) == len(out) == batch.num_rows:
            raise InvariantError(
                f"query has {len(query)} rows, out {len(out)}; the batch has {batch.num_rows}, and so must they"
            )
        if batch.stop_id > pages.num_ids:
            raise InvariantError(
                f"a block table holds page {batch.stop_id - 1}; this layer has pages 0 to {pages.num_ids - 1}"
            )
        if sinks is not None:
            check_vector("sinks", sinks, num_heads)
        if self._attention(
            ctypes.addressof(pages),
            ctypes.addressof(batch),
            query.data_ptr(),
            out.data_ptr(),
            num_heads,
            window_tokens,
            chunk_tokens,
            scale,
            softcap,
            None if sinks is None else sinks.data_ptr(),
        ):
            raise MemoryError(f"attention found no memory for tiles of {batch.tile_queries} queries")

    def write_kv(self, pages: Pages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """key [T, num_kv_heads, k_dim] and value [T, num_kv_heads, v_dim] into the slots [T], -1: nowhere.

        Tokens may be a stride apart, as in slices of one QKV tensor. Raises InvariantError, with nothing written, for
        what does not fit: slots too, each of which must be -1 or one of the pages'.
        """
        key = _tokens_apart("key", key, pages.num_kv_heads, pages.k_dim)
        value = _tokens_apart("value", value, pages.num_kv_heads, pages.v_dim)
        if len(value) != len(key):
            raise InvariantError(f"value has {len(value)} tokens; key has {len(key)}")
        check_indices("slots", slots, len(key), first=-1, stop=pages.num_slots)
        self._write_kv(
            ctypes.addressof(pages),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            slots.data_ptr(),
            key.shape[0],
        )

    def qk_norm_rope_write(
        self,
        pages: Pages,
        qkv: torch.Tensor,
        *,
        num_heads: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        slots: torch.Tensor,
        query_weight: torch.Tensor | None = None,
        key_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """RMS norm and rotary embedding of queries and keys; keys and values go to the slots. -> [T, num_heads, k_dim].

        qkv [T, num_heads * k_dim + num_kv_heads * (k_dim + v_dim)], rows may be a stride apart. cos and sin: one row
        of rotary_dim / 2 for each token, or for each position where `positions` [T] says which is a token's; trailing
        dimensions of 1 do not matter, and rotary_dim below k_dim leaves the rest of a head as it is. None for both: no
        rotary embedding. A weight [k_dim] of None: no norm. Raises InvariantError, with nothing written, for what does
        not fit: slots and positions too, which must be -1 or a slot of the pages, and rows of the tables.
        """
        k_dim, num_kv_heads = pages.k_dim, pages.num_kv_heads
        width = num_heads * k_dim + num_kv_heads * (k_dim + pages.v_dim)
        if qkv.dtype != torch.float32 or qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
            raise InvariantError(
                f"qkv {tuple(qkv.shape)} {qkv.dtype} with strides {qkv.stride()}: must be float32 [T, {width}] with "
                "contiguous rows"
            )
        check_device("qkv", qkv)
        cos, sin = rotary_or_empty(cos, sin, len(qkv))
        half = cos.shape[-1] if cos.dim() else 0
        if 2 * half > k_dim or cos.shape != sin.shape or cos.dtype != torch.float32 or sin.dtype != torch.float32:
            raise InvariantError(
                f"rotary tables {tuple(cos.shape)} {cos.dtype} and {tuple(sin.shape)} {sin.dtype}: must be float32 of "
                f"one shape, with at most {k_dim // 2} columns"
            )
        check_device("cos", cos)
        check_device("sin", sin)
        if not (cos.is_contiguous() and sin.is_contiguous()):
            cos, sin = cos.contiguous(), sin.contiguous()
        for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
            if weight is not None:
                check_vector(name, weight, k_dim)
                if k_dim % PANEL:
                    raise InvariantError(f"{name} [{k_dim}]: heads of {k_dim} cannot be normed; multiples of 16 can")
        num_tokens = qkv.shape[0]
        if slots.numel() != num_tokens or (positions is None and cos.numel() != num_tokens * half):
            raise InvariantError(
                f"{num_tokens} tokens came with {slots.numel()} slots and rotary tables {tuple(cos.shape)}; give one "
                "slot and one row of the tables for each, or `positions`"
            )
        check_indices("slots", slots, num_tokens, first=-1, stop=pages.num_slots)
        if positions is not None:
            check_indices("positions", positions, num_tokens, first=0, stop=cos.numel() // half if half else MAX_INT)
        query = qkv.new_empty(num_tokens, num_heads, k_dim)
        rope = RopeInput(
            qkv.data_ptr(),
            qkv.stride(0),
            num_tokens,
            num_heads,
            None if query_weight is None else query_weight.data_ptr(),
            None if key_weight is None else key_weight.data_ptr(),
            eps,
            2 * half,
            cos.data_ptr(),
            sin.data_ptr(),
            half,
            None if positions is None else positions.data_ptr(),
            slots.data_ptr(),
        )
        self._qk_norm_rope_write(ctypes.addressof(pages), ctypes.addressof(rope), query.data_ptr())
        return query


def attention_kernels() -> AttentionKernels | None:
    """Those of the library for this processor; None without one (`load_library` logs why)."""
    library = load_library()
    return None if library is None else AttentionKernels(library)


def _check_heads(name: str, tensor: torch.Tensor, *last_dims: int) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tuple(tensor.shape[1:]) != last_dims:
        raise InvariantError(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}: must be contiguous float32 "
            f"[rows, {', '.join(map(str, last_dims))}]"
        )
    check_device(name, tensor)


def _tokens_apart(name: str, tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    if tensor.dtype != torch.float32 or tensor.dim() != 3 or tuple(tensor.shape[1:]) != (heads, dim):
        raise InvariantError(
            f"{name} {tuple(tensor.shape)} {tensor.dtype}: must be float32 [tokens, {heads}, {dim}]; "
            "the native backend keeps KV in float32"
        )
    check_device(name, tensor)
    return tensor if tensor.stride()[1:] == (dim, 1) else tensor.contiguous()
