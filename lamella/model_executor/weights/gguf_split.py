"""Models that llama.cpp has split into several GGUF files, "name-00001-of-00003.gguf" and so on.

Each part is a GGUF file of its own. The first has the metadata; each has its number (from 0), how many parts there are
and how many tensors they hold together (llama.cpp, tools/gguf-split/gguf-split.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import shown
from lamella.model_executor.weights.gguf_header import GgufFile, GgufHeader, GgufTensor, read_gguf_header
from lamella.model_executor.weights.regular_files import is_there

_PART_NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_NUMBER_KEY, _COUNT_KEY, _TENSORS_KEY = "split.no", "split.count", "split.tensors.count"
_MAX_PARTS = 2**16 - 1  # the format counts them in 16 bits


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the split model whose first part is called `path`; `path` alone where its name is none of a part.

    Raises ModelLoadError for a part other than the first, and where parts are not there.
    """
    name = _PART_NAME.fullmatch(path.name)
    if name is None:
        return (path,)
    stem, number, count = name[1], int(name[2]), int(name[3])
    parts = tuple(path.with_name(f"{stem}{part:05}-of-{name[3]}.gguf") for part in range(1, count + 1))
    if not 1 <= number <= count:
        raise ModelLoadError(f"{path}: there is no part {number} of {count}; parts are numbered from 00001 on")
    if number > 1:
        raise ModelLoadError(f"{path} is part {number} of {count} of a split model; pass its first part, {parts[0]}")
    missing = [part.name for part in parts if not is_there(part)]
    if missing:
        raise ModelLoadError(
            f"{path}: {len(missing)} of the {count} parts of this split model are not there: "
            f"{', '.join(missing[:5])}; finish the download, all parts in one folder"
        )
    return parts


def read_gguf_model(path: Path, *, string_arrays: Collection[str] = ()) -> GgufHeader:
    """As `read_gguf_header`, with the tensors of all parts where `path` is the first of a split model.

    Raises ModelLoadError also where parts are missing, are not of one model, or hold a tensor twice.
    """
    header = read_gguf_header(path, string_arrays=string_arrays)
    parts = part_paths(path)
    count = _number(header, _COUNT_KEY, 1)
    if count != len(parts):
        raise ModelLoadError(
            f"{path}: {_COUNT_KEY}={count}, but by its name there are {len(parts)}; parts are found by their names, so "
            "give them those that they were made with (name-00001-of-00003.gguf)"
        )
    if len(parts) == 1:
        return header
    files: list[GgufFile] = []
    tensors: dict[str, GgufTensor] = {}
    for index, part_path in enumerate(parts):
        part = header if index == 0 else read_gguf_header(part_path)
        for key, wanted in ((_NUMBER_KEY, index), (_COUNT_KEY, count)):
            found = _number(part, key, -1)
            if found != wanted:
                raise ModelLoadError(
                    f"{part_path}: {key}={found}, and by its name it must be {wanted}; it is a part of another model, "
                    "or has another part's name"
                )
        for name, tensor in part.tensors.items():
            if name in tensors:
                other = parts[tensors[name].file]
                raise ModelLoadError(
                    f"{part_path} holds the tensor {shown(name)}, and so does {other.name}; they are not parts of one "
                    "model"
                )
            tensors[name] = replace(tensor, file=index)
        files += part.files
    num_tensors = _number(header, _TENSORS_KEY, len(tensors))
    if num_tensors != len(tensors):
        raise ModelLoadError(
            f"{path}: {_TENSORS_KEY}={num_tensors}, but its {count} parts hold {len(tensors)}; they are not parts of "
            "one model"
        )
    return replace(header, files=tuple(files), tensors=tensors)


def _number(header: GgufHeader, key: str, default: int) -> int:
    fields = header.fields()
    high = 2**31 if key == _TENSORS_KEY else _MAX_PARTS
    return fields.integer(key, low=0, high=high) if key in fields else default
