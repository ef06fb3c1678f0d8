"""Files of prefixes: what is written is read, and what is damaged, cut or another's is refused in one way."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors import safe_open

from lamella.errors import PrefixFileError
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.model_executor import prefix_file
from lamella.model_executor.prefix_file import OpenPrefix, PrefixTies, SavedPrefix, read_prefix_file, write_prefix_file
from lamella.model_executor.prefix_kv import LayerTokens

SHAPE = {"num_kv_heads": 2, "k_dim": 4, "v_dim": 3, "itemsize_bytes": 4}
SPECS = {0: SlidingWindowSpec(window_tokens=5, **SHAPE), 2: FullAttentionSpec(**SHAPE)}
TIES = PrefixTies(model="a" * 64, weights="w", arithmetic="cpu", kv_dtype="F32", layers="0 sliding; 2 full")
LENGTHS = {0: 6, 2: 21}
NUM_MUTANTS = int(os.environ.get("LAMELLA_PREFIX_MUTANTS", "60"))


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def make_prefix(salt: str | None = "tenant é") -> SavedPrefix:
    torch.manual_seed(0)
    layers = {layer: LayerTokens(words(length, 2, 4), words(length, 2, 3)) for layer, length in LENGTHS.items()}
    return SavedPrefix(np.arange(5, 26, dtype=np.int32), salt, layers)


def whole(opened: OpenPrefix) -> SavedPrefix:
    """All that an open file gives, each token put where the file says that it belongs."""
    num_tokens = len(opened.token_ids)
    found = {
        layer: LayerTokens(*(torch.zeros(num_tokens, 2, dim, dtype=torch.int32) for dim in (4, 3)))
        for layer in opened.lengths
    }

    def take(layer: int, name: str, position: int, tokens: torch.Tensor) -> None:
        getattr(found[layer], name)[position : position + len(tokens)] = tokens

    opened.each(take)
    layers = {
        layer: LayerTokens(*(part[num_tokens - opened.lengths[layer] :] for part in (both.keys, both.values)))
        for layer, both in found.items()
    }
    return SavedPrefix(opened.token_ids, opened.salt, layers)


def read(path, **changes) -> SavedPrefix:
    with read_prefix_file(path, dataclasses.replace(TIES, **changes), SPECS, 40) as opened:
        return whole(opened)


def is_equal(one: SavedPrefix, other: SavedPrefix) -> bool:
    return (
        np.array_equal(one.token_ids, other.token_ids)
        and one.salt == other.salt
        and set(one.layers) == set(other.layers)
        and all(
            torch.equal(one.layers[layer].keys, other.layers[layer].keys)
            and torch.equal(one.layers[layer].values, other.layers[layer].values)
            for layer in one.layers
        )
    )


@pytest.fixture
def path(tmp_path):
    write_prefix_file(tmp_path / "prefix", TIES, make_prefix())
    return tmp_path / "prefix"


@pytest.mark.parametrize("salt", [None, "tenant é", '"sha256":"' + "0" * 64 + '"'])
@pytest.mark.parametrize("piece_bytes", [1, 100, 512 << 10])
def test_what_is_written_is_read(tmp_path, salt, piece_bytes, monkeypatch):
    monkeypatch.setattr(prefix_file, "_PIECE_BYTES", piece_bytes)
    prefix = make_prefix(salt)
    num_bytes = write_prefix_file(tmp_path / "prefix", TIES, prefix)
    assert (tmp_path / "prefix").stat().st_size == num_bytes
    assert is_equal(read(tmp_path / "prefix"), prefix)
    assert [one.name for one in tmp_path.iterdir()] == ["prefix"], "nothing else is left"


def test_the_library_of_the_format_reads_it(path):
    """The container is safetensors, as its own library understands it."""
    prefix = make_prefix()
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "lamella.prefix"
        assert file.get_tensor("token_ids").tolist() == prefix.token_ids.tolist()
        for layer, tokens in prefix.layers.items():
            assert torch.equal(file.get_tensor(f"layers.{layer}.keys").view(torch.int32), tokens.keys)
            assert torch.equal(file.get_tensor(f"layers.{layer}.values").view(torch.int32), tokens.values)


def test_reading_takes_little_memory_of_its_own(tmp_path, monkeypatch):
    """Four buffers at most, however long the file is."""
    layers = {layer: LayerTokens(words(5000, 2, 4), words(5000, 2, 3)) for layer in SPECS}
    write_prefix_file(tmp_path / "long", TIES, SavedPrefix(np.arange(5000, dtype=np.int32), None, layers))
    tracemalloc.start()
    try:
        with read_prefix_file(tmp_path / "long", TIES, SPECS, 5000) as whole_file:
            whole_file.each(lambda *_: None)
        monkeypatch.setattr(prefix_file, "_PIECE_BYTES", 1 << 12)
        write_prefix_file(tmp_path / "cut", TIES, SavedPrefix(np.arange(5000, dtype=np.int32), None, layers))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with read_prefix_file(tmp_path / "cut", TIES, SPECS, 5000) as cut_file:
            cut_file.each(lambda *_: None)
            assert cut_file.kv_bytes == 5000 * 2 * 2 * 7 * 4
        assert tracemalloc.get_traced_memory()[1] - before < 400_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", ["byte", "cut"])
def test_a_file_that_changes_after_it_was_checked_is_refused(path, change):
    raw = path.read_bytes()
    with read_prefix_file(path, TIES, SPECS, 40) as opened:
        if change == "byte":
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        else:
            path.write_bytes(raw[:-1])
        with pytest.raises(PrefixFileError, match="has changed while it was read; load it again"):
            whole(opened)
        path.write_bytes(raw)
        assert is_equal(whole(opened), make_prefix())


def test_a_file_that_is_replaced_after_it_was_checked_is_the_old_one(path):
    with read_prefix_file(path, TIES, SPECS, 40) as opened:
        other = dataclasses.replace(make_prefix(), token_ids=np.arange(50, 71, dtype=np.int32))
        write_prefix_file(path, TIES, other)
        assert is_equal(whole(opened), make_prefix())
    assert is_equal(read(path), other)


@pytest.mark.parametrize("name", ["model", "weights", "arithmetic", "kv_dtype", "layers"])
def test_files_of_other_ties_are_refused(path, name):
    with pytest.raises(PrefixFileError, match=f"was saved with {name}=.*, and this engine has {name}='other'"):
        read(path, **{name: "other"})


def test_prefixes_that_are_too_long_are_refused(path):
    with pytest.raises(PrefixFileError, match=r"a prefix of 21 tokens, and this engine takes 1 to 20"):
        read_prefix_file(path, TIES, SPECS, 20)
    with read_prefix_file(path, TIES, SPECS, 21) as opened:
        assert is_equal(whole(opened), make_prefix())


def signed(path, change) -> None:
    """Rewrite the header by `change(header)`, with checksums that hold: not damaged, but made by something else."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    header["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    digest = prefix_file.hashlib.sha256(text).hexdigest().encode()
    text = text.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + digest)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("layers.0.keys"), "layer 0"),
        (lambda header: header.update({"layers.1.keys": header["layers.0.keys"]}), "other tensors"),
        (lambda header: header["layers.2.keys"].update(shape=[20, 2, 4]), "layer 2"),
        (lambda header: header["layers.2.keys"].update(shape="long"), "layer 2"),
        (lambda header: header["layers.0.keys"].update(dtype="BF16"), "layers.0.keys"),
        (lambda header: header["layers.0.values"].update(data_offsets=[0, 10**15]), "layers.0.values"),
        (lambda header: header["token_ids"].update(shape=[-1]), "of 0 tokens"),
        (lambda header: header["token_ids"].update(shape=[True]), "of 0 tokens"),
        (lambda header: header["__metadata__"].update(version="0"), "version '0' of the format, and this is 3"),
        (lambda header: header["__metadata__"].pop("format"), "without a prefix"),
        (lambda header: header["__metadata__"].update(salt="3"), "has the salt '3'"),
        (lambda header: header["__metadata__"].update(salt="{"), "has the salt"),
        (lambda header: header["__metadata__"].pop("salt"), "has the salt"),
        (lambda header: header["__metadata__"].update(data_sha256="f" * 64), "its tensors have another checksum"),
        (lambda header: header.update(__metadata__=[]), "no JSON object"),
    ],
)  # fmt: skip
def test_headers_that_say_something_else_are_refused(path, change, message):
    if message == "no JSON object":
        path.write_bytes(struct.pack("<Q", 19) + b'{"__metadata__":[]}')
    else:
        signed(path, change)
    with pytest.raises(PrefixFileError, match=message):
        read(path)


