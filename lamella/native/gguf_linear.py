"""Linear layers straight from the quantised blocks of a GGUF file: no float copy of the weights.

Blocks are repacked once into panels of 16 outputs (csrc/gguf_blocks.cpp), at about the same size. The kernel
unpacks each weight to the float that the format defines, so results equal those of a float layer on dequantised
weights, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamella.errors import ConfigError, InvariantError
from lamella.native.arguments import check_panels, require_library
from lamella.native.int8 import ROWS_AT_ONCE, check_activations, check_gathered, contiguous_ids
from lamella.native.library import PANEL, Float, Int, Pointer

GROUP_INPUTS = 32
_MXFP4_ONE = 127  # the scale 2^0
_MXFP4_MOST = 252  # 6 times that scale is finite


class Format(NamedTuple):
    """A GGUF type: its number in the file, inputs and bytes of a block there, and how a block of a panel is made and
    how large it is."""

    number: int
    block_inputs: int
    block_bytes: int
    panel_inputs: int  # of a block of a panel
    panel_words: int
    repack: Callable[[np.ndarray], np.ndarray]  # uint8 [N, file blocks, bytes] -> uint32 [N, panel blocks, words]


@dataclass(frozen=True, slots=True, eq=False)
class GgufWeight:
    """Weights [num_out, num_in] of a GGUF type, in panels."""

    panels: Tensor  # int32 [ceil(num_out / 16), blocks, words, 16]
    type_name: str
    num_out: int
    num_in: int

    def __post_init__(self) -> None:
        form = FORMATS.get(self.type_name)
        if form is None:
            raise InvariantError(f"type_name={self.type_name!r} has no kernel; there are {', '.join(sorted(FORMATS))}")
        if self.num_in % form.block_inputs:
            raise InvariantError(
                f"num_in={self.num_in} is no number of whole blocks; it must be a multiple of the {form.block_inputs} "
                f"inputs of a {self.type_name} block"
            )
        shape = (-(-self.num_out // PANEL), -(-self.num_in // form.panel_inputs), form.panel_words, PANEL)
        check_panels("panels", self.panels, shape, torch.int32)

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes


def _join(fields: np.ndarray, bits: int) -> np.ndarray:
    """[..., count] of small integers -> uint32 [..., count * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    fields = fields.astype(np.uint32) & np.uint32((1 << bits) - 1)
    fields = fields.reshape(*fields.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(fields << shifts, axis=-1)


def _halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at a byte of each block, as bits: uint32. Raises ConfigError where one is not finite."""
    bits = blocks[..., offset].astype(np.uint32) | (blocks[..., offset + 1].astype(np.uint32) << 8)
    if bool(((bits & 0x7C00) == 0x7C00).any()):
        raise ConfigError("a block has a scale that is not finite; the weights must be finite")
    return bits


def _pair(scales: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Groups [N, groups] of scales, [N, groups, words] -> blocks of two: [N, pairs, 1 + 2 words]."""
    missing = scales.shape[1] % 2
    scales = np.pad(scales, ((0, 0), (0, missing))).reshape(scales.shape[0], -1, 2)
    words = np.pad(words, ((0, 0), (0, missing), (0, 0))).reshape(words.shape[0], -1, 2 * words.shape[2])
    return np.concatenate([scales[..., :1] | (scales[..., 1:] << 16), words], axis=-1)


def _repack_q8_0(blocks: np.ndarray) -> np.ndarray:
    return _pair(_halves(blocks, 0), _join(blocks[..., 2:], 8))


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """[..., 16] of a block: the low halves are the first 16 inputs, the high ones the last -> uint32 [..., 4]."""
    return _join(np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1), 4)


def _repack_q4_0(blocks: np.ndarray) -> np.ndarray:
    return _pair(_halves(blocks, 0), _nibbles(blocks[..., 2:]))


def _repack_q4_1(blocks: np.ndarray) -> np.ndarray:
    ranges = _halves(blocks, 0) | (_halves(blocks, 2) << 16)
    return np.concatenate([ranges[..., None], _nibbles(blocks[..., 4:])], axis=-1)


def _repack_q5_0(blocks: np.ndarray) -> np.ndarray:
    return _pair(_halves(blocks, 0), np.concatenate([_nibbles(blocks[..., 6:]), _join(blocks[..., 2:6], 8)], axis=-1))


def _repack_mxfp4(blocks: np.ndarray) -> np.ndarray:
    """Groups of four blocks: their scales as bytes, then the codes of each, even inputs before odd ones in a word."""
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    # Whatever scale a block of zeros has; padding has 2^0.
    scales = np.where((codes & 7).any(axis=-1), blocks[..., 0], _MXFP4_ONE)
    if bool((scales > _MXFP4_MOST).any()):
        raise ConfigError(
            f"an MXFP4 block has the scale 2^{int(scales.max()) - _MXFP4_ONE}; the largest of which all numbers are "
            f"finite floats is 2^{_MXFP4_MOST - _MXFP4_ONE}"
        )
    halves = codes.reshape(*codes.shape[:-1], 4, 4, 2).swapaxes(-2, -1).reshape(codes.shape)
    words = _join(halves, 4)  # [N, blocks, 4]
    missing = -scales.shape[1] % 4
    scales = np.pad(scales, ((0, 0), (0, missing)), constant_values=_MXFP4_ONE).reshape(scales.shape[0], -1, 4)
    words = np.pad(words, ((0, 0), (0, missing), (0, 0))).reshape(words.shape[0], -1, 16)
    return np.concatenate([_join(scales, 8), words], axis=-1)


def _repack_q5_1(blocks: np.ndarray) -> np.ndarray:
    ranges = _halves(blocks, 0) | (_halves(blocks, 2) << 16)
    return np.concatenate([ranges[..., None], _nibbles(blocks[..., 8:]), _join(blocks[..., 4:8], 8)], axis=-1)


def _ranges_of_k(blocks: np.ndarray) -> np.ndarray:
    """d and dmin, then the 6-bit factors of each for the 8 groups of a block, from its first 16 bytes."""
    ranges = _halves(blocks, 0) | (_halves(blocks, 2) << 16)
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return np.concatenate([ranges[..., None], _join(factors, 8), _join(minima, 8)], axis=-1)


def _nibbles_of_k(bytes_: np.ndarray) -> np.ndarray:
    """[..., 128] of a block: 32 bytes are two groups, the low halves first -> uint32 [..., 8 groups, 4]."""
    pairs = bytes_.reshape(*bytes_.shape[:-1], 4, 1, 32)
    return _join(np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*bytes_.shape[:-1], 8, 32), 4)


