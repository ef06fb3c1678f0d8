"""Headers of safetensors files: what is read equals the safetensors package's reading, and what that package, or the
format, refuses is refused."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lamella.errors import ModelLoadError
from lamella.model_executor.models.gemma3 import GEMMA3
from lamella.model_executor.weights.checkpoint import SafetensorsCheckpoint
from lamella.model_executor.weights.kv_scales import read_kv_scales
from lamella.model_executor.weights.safetensors_files import read_safetensors_header

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F32", "shape": [], "data_offsets": [32, 36]},
}
NUM_BYTES = 36


def write(path, header, num_bytes=NUM_BYTES):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def with_entry(name="a", **changes):
    return {**GOOD, name: {**GOOD[name], **changes}}


def test_the_header_equals_the_packages_reading(tmp_path):
    tensors = {
        "f32": torch.ones(3, 4),
        "f16": torch.ones(5, dtype=torch.float16),
        "bf16": torch.ones(1, 1, 2, dtype=torch.bfloat16),
        "single": torch.tensor(2.0),
        "empty": torch.ones(0, 7),
        "int": torch.ones(3, dtype=torch.int64),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = read_safetensors_header(tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        theirs = {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    assert {name: (entry.shape, entry.dtype_name) for name, entry in found.items()} == theirs


REFUSED = {
    "overlap": with_entry("b", data_offsets=[20, 28]),
    "gap": (with_entry("c", data_offsets=[36, 40]), 40),
    "not from 0": ({name: GOOD[name] for name in ("b", "c")}, NUM_BYTES),
    "data left over": (GOOD, NUM_BYTES + 1),
    "data missing": (GOOD, NUM_BYTES - 1),
    "shape and offsets disagree": with_entry(shape=[2, 4]),
    "negative size": with_entry(shape=[-2, -3]),
    "backwards": with_entry(data_offsets=[24, 0]),
    "one offset": with_entry(data_offsets=[0]),
    "three offsets": with_entry(data_offsets=[0, 24, 24]),
    "offsets of another type": with_entry(data_offsets=["0", "24"]),
    "fractional offsets": with_entry(data_offsets=[0.0, 24.0]),
    "huge shape": with_entry(shape=[2**62, 2**62]),
    "huge number": with_entry(shape=[10**400]),
    "true as a size": with_entry(shape=[True, 6]),
    "shape of another type": with_entry(shape=6),
    "nested shape": with_entry(shape=[[2, 3]]),
    "unknown dtype": with_entry(dtype="F33"),
    "dtype of another type": with_entry(dtype=32),
    "entry of another type": {**GOOD, "a": [1]},
    "entry without a shape": {**GOOD, "a": {"dtype": "F32", "data_offsets": [0, 24]}},
    "metadata of another type": {"__metadata__": ["pt"], **GOOD},
    "metadata that is no text": {"__metadata__": {"format": 1}, **GOOD},
    "a name twice": (json.dumps(GOOD)[:-1] + f', "a": {json.dumps(GOOD["a"])}}}').encode(),
    "no Unicode": {**GOOD, "d\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [36, 36]}},
    "not UTF-8": b'{"\xff": {}}',
    "deep": b"[" * 50_000,
    "a list": b"[1]",
    "empty": b"",
    "NaN": json.dumps(GOOD).replace("24", "NaN").encode(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_headers_are_refused(tmp_path, case):
    header, num_bytes = REFUSED[case] if isinstance(REFUSED[case], tuple) else (REFUSED[case], NUM_BYTES)
    path = write(tmp_path / "m.safetensors", header, num_bytes)
    with pytest.raises(ModelLoadError, match=r"m\.safetensors"):
        read_safetensors_header(path)


def test_every_single_byte_of_a_header_is_read_as_the_package_reads_it(tmp_path):
    """Each byte of a header replaced by a few others: where this reader accepts, so does the package, with the same
    shapes and dtypes."""
    good = write(tmp_path / "m.safetensors", GOOD).read_bytes()
    header_end = len(good) - NUM_BYTES
    num_accepted = 0
    for position in range(header_end):
        for byte in (ord("0"), ord("3"), ord(" "), ord('"'), 0xFF, good[position] ^ 1):
            path = tmp_path / "m.safetensors"
            path.write_bytes(good[:position] + bytes([byte]) + good[position + 1 :])
            try:
                found = read_safetensors_header(path)
            except ModelLoadError:
                continue
            num_accepted += 1
            try:
                with safe_open(path, framework="pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                    theirs = {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
            except SafetensorError:
                with pytest.raises(ModelLoadError, match="safetensors cannot open"):
                    SafetensorsCheckpoint([path], GEMMA3.weights)
                continue
            assert {name: (entry.shape, entry.dtype_name) for name, entry in found.items()} == theirs
    assert num_accepted > 50


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layers.2.self_attn.k_scale": torch.tensor(1.0)}, "no place in the model, which has 2 layers"),
        ({"layers.0.self_attn.k_scale": torch.ones(2)}, r"shape \[2\]"),
        ({"layers.0.self_attn.k_scale": torch.ones(10**6)}, r"shape \[1000000\]"),
        ({"layers.0.self_attn.v_scale": torch.tensor(float("nan"))}, r"\[nan\]"),
        ({"layers.0.self_attn.v_scale": torch.tensor(-1.0)}, r"\[-1\.0\]"),
        ({"layers.0.self_attn.v_scale": torch.tensor(2)}, "dtype I64"),
        (
            {"layers.0.self_attn.k_scale": torch.tensor(1.0), "layers.0.self_attn.k_proj.k_scale": torch.tensor(2.0)},
            "scale the same values; remove one",
        ),
    ],
)
def test_scales_of_an_8_bit_cache_are_checked(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        read_kv_scales(SafetensorsCheckpoint([tmp_path / "m.safetensors"], GEMMA3.weights), num_layers=2)
