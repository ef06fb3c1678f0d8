"""A model from its name to its configuration, weights and tokenizer.

    source = resolve_model("demo:gemma-3-270m")
    config = load_config(source)
    weights = load_weights(source, Model(config, torch.float32))
    tokenizer = load_tokenizer(source)

The last two are independent of each other and may run in two threads.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.config import ModelConfig
from lamella.model_executor.models.generation_config import GENERATION_CONFIG, GenerationConfig, read_generation_config
from lamella.model_executor.models.registry import (
    is_known,
    is_known_gguf,
    parse_config,
    parse_gguf_config,
    weight_map,
)
from lamella.model_executor.models.typed_fields import shown
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.progress import with_progress
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.model_executor.text.tokenizer_loading import load_tokenizer
from lamella.model_executor.weights import mxfp4
from lamella.model_executor.weights.cache import read_weight_entry, weight_entry_path, write_weight_entry
from lamella.model_executor.weights.cache_folder import default_cache_dir
from lamella.model_executor.weights.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint
from lamella.model_executor.weights.conversion import ParameterPlan, plan_parameters
from lamella.model_executor.weights.dummy_weights import check_memory, dummy_pieces
from lamella.model_executor.weights.fit import fitted_config
from lamella.model_executor.weights.forms import RowForm, RowMajor, WeightForm, collect, formed_pieces, stored_tensors
from lamella.model_executor.weights.gguf_header import GgufHeader, read_gguf_header
from lamella.model_executor.weights.gguf_split import read_gguf_model
from lamella.model_executor.weights.model_source import ModelSource, resolve_model
from lamella.model_executor.weights.parameters import Parameter
from lamella.model_executor.weights.regular_files import is_there
from lamella.model_executor.weights.safetensors_files import DTYPES

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
    """The model's shape, from config.json (and generation_config.json's end tokens) or GGUF metadata, once the weights'
    headers are known to hold what it claims: nothing has been built by then.

    Raises ModelLoadError: files unreadable, architecture unknown, a variant that is not built, or weights that do not
    fit.
    """
    header, fields = None, None
    if source.gguf_path is not None:
        header = read_gguf_model(source.gguf_path)
        config = parse_gguf_config(header)
    else:
        fields = read_json_object(source.folder / "config.json")
        config = parse_config(fields, _generation_config(source).eos_token_ids)
    if source.kind == "dummy":
        check_memory(source.name, {each.name: each.shape for each in _parameters(config)})
        return config
    try:
        return fitted_config(_open(source, config, header), config, _parameters)
    except ModelLoadError as error:
        given = fields and fields.raw("quantization_config")
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        if method in (None, "mxfp4"):
            raise
        raise ModelLoadError(
            f"{source.folder / 'config.json'}: quantization_config has quant_method={shown(method)}, and native layers "
            "read floats, and of GPT-OSS MXFP4; "
            f'model_impl="transformers" takes what transformers can read here: {error}'
        ) from error


def has_native_family(source: ModelSource) -> bool:
    """Whether a family is there for the model, by the names that its file gives. Raises ModelLoadError where the file
    cannot be read."""
    if source.gguf_path is not None:
        return is_known_gguf(read_gguf_header(source.gguf_path))
    return is_known(read_json_object(source.folder / "config.json"))


def end_token_ids(source: ModelSource) -> tuple[int, ...] | None:
    """Those of the model's generation_config.json; None where it names none."""
    return _generation_config(source).eos_token_ids


def load_sampling_defaults(source: ModelSource) -> dict[str, Any]:
    """What the model's generation_config.json says of sampling, by the names of SamplingParams' fields.

    A model that is to be decoded greedily (do_sample false) gives temperature 0. Empty without such a file. One warning
    names what the file asks for and the engine does not do.
    """
    given = _generation_config(source)
    if given.not_honoured:
        asked = ", ".join(f"{key}={shown(value)}" for key, value in given.not_honoured.items())
        logger.warning(
            "%s asks for what is not done here, so it is left out: %s", source.folder / GENERATION_CONFIG, asked
        )
    return dict(given.sampling)


def _generation_config(source: ModelSource) -> GenerationConfig:
    path = source.folder / GENERATION_CONFIG
    if source.gguf_path is not None or not is_there(path):
        return GenerationConfig()
    return read_generation_config(path)


def _parameters(config: ModelConfig) -> list[Parameter]:
    return Model(config, torch.float32).parameters()


def _open(source: ModelSource, config: ModelConfig, header: GgufHeader | None = None) -> Checkpoint:
    if source.kind == "gguf":
        return GgufCheckpoint(source.paths[0], weight_map(config), header)
    return SafetensorsCheckpoint(source.paths, weight_map(config))