@pytest.mark.parametrize("seed", range(NUM_MUTANTS))
def test_a_mutated_file_is_refused_or_equal(path, seed):
    """Bytes changed, cut off, put in, left out or exchanged; the parts are not told apart."""
    draw = random.Random(seed)
    raw = bytearray(path.read_bytes())
    header_end = 8 + struct.unpack("<Q", raw[:8])[0]
    place = draw.randrange(draw.choice((8, header_end, len(raw))))
    kind = draw.choice(("flip", "flip", "byte", "cut", "insert", "leave out", "swap", "repeat"))
    if kind == "flip":
        raw[place] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        raw[place] = draw.choice(b'\x00\xff0"{}[],: a')
    elif kind == "cut":
        del raw[place:]
    elif kind == "insert":
        raw[place:place] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 70)))
    elif kind == "leave out":
        del raw[place : place + draw.randint(1, 70)]
    elif kind == "swap":
        other = draw.randrange(len(raw))
        raw[place], raw[other] = raw[other], raw[place]
    else:
        raw += raw[place:]
    path.write_bytes(bytes(raw))
    with suppress(PrefixFileError):
        assert is_equal(read(path), make_prefix())


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("a text, and no prefix at all")
    for name in ("missing", "pipe", "empty", "text", "."):
        with pytest.raises(PrefixFileError, match="path="):
            read(tmp_path / name)
    with pytest.raises(PrefixFileError, match="cannot be written"):
        write_prefix_file(tmp_path / "no folder" / "prefix", TIES, make_prefix())


def test_a_file_that_cannot_be_finished_leaves_the_old_one(path, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(prefix_file.os, "fsync", fail)
    with pytest.raises(PrefixFileError, match="the disk is full"):
        write_prefix_file(path, TIES, make_prefix(None))
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["prefix"]
