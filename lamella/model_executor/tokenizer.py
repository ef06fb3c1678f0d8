"""Text to token ids and back, on the `tokenizers` library alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lamella.errors import ModelLoadError, RequestError
from lamella.model_executor.cache_folder import default_cache_dir, entry_path, written_entry
from lamella.model_executor.config_parsing import read_json
from lamella.model_executor.gguf_files import read_gguf_header
from lamella.model_executor.gguf_tokenizer import (
    TOKENIZER_ARRAYS,
    special_token_ids,
    tokenizer_json,
)
from lamella.model_executor.model_source import ModelSource
from lamella.model_executor.text_stream import StreamRules, TextStream

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A tokenizer with the model's special tokens and chat template. Safe to use from several threads.

    special_tokens: transformers' name ("bos_token", ...) -> the token's text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._stream_rules: StreamRules | None = None  # found out when first needed

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the model's bos (and eos) where it wants them if `add_special_tokens`.

        Text from `apply_chat_template` states its special tokens itself: pass False.
        Raises RequestError for what is not text, unpaired surrogates included.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                f"prompt {text!r:.80} cannot be tokenized: {error}; pass a str of valid Unicode"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A stream that turns ids into text one at a time."""
        if self._stream_rules is None:
            self._stream_rules = StreamRules.of(self._backend)
        return TextStream(self._backend, self._stream_rules, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation, rendered as transformers renders it (in a sandbox).

        kwargs (tools, documents, the template's own variables) go to the template.
        Raises RequestError when there is no template or it refuses the messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise RequestError(
                "this model comes without a chat template, so messages cannot be made a prompt; pass chat_template=, "
                "or use generate with a plain prompt"
            )
        if not messages:
            raise RequestError("messages is empty; pass at least one message")
        if kwargs.get("continue_final_message") and add_generation_prompt:
            raise RequestError("continue_final_message needs add_generation_prompt=False: one of them must go")
        # Seconds to import, and only chat needs it.
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **kwargs},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return rendered[0][0]


def load_tokenizer(source: ModelSource, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of `source`: tokenizer.json and its companions, or a GGUF file's vocabulary.

    cache_dir: where the converted form of a GGUF vocabulary is kept (default: `default_cache_dir()`).
    Raises ModelLoadError when there is none or it cannot be read.
    """
    if source.gguf_path is not None:
        return _from_gguf(source.gguf_path, cache_dir or default_cache_dir())
    return _from_folder(source.folder)


def _from_gguf(path: Path, cache_dir: Path) -> Tokenizer:
    entry = entry_path(cache_dir, (path,), kind="tokenizer", format_version=FORMAT_VERSION, suffix=".json")
    backend = None
    if entry.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(entry))
        except Exception as error:  # the library raises nothing more specific
            logger.info("converted tokenizer %s is damaged and will be made anew: %s", entry, error)
    header = read_gguf_header(path, string_arrays=() if backend else TOKENIZER_ARRAYS)
    if backend is None:
        document = tokenizer_json(header)
        backend = tokenizers.Tokenizer.from_str(document)
        try:
            with written_entry(entry) as file:
                file.write(document.encode())
        except OSError as error:
            logger.warning("converted tokenizer cannot be kept at %s (%s): each load will convert again", entry, error)
    named = {name: backend.id_to_token(token_id) for name, token_id in special_token_ids(header).items()}
    return Tokenizer(
        backend,
        special_tokens={name: token for name, token in named.items() if token is not None},
        chat_template=header.metadata.get("tokenizer.chat_template"),
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} has no tokenizer.json; save one there with transformers' AutoTokenizer(...).save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error
    # Stored limits are for training batches; a prompt is never cut or padded silently.
    backend.no_truncation()
    backend.no_padding()
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    names = {name: _token_text(config.get(name)) for name in _SPECIAL_NAMES}
    special_tokens = {name: text for name, text in names.items() if text and backend.token_to_id(text) is not None}
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special_tokens.values()]
    )
    # As in transformers, tokenizer.json's post-processor alone decides about bos and eos, whatever the older
    # add_bos_token and add_eos_token say.
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=_chat_template(folder, config))


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
