"""A prefix in a file: its token ids, the full-attention KV of all of them and the sliding KV of the last ones.

A safetensors file: `token_ids` (int32 [n]) and, for each layer that keeps KV, `layers.<i>.keys` and `layers.<i>.values`
([m, num_kv_heads, dim], of the last m tokens), in KV's own dtype. Its metadata say what it is tied to, and have two
checksums: `data_sha256` of all tensors, by pieces of at most 512 KiB, and `sha256` of the header, in which its own 64
digits count as zeros. A file is compared with both before anything of it is used. Its KV is read twice, once to compare
it and once to use it, through buffers of a piece's size: the first touch of as much fresh memory as the KV takes may
cost more than that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch

from lamella.argument_checks import shown
from lamella.errors import ModelLoadError, PrefixFileError
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.prefix_kv import LayerTokens, TakeTokens, word_of
from lamella.model_executor.weights.regular_files import open_regular_file

Result = TypeVar("Result")

FORMAT, VERSION = "lamella.prefix", "3"
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_MAX_HEADER_BYTES = 1 << 24
_ALIGNMENT_BYTES = 64
_PIECE_BYTES = 512 << 10
_NO_DIGEST = b"0" * 64
_OWN_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')


@dataclass(frozen=True, slots=True)
class PrefixTies:
    """What a file's KV is tied to: that of other models, of other weights or arithmetic differs in value, that of other
    dtypes and layers in form.

    model: see `model_identity`. layers: a description of each layer's KV. adapter: the digest of the adapter that it
    was computed with; empty: of none.
    """

    model: str
    weights: str
    arithmetic: str
    kv_dtype: str
    layers: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """What is to be written. token_ids: int32 [n]. layers: K and V of the last tokens, by layer."""

    token_ids: np.ndarray
    salt: str | None
    layers: Mapping[int, LayerTokens]


class _Piece(NamedTuple):
    """A run of rows of one tensor. begin, end: its bytes in the file, from the end of the header on."""

    tensor: str
    first_row: int
    begin: int
    end: int


class OpenPrefix:
    """A file that agrees with its checksums, and stays open until `close`: whatever its name stands for by now.

    token_ids: int32 [n]. lengths: of how many last tokens it has K and V, by layer.
    """

    def __init__(
        self,
        refused: str,
        file: BinaryIO,
        data_start: int,
        shapes: Mapping[str, tuple[int, ...]],
        words: Mapping[str, torch.dtype],
    ) -> None:
        self._refused, self._file, self._data_start = refused, file, data_start
        self._shapes, self._words = shapes, words
        self._pieces = _pieces({name: (shape, words[name].itemsize) for name, shape in shapes.items()})
        self._digests: list[bytes] = []
        self.token_ids = np.empty(shapes["token_ids"], np.int32)
        self.salt: str | None = None
        self.lengths = {int(name.split(".")[1]): shape[0] for name, shape in shapes.items() if name.endswith(".keys")}

    @property
    def file_bytes(self) -> int:
        return self._data_start + self._pieces[-1].end

    @property
    def kv_bytes(self) -> int:
        return self._pieces[-1].end - self.token_ids.nbytes

    def compare(self, data_sha256: object) -> None:
        """Read everything once. Raises PrefixFileError where it has another checksum; called before anything else."""

        def digest(piece: _Piece, raw: np.ndarray) -> bytes:
            if piece.tensor == "token_ids" and len(raw) == piece.end - piece.begin:
                self.token_ids[piece.first_row :][: len(raw) // 4] = raw.view(np.int32)
            return hashlib.sha256(raw.data).digest()

        self._digests = self._read_pieces(self._pieces, digest, _num_threads())
        if hashlib.sha256(b"".join(self._digests)).hexdigest() != data_sha256:
            raise PrefixFileError(
                f"{self._refused} is damaged: its tensors have another checksum; save or copy it again"
            )

    def each(self, take: TakeTokens, *, in_threads: bool = True) -> None:
        """Give `take` K and V of all layers by and by. in_threads: several threads call it at a time.

        Raises PrefixFileError where something has changed since it was compared, or cannot be read any more; some may
        have been given by then."""
        wanted = dict(zip(self._pieces, self._digests, strict=True))
        num_tokens = len(self.token_ids)

        def give(piece: _Piece, raw: np.ndarray) -> None:
            if hashlib.sha256(raw.data).digest() != wanted[piece]:
                raise PrefixFileError(f"{self._refused} has changed while it was read; load it again")
            _, layer, name = piece.tensor.split(".")
            tokens = torch.from_numpy(raw).view(self._words[piece.tensor]).view(-1, *self._shapes[piece.tensor][1:])
            take(int(layer), name, num_tokens - self.lengths[int(layer)] + piece.first_row, tokens)

        kv = [piece for piece in self._pieces if piece.tensor != "token_ids"]
        try:
            self._read_pieces(kv, give, _num_threads() if in_threads else 1)
        except OSError as error:
            raise PrefixFileError(f"{self._refused} cannot be read any more ({error}); load it again") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> OpenPrefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_pieces(
        self, pieces: Sequence[_Piece], use: Callable[[_Piece, np.ndarray], Result], num_threads: int
    ) -> list[Result]:
        """What `use` makes of each piece and its bytes, fewer if the file has become shorter. Each thread takes the
        next piece when it is done with one, and has one buffer for all of them."""
        indices = iter(range(len(pieces)))
        results: dict[int, Result] = {}
        most_bytes = max((piece.end - piece.begin for piece in pieces), default=0)

        def read() -> None:
            buffer = np.empty(most_bytes, dtype=np.uint8)
            for index in indices:
                piece, filled = pieces[index], 0
                raw = buffer[: piece.end - piece.begin]
                while filled < len(raw):
                    count = os.preadv(self._file.fileno(), [raw[filled:].data], self._data_start + piece.begin + filled)
                    if not count:
                        break
                    filled += count
                results[index] = use(piece, raw[:filled])

        if num_threads == 1:
            read()
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                for done in [pool.submit(read) for _ in range(num_threads)]:
                    done.result()
        return [results[index] for index in range(len(pieces))]


def write_prefix_file(path: Path, ties: PrefixTies, prefix: SavedPrefix) -> int:
    """Write the file, whole or not at all, readable for its user alone: it tells what the prompt was. Returns its
    length in bytes. Raises PrefixFileError where it cannot be written."""
    tensors = {"token_ids": ("I32", prefix.token_ids.shape, np.ascontiguousarray(prefix.token_ids, np.int32))}
    for layer, part in prefix.layers.items():
        for name, words in (("keys", part.keys), ("values", part.values)):
            tensors[f"layers.{layer}.{name}"] = (ties.kv_dtype, tuple(words.shape), words.numpy())
    entries: dict[str, Any] = {}
    offset = 0
    for name, (dtype_name, shape, array) in tensors.items():
        offsets = [offset, offset + array.nbytes]
        entries[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": offsets}
        offset = offsets[1]
    arrays = [array for _, _, array in tensors.values()]
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        **dataclasses.asdict(ties),
        "salt": json.dumps(prefix.salt),
        "data_sha256": _digest_of(tensors),
        "sha256": _NO_DIGEST.decode(),
    }
    header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT_BYTES)
    header = _with_digest(header, hashlib.sha256(header).hexdigest().encode())
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(struct.pack("<Q", len(header)) + header)
                for array in arrays:
                    file.write(array.reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise PrefixFileError(f"path={shown(str(path))} cannot be written ({error}); give another file") from error
    return 8 + len(header) + offset


def read_prefix_file(path: Path, ties: PrefixTies, specs: Mapping[int, KVCacheSpec], most_tokens: int) -> OpenPrefix:
    """The prefix in the file, for the caller to close. specs: of each layer that keeps KV.

    Raises PrefixFileError, which says what differs, for a file that is damaged, cut, of another format or of other
    ties, and for a prefix of more than `most_tokens` tokens."""
    try:
        file = open_regular_file(path)
        try:
            return _read(path, file, ties, specs, most_tokens)
        except BaseException:
            file.close()
            raise
    except (ModelLoadError, OSError, MemoryError) as error:
        raise PrefixFileError(
            f"path={shown(str(path))} cannot be read ({error}); give a file of save_prefix"
        ) from error


def _read(
    path: Path, file: BinaryIO, ties: PrefixTies, specs: Mapping[int, KVCacheSpec], most_tokens: int
) -> OpenPrefix:
    refused = f"path={shown(str(path))}"
    file_bytes = os.fstat(file.fileno()).st_size
    header = _header(refused, file, file_bytes)
    metadata, entries = _parsed(refused, header)
    if metadata.get("format") != FORMAT:
        raise PrefixFileError(f"{refused} is a safetensors file without a prefix; give a file of save_prefix")
    if metadata.get("version") != VERSION:
        raise PrefixFileError(
            f"{refused} has version {shown(metadata.get('version'))} of the format, and this is {VERSION}: save it anew"
        )
    found = _OWN_DIGEST.findall(header)
    if len(found) != 1 or hashlib.sha256(_with_digest(header, _NO_DIGEST)).hexdigest().encode() != found[0]:
        raise PrefixFileError(f"{refused} is damaged: its header has another checksum; save or copy it again")
    for name, wanted in dataclasses.asdict(ties).items():
        if metadata.get(name) != wanted:
            raise PrefixFileError(
                f"{refused} was saved with {name}={shown(metadata.get(name))}, and this engine has {name}="
                f"{shown(wanted)}: load it "
                + ("with the same lora_request" if name == "adapter" else "into an engine like the one that saved it")
                + ", or save it anew"
            )
    places = _places(refused, entries, ties.kv_dtype, specs, most_tokens)
    num_bytes = max(end for _, end, _ in places.values())
    if file_bytes != 8 + len(header) + num_bytes:
        raise PrefixFileError(
            f"{refused} is {file_bytes} bytes long, and its header describes {8 + len(header) + num_bytes}: copy "
            "it again"
        )
    words = {name: word_of(specs[int(name.split(".")[1])].itemsize_bytes) for name in places if name != "token_ids"}
    prefix = OpenPrefix(
        refused,
        file,
        8 + len(header),
        {name: shape for name, (_, _, shape) in places.items()},
        {"token_ids": torch.int32, **words},
    )
    prefix.compare(metadata.get("data_sha256"))
    prefix.salt = _salt(refused, metadata)
    return prefix


def _with_digest(header: bytes, digest: bytes) -> bytes:
    return _OWN_DIGEST.sub(b'"sha256":"' + digest + b'"', header)


def _salt(refused: str, metadata: Mapping[str, Any]) -> str | None:
    given = metadata.get("salt")
    with suppress(ValueError, TypeError, RecursionError):
        salt = json.loads(given)  # type: ignore[arg-type]
        if salt is None or isinstance(salt, str):
            return salt
    raise PrefixFileError(f"{refused} has the salt {shown(given)}: must be a string or null, as JSON; save it anew")


def _header(refused: str, file: BinaryIO, file_bytes: int) -> bytes:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file_bytes
    if length > min(file_bytes - 8, _MAX_HEADER_BYTES):
        raise PrefixFileError(
            f"{refused} is cut or no safetensors file: its header claims {length} bytes; copy it again"
        )
    header = file.read(length)
    if len(header) != length:
        raise PrefixFileError(f"{refused} ends within its header; copy it again")
    return header


def _parsed(refused: str, header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        if isinstance(entries, dict) and isinstance(metadata, dict):
            return metadata, entries
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise PrefixFileError(f"{refused} is damaged or no safetensors file: its header is no JSON object; copy it again")


def _places(
    refused: str, entries: Mapping[str, Any], kv_dtype: str, specs: Mapping[int, KVCacheSpec], most_tokens: int
) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """(begin, end, shape) of each tensor, which lie one behind the other."""
    ids_shape = _shape(entries.get("token_ids"))
    num_tokens = ids_shape[0] if len(ids_shape) == 1 else 0
    if not 1 <= num_tokens <= most_tokens:
        raise PrefixFileError(
            f"{refused} holds a prefix of {num_tokens} tokens, and this engine takes 1 to {most_tokens} "
            "(max_model_len, less one for the output): raise max_model_len"
        )
    wanted: dict[str, tuple[str, int, tuple[int, ...]]] = {"token_ids": ("I32", 4, (num_tokens,))}
    for layer, spec in specs.items():
        lengths = [_shape(entries.get(f"layers.{layer}.{name}"))[:1] for name in ("keys", "values")]
        length = lengths[0][0] if lengths[0] and lengths[0] == lengths[1] else -1
        if length != num_tokens if not spec.is_windowed else not 0 <= length <= num_tokens:
            raise PrefixFileError(
                f"{refused} has K and V of {lengths} of {num_tokens} tokens in layer {layer}: save it anew"
            )
        for name, dim in (("keys", spec.k_dim), ("values", spec.v_dim)):
            wanted[f"layers.{layer}.{name}"] = kv_dtype, spec.itemsize_bytes, (length, spec.num_kv_heads, dim)
    if set(wanted) != set(entries):
        raise PrefixFileError(f"{refused} has other tensors than this model's layers need: save it anew")
    places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    offset = 0
    for name, (dtype_name, itemsize, shape) in wanted.items():
        end = offset + int(np.prod(shape, dtype=object)) * itemsize
        if entries[name] != {"dtype": dtype_name, "shape": list(shape), "data_offsets": [offset, end]}:
            raise PrefixFileError(
                f"{refused} has {name} as {shown(entries[name])}, where {dtype_name} {list(shape)} is needed: save "
                "it anew"
            )
        places[name] = (offset, end, shape)
        offset = end
    return places


def _shape(entry: Any) -> tuple[int, ...]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    whole = isinstance(shape, list) and all(type(one) is int and one >= 0 for one in shape)
    return tuple(shape) if whole and shape is not None else ()


def _num_threads() -> int:
    return min(4, os.cpu_count() or 1)


def _pieces(tensors: Mapping[str, tuple[tuple[int, ...], int]]) -> list[_Piece]:
    """The tensors, which lie one behind the other, in runs of whole rows. tensors: of each its shape and how many bytes
    a value has."""
    pieces, begin = [], 0
    for name, (shape, itemsize) in tensors.items():
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
        most_rows = max(1, _PIECE_BYTES // row_bytes)
        for first in range(0, shape[0], most_rows):
            end = begin + min(most_rows, shape[0] - first) * row_bytes
            pieces.append(_Piece(name, first, begin, end))
            begin = end
    return pieces


def _digest_of(tensors: Mapping[str, tuple[str, tuple[int, ...], np.ndarray]]) -> str:
    """sha256 of the pieces' sha256s."""
    pieces = _pieces({name: (shape, array.itemsize) for name, (_, shape, array) in tensors.items()})

    def digest(piece: _Piece) -> bytes:
        array = tensors[piece.tensor][2]
        start = piece.first_row * (array.nbytes // len(array))
        return hashlib.sha256(array.reshape(-1).view(np.uint8)[start:][: piece.end - piece.begin].data).digest()

    with ThreadPoolExecutor(_num_threads()) as pool:
        return hashlib.sha256(b"".join(pool.map(digest, pieces))).hexdigest()
