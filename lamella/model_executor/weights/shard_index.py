"""The index that says in which file of a folder each tensor lies."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields, shown
from lamella.model_executor.models.typed_json import read_json_object

SHARD_INDEX = "model.safetensors.index.json"


def read_shard_index(path: Path) -> dict[str, str]:
    """Tensor -> name of the file, in the index's own folder, that holds it.

    Raises ModelLoadError when the file is no index, or a name leads out of the folder or is no safetensors file's.
    """
    weight_map = read_json_object(path).object("weight_map")
    files = {tensor: _file_name(weight_map, tensor) for tensor in weight_map}
    if not files:
        raise ModelLoadError(f"{path} names no files")
    return files


def _file_name(weight_map: TypedFields, tensor: str) -> str:
    name = weight_map.string(tensor)
    # A plain name under the rules of every system: Windows has more separators than one, and drives. Checked by
    # spelling, not by where it leads: a hub's cache keeps links that lead out of the folder, and those are wanted.
    parts = PureWindowsPath(name)
    if parts.name != name or name in (".", "..") or ":" in name or "\0" in name or not name.endswith(".safetensors"):
        raise weight_map.error(
            tensor, f"the plain name of a *.safetensors file in the same folder, which {shown(name)} is not"
        )
    return name