def _repack_q4_k(blocks: np.ndarray) -> np.ndarray:
    nibbles = _nibbles_of_k(blocks[..., 16:]).reshape(*blocks.shape[:-1], 32)
    return np.concatenate([_ranges_of_k(blocks), nibbles], axis=-1)


def _repack_q5_k(blocks: np.ndarray) -> np.ndarray:
    shape = blocks.shape[:-1]
    group = np.arange(8, dtype=np.uint8)[:, None]
    tops = blocks[..., None, 16:48] >> group & 1  # bit g of byte i: of input i of group g
    groups = np.concatenate([_nibbles_of_k(blocks[..., 48:]), _join(tops, 1)], axis=-1).reshape(*shape, 40)
    return np.concatenate([_ranges_of_k(blocks), groups], axis=-1)


def _repack_q6_k(blocks: np.ndarray) -> np.ndarray:
    shape = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*shape, 2, 2, 32)  # half, which 32 bytes, byte
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 8, 32)
    tops = np.concatenate([high & 3, high >> 2 & 3, high >> 4 & 3, high >> 6], axis=-2).reshape(*shape, 8, 32)
    groups = np.concatenate([_join(nibbles, 4), _join(tops, 2)], axis=-1).reshape(*shape, 48)
    return np.concatenate([_halves(blocks, 208)[..., None], _join(blocks[..., 192:208], 8), groups], axis=-1)


