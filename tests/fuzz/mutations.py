"""Seeded mutants of the files that a model is made of.

The same base folder and number always give the same mutant, so a failure is named by its number alone.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = ("config", "tokenizer", "index", "safetensors", "gguf")
# Of further families, by folders of their names: mutants from FIRST_FAMILY_NUMBER on.
FAMILY_FORMATS = ("mxfp4", "rope", "backend", "expert_gguf")
FIRST_FAMILY_NUMBER = 100_000
_FILES = {
    "config": ("config.json", "config.json", "generation_config.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "index": ("model.safetensors.index.json",),
    "gguf": ("model.gguf",),
}
# Written into JSON as they stand, since Python's own writer has no form for them.
_RAW_VALUES = ("1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "-0.0", "1.0", "1e3", "0.1e-400")
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 255, 320, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63)),
    *(0.5, -2.5, 1e-30, 1e30),
    *("", " ", "0", "16", "true", "x", "<eos>", "<bos>", "default", "linear", "yarn", "full_attention"),
    *("../outside/m.safetensors", "/etc/hostname", "model\x00.safetensors", "\ud7ff\u0130", "a" * 5000),
    *([], {}, [0], [1, 2], [None], ["<eos>"], {"a": 1}, {"content": "<eos>"}, [[[[]]]]),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A folder with one file changed. note: which file, and how."""

    number: int
    format: str
    folder: Path
    note: str


def format_of(number: int) -> str:
    formats = FORMATS if number < FIRST_FAMILY_NUMBER else FAMILY_FORMATS
    return formats[number % len(formats)]


def make_mutant(base: Path, number: int, folder: Path) -> Mutant:
    """Write mutant `number` of the model in `base` to the new folder `folder`.

    base: has a folder "hf" (safetensors in two shards), a folder "gguf", and a folder for each of FAMILY_FORMATS. Files
    that are not changed are linked.
    """
    rng = random.Random(number)
    kind = format_of(number)
    source = base / (kind if kind in ("gguf", *FAMILY_FORMATS) else "hf")
    if kind in FAMILY_FORMATS:
        name = "model.gguf" if kind == "expert_gguf" else rng.choice(("config.json", "model.safetensors"))
    elif kind == "safetensors":
        name = rng.choice(sorted(path.name for path in source.glob("*.safetensors")))
    else:
        name = rng.choice(_FILES[kind])
    original = (source / name).read_bytes()
    changed, how = original, ""
    # A byte that changes to itself is no mutant.
    while changed == original:
        changed, how = _change(rng, kind, name, original)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != name:
            (folder / path.name).hardlink_to(path)
    (folder / name).write_bytes(changed)
    return Mutant(number, kind, folder, f"{name}: {how}")


def remove_mutant(mutant: Mutant) -> None:
    shutil.rmtree(mutant.folder, ignore_errors=True)


def _change(rng: random.Random, kind: str, name: str, data: bytes) -> tuple[bytes, str]:
    if name.endswith(".safetensors"):
        return _change_safetensors(rng, data)
    if name.endswith(".gguf"):
        return _change_gguf(rng, data)
    if name.endswith(".jinja"):
        return _change_bytes(rng, data, len(data))
    return _change_bytes(rng, data, len(data)) if rng.random() < 0.3 else _change_json(rng, data)


# Bytes


def _change_bytes(rng: random.Random, data: bytes, within: int) -> tuple[bytes, str]:
    """One change somewhere in the first `within` bytes."""
    at = rng.randrange(max(1, within))
    length = rng.choice((1, 1, 2, 4, 8, 64))
    how = rng.randrange(7)
    if how == 0:
        bit = 1 << rng.randrange(8)
        return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
    if how == 1:
        new = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * length
        return data[:at] + new + data[at + length :], f"{length} bytes at {at} are {new[:1]!r}"
    if how == 2:
        return data[:at], f"cut at {at}"
    if how == 3:
        return data[:at] + data[at + length :], f"{length} bytes at {at} removed"
    if how == 4:
        return data[:at] + rng.randbytes(length) + data[at:], f"{length} random bytes put in at {at}"
    if how == 5:
        other = rng.randrange(max(1, within))
        piece = data[other : other + length]
        return data[:at] + piece + data[at + length :], f"{length} bytes at {at} are those at {other}"
    return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"")) + data + rng.choice((b"", b"\x00", b"{}")), "wrapped"


# JSON