def load_weights(
    source: ModelSource,
    model: Model,
    *,
    form: WeightForm = ROW_MAJOR,
    cache_dir: Path | None = None,
    shows_progress: bool = False,
) -> dict[str, torch.Tensor]:
    """What `model.load` takes: norms as float32 multipliers, biases in the model's dtype, weights in that and `form`.

    cache_dir: where a converted copy is kept (default: `default_cache_dir()`); a copy that is missing, stale or
    damaged is made anew, and a folder that cannot be written only costs a warning. The tensors may be views of a
    private memory map of a file: they can be written to, but the file must not be cut short meanwhile.
    shows_progress: say on stderr how far a conversion is.
    Raises ConfigError for a dtype that is not float32, float16 or bfloat16, and ModelLoadError, before memory is
    taken, when the files cannot be read or do not fit the model.
    """
    config, dtype, parameters = model.config, model.dtype, model.parameters()
    shapes = {each.name: each.shape for each in parameters}
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype={dtype} cannot be computed with; use torch.float32, torch.float16 or torch.bfloat16")
    if source.kind == "dummy":
        stored = stored_tensors(shapes, dtype, form)
        if not isinstance(form, RowForm):
            raise ConfigError(f"random weights cannot be made in the form of {form.name!r}; they have no file")
        return collect(formed_pieces(dummy_pieces(shapes, dtype), form), stored)
    entry = _weight_entry(source, dtype, form, cache_dir or default_cache_dir(), _reading(config, parameters))
    if entry is not None:
        weights = read_weight_entry(entry, stored_tensors(shapes, dtype, form))
        if weights is not None:
            return weights
    checkpoint = _open(source, config)
    plans = plan_parameters(checkpoint, config, parameters, dtype)
    stored = stored_tensors({plan.name: plan.shape for plan in plans}, dtype, form)
    num_bytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in stored.values())
    is_shown = shows_progress and num_bytes >= MIN_CACHED_BYTES
    _tell_mxfp4(checkpoint, plans, dtype, form)

    def pieces(label: str) -> Iterator[tuple[str, torch.Tensor]]:
        logger.info("%s (%.1f GB) from %s", label, num_bytes / 1e9, source.folder)
        made = form.pieces(checkpoint, plans)
        return with_progress(made, label, num_bytes, lambda piece: piece[1].nbytes, is_shown=is_shown)

    if entry is not None:
        try:
            write_weight_entry(entry, pieces("converting weights once"), stored, sources=source.paths)
            logger.info("converted weights written to %s", entry)
        except OSError as error:
            logger.warning("converted weights cannot be kept at %s (%s): each load will convert again", entry, error)
        else:
            if (weights := read_weight_entry(entry, stored)) is not None:
                return weights
    return collect(pieces("loading weights"), stored)


def _tell_mxfp4(checkpoint: Checkpoint, plans: Sequence[ParameterPlan], dtype: torch.dtype, form: WeightForm) -> None:
    """Say in the log what weights in MXFP4 take once they are in a form that there are products for."""
    in_blocks = [
        plan for plan in plans if any(checkpoint.tensors[part.name].scales_name is not None for part in plan.parts)
    ]
    if in_blocks:
        tensors = [each for plan in in_blocks for each in form.tensors(plan.name, plan.shape, dtype).values()]
        num_held = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
        num_stored = sum(prod(plan.shape) for plan in in_blocks) * mxfp4.BLOCK_BYTES // mxfp4.BLOCK
        logger.info(
            "weights in MXFP4, %.2f GB in the file, take %.2f GB as %r, which there are products for",
            num_stored / 1e9, num_held / 1e9, form.name,
        )  # fmt: skip


def _reading(config: ModelConfig, parameters: Sequence[Parameter]) -> str:
    """What the configuration has to say of the values themselves, shortened; empty where they are read as they are."""
    factors = [(part.name, part.factor) for each in parameters for part in each.parts if part.factor != 1.0]
    names = weight_map(config)
    if not factors and not names.safetensors_pairs:
        return ""
    return f"{zlib.crc32(repr((factors, names.safetensors_pairs)).encode()):08x}"


def _weight_entry(
    source: ModelSource, dtype: torch.dtype, form: WeightForm, cache_dir: Path, reading: str
) -> Path | None:
    try:
        if sum(path.stat().st_size for path in source.paths) < MIN_CACHED_BYTES:
            return None
        return weight_entry_path(cache_dir, source.paths, dtype, form, reading)
    except OSError:
        return None  # reading the checkpoint will raise what is wrong with the files