FORMATS = {
    "Q4_0": Format(2, 32, 18, 64, 9, _repack_q4_0),
    "Q4_1": Format(3, 32, 20, 32, 5, _repack_q4_1),
    "Q5_0": Format(6, 32, 22, 64, 11, _repack_q5_0),
    "Q5_1": Format(7, 32, 24, 32, 6, _repack_q5_1),
    "Q8_0": Format(8, 32, 34, 64, 17, _repack_q8_0),
    "Q4_K": Format(12, 256, 144, 256, 37, _repack_q4_k),
    "Q5_K": Format(13, 256, 176, 256, 45, _repack_q5_k),
    "Q6_K": Format(14, 256, 210, 256, 53, _repack_q6_k),
    "MXFP4": Format(39, 32, 17, 128, 17, _repack_mxfp4),
}


def pack_gguf(data: np.ndarray, type_name: str) -> GgufWeight:
    """Blocks as a GGUF file has them, uint8 [num_out, bytes of a row], repacked.

    Raises ConfigError for types that are not in FORMATS, and for rows that are not whole blocks.
    """
    form = FORMATS.get(type_name)
    if form is None:
        raise ConfigError(f"GGUF type {type_name} has no kernel; there are {', '.join(sorted(FORMATS))}")
    if data.dtype != np.uint8 or data.ndim != 2 or data.size == 0 or data.shape[1] % form.block_bytes:
        raise ConfigError(
            f"data is {data.dtype} {list(data.shape)}; {type_name} takes uint8 [outputs, n * {form.block_bytes}]"
        )
    num_out, num_blocks = data.shape[0], data.shape[1] // form.block_bytes
    num_in = num_blocks * form.block_inputs
    num_panels = -(-num_out // PANEL)
    panels = torch.empty(num_panels, -(-num_in // form.panel_inputs), form.panel_words, PANEL, dtype=torch.int32)
    for begin in range(0, num_out, ROWS_AT_ONCE):
        rows = data[begin : begin + ROWS_AT_ONCE].reshape(-1, num_blocks, form.block_bytes)
        words = form.repack(np.pad(rows, ((0, -len(rows) % PANEL), (0, 0), (0, 0))))
        part = torch.from_numpy(words.view(np.int32)).view(-1, PANEL, *words.shape[1:])
        panels[begin // PANEL : begin // PANEL + part.shape[0]] = part.permute(0, 2, 3, 1)
    return GgufWeight(panels, type_name, num_out, num_in)


class _Functions(NamedTuple):
    linear: Callable[..., None]
    gather_rows: Callable[..., int]


@functools.cache
def _functions() -> _Functions:
    library = require_library()
    return _Functions(
        library.function("gguf_linear", *[Pointer] * 3, *[Int] * 5),
        library.function("gguf_gather_rows", Pointer, *[Int] * 3, Pointer, Int, Float, Pointer, restype=Int),
    )


def linear_gguf(x: Tensor, weight: GgufWeight) -> Tensor:
    """x @ weight^T, float32 [..., num_out] of contiguous float32 [..., num_in]; meant for few rows.

    Equals the chain sum = fma(x[k], w[k], sum) over the dequantised weights bit for bit, whatever the other rows and
    threads. Raises ConfigError for other types or shapes.
    """
    check_activations(x, weight.num_in)
    out = x.new_empty(*x.shape[:-1], weight.num_out)
    _functions().linear(
        x.data_ptr(), weight.panels.data_ptr(), out.data_ptr(), weight.num_out, FORMATS[weight.type_name].number,
        x.numel() // weight.num_in, weight.num_out, weight.num_in,
    )  # fmt: skip
    return out


def gather_rows_gguf(weight: GgufWeight, ids: Tensor, factor: float = 1.0) -> Tensor:
    """The weights of outputs `ids` (int64, any shape), dequantised, times `factor`: float32 [*ids.shape, num_in].

    Raises ConfigError for other types, IndexError for ids outside of [0, num_out).
    """
    ids = contiguous_ids(ids)
    out = torch.empty(*ids.shape, weight.num_in)
    wrong = _functions().gather_rows(
        weight.panels.data_ptr(), FORMATS[weight.type_name].number, weight.num_out, weight.num_in, ids.data_ptr(),
        ids.numel(), factor, out.data_ptr(),
    )  # fmt: skip
    check_gathered(wrong, ids, weight.num_out)
    return out
