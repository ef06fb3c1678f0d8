"""A model from its name to its configuration, weights and tokenizer.

    source = resolve_model("demo:gemma-3-270m")
    config = load_config(source)
    weights = load_weights(source, config, shapes, dtype=torch.float32)
    tokenizer = load_tokenizer(source)

The last two are independent of each other and may run in two threads.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lamella.errors import ConfigError
from lamella.model_executor.cache_folder import default_cache_dir
from lamella.model_executor.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint
from lamella.model_executor.config_parsing import parse_config, read_json
from lamella.model_executor.dummy_weights import dummy_pieces
from lamella.model_executor.gguf_config import parse_gguf_config
from lamella.model_executor.gguf_files import read_gguf_header
from lamella.model_executor.model_config import ModelConfig
from lamella.model_executor.model_source import ModelSource, resolve_model
from lamella.model_executor.safetensors_files import DTYPES
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.model_executor.text.tokenizer_loading import load_tokenizer
from lamella.model_executor.weight_cache import read_weight_entry, weight_entry_path, write_weight_entry
from lamella.model_executor.weight_conversion import plan_parameters
from lamella.model_executor.weight_forms import RowForm, RowMajor, WeightForm, collect, formed_pieces, stored_tensors

__all__ = [
    "ModelSource",
    "Tokenizer",
    "load_config",
    "load_sampling_defaults",
    "load_tokenizer",
    "load_weights",
    "resolve_model",
]

logger = logging.getLogger(__name__)

# Converting less than this is as quick as mapping a copy of it, and copies take disk space.
MIN_CACHED_BYTES = 64 << 20
ROW_MAJOR = RowMajor()


def load_config(source: ModelSource) -> ModelConfig:
    """The model's shape, from config.json (and generation_config.json's end tokens) or GGUF metadata.

    Raises ModelLoadError: files unreadable, architecture unknown, or a variant that is not built.
    """
    if source.gguf_path is not None:
        return parse_gguf_config(read_gguf_header(source.gguf_path))
    generation = source.folder / "generation_config.json"
    return parse_config(
        read_json(source.folder / "config.json"), read_json(generation) if generation.is_file() else None
    )


def load_sampling_defaults(source: ModelSource) -> dict[str, float | int]:
    """What the model's generation_config.json says of sampling: temperature, top_k, top_p, min_p,
    repetition_penalty, where given.

    A model that is to be decoded greedily (do_sample false) gives temperature 0 and its penalty. Empty without such a
    file.
    """
    path = source.folder / "generation_config.json"
    if source.gguf_path is not None or not path.is_file():
        return {}
    given = read_json(path)
    is_greedy = given.get("do_sample") is False
    names = ("repetition_penalty",) if is_greedy else ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: given[name] for name in names if given.get(name) is not None}
    return {"temperature": 0.0, **values} if is_greedy else values


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    expected_shapes: dict[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    form: WeightForm = ROW_MAJOR,
    cache_dir: Path | None = None,
) -> dict[str, torch.Tensor]:
    """The model's parameters by name: norms as float32 multipliers, everything else in `dtype` and `form`.

    expected_shapes: name -> shape of each parameter, weights as [num_out, num_in].
    cache_dir: where a converted copy is kept (default: `default_cache_dir()`); a copy that is missing, stale or
    damaged is made anew, and a folder that cannot be written only costs a warning. The tensors may be views of a
    private memory map of a file: they can be written to, but the file must not be cut short meanwhile.
    Raises ConfigError for a dtype that is not float32, float16 or bfloat16, and ModelLoadError, before memory is
    taken, when the files cannot be read or do not fit `config`.
    """
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype={dtype} cannot be computed with; use torch.float32, torch.float16 or torch.bfloat16")
    if source.kind == "dummy":
        stored = stored_tensors(expected_shapes, dtype, form)
        if not isinstance(form, RowForm):
            raise ConfigError(f"random weights cannot be made in the form of {form.name!r}; they have no file")
        return collect(formed_pieces(dummy_pieces(expected_shapes, dtype), form), stored)
    entry = _weight_entry(source, dtype, form, cache_dir or default_cache_dir())
    if entry is not None:
        weights = read_weight_entry(entry, stored_tensors(expected_shapes, dtype, form))
        if weights is not None:
            return weights
    checkpoint: Checkpoint
    checkpoint = GgufCheckpoint(source.paths[0]) if source.kind == "gguf" else SafetensorsCheckpoint(source.paths)
    plans = plan_parameters(checkpoint, config, expected_shapes, dtype)
    stored = stored_tensors({plan.name: plan.shape for plan in plans}, dtype, form)
    if entry is not None:
        try:
            write_weight_entry(entry, checkpoint, plans, stored, form)
            logger.info("converted weights written to %s", entry)
        except OSError as error:
            logger.warning("converted weights cannot be kept at %s (%s): each load will convert again", entry, error)
        else:
            if (weights := read_weight_entry(entry, stored)) is not None:
                return weights
    return collect(form.pieces(checkpoint, plans), stored)


def _weight_entry(source: ModelSource, dtype: torch.dtype, form: WeightForm, cache_dir: Path) -> Path | None:
    try:
        if sum(path.stat().st_size for path in source.paths) < MIN_CACHED_BYTES:
            return None
        return weight_entry_path(cache_dir, source.paths, dtype, form)
    except OSError:
        return None  # the checkpoint's own reader says what is wrong with the files
