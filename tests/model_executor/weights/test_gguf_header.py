"""Headers of GGUF files that the format, or the gguf package's reader, does not allow."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.gemma3 import GEMMA3
from lamella.model_executor.weights.checkpoint import GgufCheckpoint
from lamella.model_executor.weights.gguf_header import read_gguf_header

STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(key, type_id, data):
    return text(key) + struct.pack("<I", type_id) + data


def tensor(name, shape, offset, type_id=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


def write(path, values=(), tensors=(), *, num_values=None, num_tensors=None, alignment=32, data=bytes(256)):
    header = b"GGUF" + struct.pack(
        "<IQQ",
        3,
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    header += b"".join(values) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def alignment_of(number, type_id=UINT32):
    return value("general.alignment", type_id, struct.pack("<I", number))


@pytest.mark.parametrize(
    ("alignment", "offsets"), [(None, (0, 32)), (64, (0, 64)), (8, (0, 16)), (None, (64, 0)), (None, (32, 128))]
)
def test_places_of_tensors_equal_the_packages_reading(tmp_path, alignment, offsets):
    values = [alignment_of(alignment)] if alignment else []
    tensors = [tensor(name, (2, 2), offset) for name, offset in zip("ab", offsets, strict=True)]
    path = write(tmp_path / "m.gguf", values, tensors, alignment=alignment or 32)
    theirs = {each.name: each.data_offset for each in gguf.GGUFReader(path).tensors}
    assert {each.name: each.offset_bytes for each in read_gguf_header(path).tensors.values()} == theirs


REFUSED = {
    "a key twice": ({"values": [value("a", BOOL, b"\1"), value("a", BOOL, b"\0")]}, "the key 'a' twice"),
    "a tensor twice": ({"tensors": [tensor("a", (2,), 0), tensor("a", (2,), 32)]}, "the tensor 'a' twice"),
    "misaligned": ({"tensors": [tensor("a", (2,), 0), tensor("b", (2,), 8)]}, "'b' lies at offset 8, .* alignment, 32"),
    "misaligned for the file's own": (
        {"values": [alignment_of(128)], "tensors": [tensor("a", (2,), 32)]},
        "'a' lies at offset 32, .* alignment, 128",
    ),
    "one place twice": (
        {"tensors": [tensor("a", (2,), 0), tensor("b", (2,), 0)]},
        "'b' begins at byte .*inside of 'a'",
    ),
    "overlap": ({"tensors": [tensor("b", (2,), 32), tensor("a", (9,), 0)]}, "'b' begins at byte .*inside of 'a'"),
    "alignment 0": ({"values": [alignment_of(0)]}, "general.alignment=0"),
    "alignment 48": ({"values": [alignment_of(48)]}, "general.alignment=48: must be a power of two"),
    "huge alignment": ({"values": [alignment_of(2**31)]}, "general.alignment=2147483648"),
    "alignment of another type": ({"values": [alignment_of(0x42000000, 6)]}, r"general\.alignment=32\.0"),
    "alignment as text": ({"values": [value("general.alignment", STRING, text("32"))]}, "general.alignment='32'"),
    "unknown type": ({"values": [value("a", 13, b"\0")]}, "'a' is of type 13"),
    "unknown type in an array": ({"values": [value("a", ARRAY, struct.pack("<IQ", 99, 1) + b"\0")]}, "of type 99"),
    "array of arrays": (
        {"values": [value("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT32, 0))]},
        "'a' is an array of arrays",
    ),
    "nested arrays without end": (
        {"values": [value("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 20_000)]},
        "'a' is an array of arrays",
    ),
    "truth value of 2": ({"values": [value("a", BOOL, b"\2")]}, "'a' is a truth value of 2"),
    "truth values of 2": ({"values": [value("a", ARRAY, struct.pack("<IQ", BOOL, 2) + b"\1\2")]}, "truth value of 2"),
    "no UTF-8": ({"values": [value(b"\xff\xfe", BOOL, b"\1")]}, "not UTF-8"),
    "value of no UTF-8": ({"values": [value("a", STRING, text(b"\xff"))]}, "not UTF-8"),
    "string of 2^64 bytes": ({"values": [text("a") + struct.pack("<IQ", STRING, 2**64 - 1)]}, "truncated"),
    "array of 2^63 numbers": ({"values": [value("a", ARRAY, struct.pack("<IQ", UINT32, 2**63))]}, "truncated"),
    "array of 2^60 strings": ({"values": [value("a", ARRAY, struct.pack("<IQ", STRING, 2**60))]}, "truncated"),
    "array with a string of 2^64 bytes": (
        {"values": [value("a", ARRAY, struct.pack("<IQQ", STRING, 2, 2**64 - 1))]},
        "truncated",
    ),
    "2^62 values": ({"num_values": 2**62}, "truncated|damaged|twice"),
    "2^62 tensors": ({"num_tensors": 2**62}, "truncated|damaged|twice"),
    "five dimensions": ({"tensors": [tensor("a", (1, 1, 1, 1, 1), 0)]}, "'a' claims 5 dimensions"),
    "2^31 dimensions": ({"tensors": [text("a") + struct.pack("<I", 2**31)]}, "'a' claims 2147483648 dimensions"),
    "huge shape": ({"tensors": [tensor("a", (2**63, 2**63), 0)]}, "'a' claims the shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_headers_are_refused(tmp_path, case):
    arguments, message = REFUSED[case]
    path = write(tmp_path / "m.gguf", **arguments)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*({message})"):
        read_gguf_header(path)


@pytest.mark.parametrize("offset", [256, 2**40, 2**62])
def test_a_tensor_beyond_the_end_of_the_file_is_named(tmp_path, offset):
    path = write(tmp_path / "m.gguf", tensors=[tensor("a", (2,), 0), tensor("b", (8,), offset)])
    checkpoint = GgufCheckpoint(path, GEMMA3.weights)
    assert checkpoint.tensors["a"].problem is None
    assert "b: its data ends at byte" in checkpoint.tensors["b"].problem


def test_two_names_of_one_parameter_are_refused(tmp_path):
    path = write(
        tmp_path / "m.gguf", tensors=[tensor("token_embd.weight", (2,), 0), tensor("embed_tokens.weight", (2,), 32)]
    )
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight, which it also holds as token_embd\.weight"):
        GgufCheckpoint(path, GEMMA3.weights)


def test_arrays_of_truth_values_equal_the_packages_reading(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_array("a", [True, False, True])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (field,) = [field for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items() if name == "a"]
    found = read_gguf_header(tmp_path / "m.gguf").metadata["a"]
    assert np.array_equal(found, field.contents())
    assert found.dtype == np.bool_
