"""Which files a model is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.weights.cache_folder import default_cache_dir
from lamella.model_executor.weights.demo_models import DEMO_PREFIX, demo_model_path, demo_models
from lamella.model_executor.weights.gguf_split import part_paths
from lamella.model_executor.weights.regular_files import is_there
from lamella.model_executor.weights.shard_index import SHARD_INDEX, read_shard_index

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk.

    kind: "safetensors", "gguf" or "dummy" (random weights).
    paths: the weight files, of a split GGUF file all parts in order; for "dummy" the one file that gives the
        configuration: config.json or a GGUF.
    name: what the caller asked for.
    folder: where config.json and the tokenizer's files lie: the folder that was given, or the one that holds the file
        that was given. Nothing in a file changes it.
    """

    kind: str
    paths: tuple[Path, ...]
    name: str
    folder: Path

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file that describes the model, if one does."""
        return self.paths[0] if self.kind != "safetensors" and self.paths[0].suffix == ".gguf" else None


def resolve_model(model: str, load_format: str = "auto", *, cache_dir: Path | None = None) -> ModelSource:
    """The files of `model`: a folder in Hugging Face layout, a .gguf file (of a split one, the first part), a folder
    with one .gguf file, split or not, and no config.json, or "demo:<name>".

    load_format: "auto" goes by what is there; "safetensors" and "gguf" insist; "dummy" takes the shape
    of the model only and draws random weights. cache_dir (default: `default_cache_dir()`) is where demo
    models are written.
    Raises ConfigError for an unknown load_format, ModelLoadError for everything about the files.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not known; choose one of {', '.join(LOAD_FORMATS)}")
    model = str(model)
    if model.startswith(DEMO_PREFIX):
        path = demo_model_path(model, cache_dir or default_cache_dir())
    else:
        found = existing_path(model)
        if found is None:
            raise _not_found(model)
        path = found
    if path.is_dir():
        return _from_folder(path, model, load_format)
    return _from_file(path, model, load_format)


def existing_path(name: str) -> Path | None:
    """The file or folder called `name`; None where there is none, or no system could have one."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    # The name is too long, names an unknown user, or holds a null character.
    except (OSError, RuntimeError, ValueError):
        return None


def _not_found(model: str) -> ModelLoadError:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        return ModelLoadError(
            f"model={model!r} looks like the name of a model on a hub, and hubs are not reached: download it and "
            "pass the path of the local folder, or of a .gguf file"
        )
    return ModelLoadError(
        f"model={model!r}: no such file or folder; pass a folder with config.json and *.safetensors, a .gguf file, "
        f"or {' or '.join(demo_models())}"
    )


def _from_file(path: Path, model: str, load_format: str) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelLoadError(
            f"model={model!r} is a file that does not end in .gguf; pass a .gguf file, or the folder that holds "
            "config.json and *.safetensors"
        )
    if load_format == "safetensors":
        raise ModelLoadError(f"model={model!r} is a GGUF file, so load_format='safetensors' cannot be; use 'auto'")
    if load_format == "dummy":
        return ModelSource("dummy", (path,), model, path.parent)
    return ModelSource("gguf", part_paths(path), model, path.parent)


def _from_folder(folder: Path, model: str, load_format: str) -> ModelSource:
    config = folder / "config.json"
    ggufs = sorted(folder.glob("*.gguf"))
    if load_format == "dummy" and is_there(config):
        return ModelSource("dummy", (config,), model, folder)
    if load_format == "gguf" or (load_format != "safetensors" and not is_there(config)):
        if len(ggufs) == 1 or (ggufs and part_paths(ggufs[0]) == tuple(ggufs)):
            return _from_file(ggufs[0], model, load_format)
        if ggufs:
            names = ", ".join(path.name for path in ggufs)
            raise ModelLoadError(f"model={model!r} holds {len(ggufs)} GGUF files ({names}); pass the path of one")
        wanted = "*.gguf" if load_format == "gguf" else "config.json or *.gguf"
        raise ModelLoadError(f"model={model!r} is a folder without {wanted}, so it is not a model that can be loaded")
    if not is_there(config):
        raise ModelLoadError(f"model={model!r} is a folder without config.json, which load_format='safetensors' needs")
    return ModelSource("safetensors", _safetensors_paths(folder, model), model, folder)


def _safetensors_paths(folder: Path, model: str) -> tuple[Path, ...]:
    index = folder / SHARD_INDEX
    if is_there(index):
        names = sorted(set(read_shard_index(index).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelLoadError(
                f"model={model!r}: {len(missing)} of {len(names)} files that {SHARD_INDEX} names are not there: "
                f"{', '.join(missing[:5])}; finish the download"
            )
        return tuple(folder / name for name in names)
    single = folder / "model.safetensors"
    paths = (single,) if is_there(single) else tuple(sorted(folder.glob("*.safetensors")))
    if not paths:
        pickled = " (pickled weights are not read: convert them to safetensors)" if any(folder.glob("*.bin")) else ""
        raise ModelLoadError(
            f"model={model!r} has a config.json but no *.safetensors{pickled}; add them, or use load_format='dummy' "
            "for random weights"
        )
    return paths
