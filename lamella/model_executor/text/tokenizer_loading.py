"""A model's tokenizer from its files: tokenizer.json and its companions, or a GGUF file's vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tokenizers

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.text.chat_templates import gguf_chat_templates, read_chat_templates
from lamella.model_executor.text.gguf_tokenizer import tokenizer_json
from lamella.model_executor.text.gguf_vocabulary import TOKENIZER_ARRAYS, special_token_ids
from lamella.model_executor.text.special_tokens import CONFIG_FILE, MAX_TOKENIZER_BYTES, read_special_tokens
from lamella.model_executor.text.tokenizer import Tokenizer, is_backend_failure
from lamella.model_executor.weights.cache_folder import default_cache_dir, entry_path, usable_entry, written_entry
from lamella.model_executor.weights.gguf_header import read_gguf_header
from lamella.model_executor.weights.model_source import ModelSource
from lamella.model_executor.weights.regular_files import read_regular_file

logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
_TRIAL_TEXT = "A b\n1\u00e9"
_Result = TypeVar("_Result")
# transformers' own default for tokenizers that do not say.
_INPUT_NAMES = ("input_ids", "attention_mask")


def load_tokenizer(source: ModelSource, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of `source`.

    cache_dir: where the converted form of a GGUF vocabulary is kept (default: `default_cache_dir()`).
    Raises ModelLoadError when there is none or it cannot be read.
    """
    if source.gguf_path is not None:
        return _from_gguf(source.gguf_path, cache_dir or default_cache_dir())
    return _from_folder(source.folder)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; save one there with transformers' AutoTokenizer(...).save_pretrained"
        )
    data = read_regular_file(path, max_bytes=MAX_TOKENIZER_BYTES)
    backend = _guarded(lambda: tokenizers.Tokenizer.from_buffer(data), f"{path} cannot be read as a tokenizer")
    # Stored limits are for training batches; a prompt is never cut or padded silently.
    backend.no_truncation()
    backend.no_padding()
    settings = folder / CONFIG_FILE
    config = read_json_object(settings) if settings.exists() else TypedFields({}, settings)
    special = read_special_tokens(folder, config, backend)
    _guarded(lambda: special.add_to(backend), f"{folder}: the special tokens cannot be added to tokenizer.json")
    backend.encode_special_tokens = bool(config.optional_boolean("split_special_tokens"))
    _guarded(lambda: _try_out(backend), f"{path} is damaged: its tokenizer fails on a short text")
    # As in transformers, tokenizer.json's post-processor alone decides about bos and eos, whatever the older
    # add_bos_token and add_eos_token say.
    return Tokenizer(
        backend,
        special_tokens=special.names,
        extra_special_tokens=[token.content for token in special.extra],
        chat_template=read_chat_templates(folder, config),
        input_names=config.strings("model_input_names") if config.has_value("model_input_names") else _INPUT_NAMES,
    )


def _from_gguf(path: Path, cache_dir: Path) -> Tokenizer:
    entry = entry_path(cache_dir, (path,), kind="tokenizer", format_version=FORMAT_VERSION, suffix=".json")
    backend = None
    if usable_entry(entry):
        try:
            backend = _guarded(lambda: tokenizers.Tokenizer.from_file(str(entry)), "damaged")
        except ModelLoadError as error:
            logger.info("converted tokenizer %s is damaged and will be made anew: %s", entry, error)
    header = read_gguf_header(path, string_arrays=() if backend else TOKENIZER_ARRAYS)
    fields = TypedFields(header.metadata, path)
    template = gguf_chat_templates(fields)
    if backend is None:
        document = tokenizer_json(fields, template)
        backend = _guarded(
            lambda: tokenizers.Tokenizer.from_str(document), f"{path}: its vocabulary makes no tokenizer"
        )
        _guarded(lambda: _try_out(backend), f"{path}: its tokenizer fails on a short text")
        try:
            with written_entry(entry, sources=(path,)) as file:
                file.write(document.encode())
        except OSError as error:
            logger.warning("converted tokenizer cannot be kept at %s (%s): each load will convert again", entry, error)
    named = {name: backend.id_to_token(token_id) for name, token_id in special_token_ids(fields).items()}
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return Tokenizer(
        backend,
        special_tokens={name: token for name, token in named.items() if token is not None},
        extra_special_tokens=special,
        chat_template=template,
    )


def _try_out(backend: tokenizers.Tokenizer) -> None:
    ids = backend.encode(_TRIAL_TEXT).ids
    backend.decode(ids or [0], skip_special_tokens=False)


def _guarded(make: Callable[[], _Result], complaint: str) -> _Result:
    """`make()`; whatever the tokenizers library raises, a panic too, becomes a ModelLoadError."""
    try:
        return make()
    except ModelLoadError:
        raise
    except BaseException as error:
        if not is_backend_failure(error):
            raise
        raise ModelLoadError(f"{complaint}: {error!s:.500}") from error