def _change_json(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    document = json.loads(data)
    text, how = _changed_document(rng, document)
    return text.encode("utf-8", "surrogatepass"), how


def _changed_document(rng: random.Random, document: Any) -> tuple[str, str]:
    """`document` with one node changed, as text."""
    path = _random_path(rng, document)
    parent, key = document, None
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1] if path else None
    where = "/".join(map(str, path)) or "(top)"
    how = rng.randrange(8)
    if key is None or how <= 3:
        raw = rng.random() < 0.25
        value = rng.choice(_RAW_VALUES) if raw else rng.choice(_VALUES)
        new = "@raw@" if raw else value
        if key is None:
            document = new
        else:
            parent[key] = new
        text = json.dumps(document)
        return (text.replace('"@raw@"', value) if raw else text), f"{where} = {value!r:.40}"
    if how == 4:
        del parent[key]
        return json.dumps(document), f"{where} removed"
    if how == 5 and isinstance(parent, dict):
        value = rng.choice(_VALUES)
        parent["@twice@"] = value
        return json.dumps(document).replace('"@twice@"', json.dumps(key)), f"{where} a second time, as {value!r:.40}"
    if how == 6 and isinstance(parent, dict):
        new_key = rng.choice((key + "s", key.upper(), "", *parent))
        parent[new_key] = parent.pop(key)
        return json.dumps(document), f"{where} renamed {new_key!r}"
    if how == 7 and rng.random() < 0.2:
        depth = rng.choice((50, 20_000))
        parent[key] = "@deep@"
        return json.dumps(document).replace('"@deep@"', "[" * depth + "]" * depth), f"{where} nested {depth} deep"
    value = parent[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        parent[key] = rng.choice((value + 1, value - 1, -value, value * 2, value / 2, str(value), [value]))
    elif isinstance(value, list):
        parent[key] = rng.choice((value[:-1], value * 2, value[::-1], {"0": value}))
    else:
        parent[key] = rng.choice(([value], {"content": value}, str(value)))
    return json.dumps(document), f"{where}: {value!r:.30} -> {parent[key]!r:.40}"


def _random_path(rng: random.Random, document: Any) -> list[Any]:
    """A walk down from the top that stops anywhere."""
    path: list[Any] = []
    node = document
    while isinstance(node, (dict, list)) and node and (not path or rng.random() < 0.75):
        # Long lists and vocabularies would otherwise take nearly all mutants.
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(keys)
        path.append(key)
        node = node[key]
    return path


# Safetensors


def _change_safetensors(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    (length,) = struct.unpack_from("<Q", data)
    where = rng.random()
    if where < 0.4:  # values are not checked by anything, and load as they are
        return _change_bytes(rng, data, 8 + length if where < 0.25 else len(data))
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.5:
        text, how = _changed_document(rng, header)
    else:
        names = sorted(set(header) - {"__metadata__"})
        name, other = rng.sample(names, 2)
        entry = header[name]
        begin, end = entry["data_offsets"]
        choices = {
            "data_offsets": rng.choice(
                (
                    [begin + 4, end + 4],
                    [begin - 1, end],
                    [end, begin],
                    [begin, end + 2**40],
                    header[other]["data_offsets"],
                )
            ),
            "shape": rng.choice((entry["shape"][::-1], [*entry["shape"], 1], [2**40, 2**40], [], [-1], [0])),
            "dtype": rng.choice(("F16", "BF16", "F64", "I8", "I32", "f32", "Q4", "BOOL", "F8_E4M3")),
        }
        field = rng.choice(list(choices))
        entry[field] = choices[field]
        text, how = json.dumps(header), f"{name}/{field} = {choices[field]!r:.40}"
    encoded = text.encode("utf-8", "surrogatepass")
    claimed = len(encoded) if rng.random() < 0.9 else rng.choice((0, 2**31, 2**63, len(encoded) - 1, len(encoded) + 8))
    return struct.pack("<Q", claimed) + encoded + data[8 + length :], f"{how}; header length {claimed}"


# GGUF

_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def _change_gguf(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    places = _gguf_places(data)
    where = rng.random()
    if where < 0.4:
        return _change_bytes(rng, data, places["end"] if where < 0.3 else len(data))
    field, (at, code) = rng.choice(sorted(places["numbers"].items()))
    size = struct.calcsize("<" + code)
    if code in "fd":
        value: Any = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30, 2.0))
    elif code == "?":
        value = rng.choice((True, False))
    else:
        bits = 8 * size
        value = rng.choice((0, 1, 2, 3, 5, 8, 9, 12, 255, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1)) % 2**bits
        if rng.random() < 0.3:
            old = int.from_bytes(data[at : at + size], "little")
            value = (old + rng.choice((-1, 1, 32, 4))) % 2**bits
        return data[:at] + value.to_bytes(size, "little") + data[at + size :], f"{field} = {value}"
    return data[:at] + struct.pack("<" + code, value) + data[at + size :], f"{field} = {value}"


def _gguf_places(data: bytes) -> dict[str, Any]:
    """Where each number of the header lies (name -> (offset, struct code)), lengths and types included, and its end."""
    numbers: dict[str, tuple[int, str]] = {"version": (4, "I"), "num_tensors": (8, "Q"), "num_values": (16, "Q")}
    num_tensors, num_values = struct.unpack_from("<QQ", data, 8)
    at = 24

    def string(name: str) -> str:
        nonlocal at
        numbers[f"{name} (length)"] = (at, "Q")
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8 + length
        return data[at - length : at].decode()

    def value(name: str, type_id: int) -> None:
        nonlocal at
        if type_id == _GGUF_STRING:
            string(name)
        elif type_id == _GGUF_ARRAY:
            numbers[f"{name} (element type)"] = (at, "I")
            numbers[f"{name} (count)"] = (at + 4, "Q")
            element, count = struct.unpack_from("<IQ", data, at)
            at += 12
            for index in range(count):
                value(f"{name}[{index}]" if index < 8 else f"{name}[...]", element)
        else:
            numbers[name] = (at, _GGUF_SCALARS[type_id])
            at += struct.calcsize("<" + _GGUF_SCALARS[type_id])

    for index in range(num_values):
        key = string(f"key {index}")
        numbers[f"{key} (type)"] = (at, "I")
        (type_id,) = struct.unpack_from("<I", data, at)
        at += 4
        value(key, type_id)
    for index in range(num_tensors):
        name = string(f"tensor {index}")
        numbers[f"{name} (dimensions)"] = (at, "I")
        (num_dims,) = struct.unpack_from("<I", data, at)
        at += 4
        for dim in range(num_dims):
            numbers[f"{name} (dimension {dim})"] = (at, "Q")
            at += 8
        numbers[f"{name} (storage)"] = (at, "I")
        numbers[f"{name} (offset)"] = (at + 4, "Q")
        at += 12
    return {"numbers": numbers, "end": at}
