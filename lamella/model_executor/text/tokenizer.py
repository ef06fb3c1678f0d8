"""Text to token ids and back, on the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from lamella.errors import RequestError
from lamella.model_executor.text.chat import ChatRenderer, ChatTemplate, select_template
from lamella.model_executor.text.text_stream import StreamRules, TextStream


class TokenizedText(dict[str, Any]):
    """What calling a tokenizer returns: "input_ids" and the like, by key or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """A tokenizer with the model's special tokens and chat template. Safe to use from several threads.

    special_tokens: the name that templates use ("bos_token", ...) -> the token's text. extra_special_tokens: texts of
    special tokens without a name. chat_template: one, or several by name. input_names: what calling it returns.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Sequence[str] = (),
        chat_template: ChatTemplate | None = None,
        input_names: Sequence[str] = ("input_ids", "attention_mask"),
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._extra_special_tokens = tuple(extra_special_tokens)
        self._input_names = tuple(input_names)
        self._renderer = ChatRenderer()
        self._stream_rules: StreamRules | None = None  # derived from the decoder when first needed
        self.chat_template = chat_template

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def as_json(self) -> str:
        """The tokenizer as a tokenizer.json says it, for other readers. It pads and cuts nothing."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        return copy.to_str()

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Name -> text, of the special tokens that have a name."""
        return dict(self._special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys((*self._special_tokens.values(), *self._extra_special_tokens)))

    @property
    def all_special_ids(self) -> list[int]:
        ids = (self._backend.token_to_id(token) for token in self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self._special_tokens.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> TokenizedText:
        """{"input_ids": ids, "attention_mask": ones}; lists of these for a list of texts."""
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, (list, tuple)):
            raise RequestError(f"text is {type(text).__name__}: must be a str or a list of them")
        ids = [self.encode(one, add_special_tokens) for one in texts]
        columns: dict[str, list[list[int]]] = {
            "input_ids": ids,
            "token_type_ids": [[0] * len(one) for one in ids],
            "attention_mask": [[1] * len(one) for one in ids],
        }
        return TokenizedText(
            {
                name: column[0] if isinstance(text, str) else column
                for name, column in columns.items()
                if name == "input_ids" or name in self._input_names
            }
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the model's bos (and eos) where it wants them if `add_special_tokens`.

        Text from `apply_chat_template` states its special tokens itself: pass False.
        Raises RequestError for what is not text, unpaired surrogates included.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt {text!r:.80} cannot be tokenized: it is no str; pass a str of valid Unicode")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt {text!r:.80} cannot be tokenized: {error}; pass a str of valid Unicode"
            ) from error
        except BaseException as error:
            if not is_backend_failure(error):
                raise
            raise RequestError(
                f"prompt {text!r:.80} cannot be tokenized: the model's tokenizer fails on it: {error}"
            ) from error

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> Any:
        """The text of `ids` (one id, a sequence, an array); a list of texts for a sequence of sequences.

        Special tokens are left out, as in outputs; transformers' `decode` keeps them by default.
        Raises RequestError for what are no token ids.
        """
        if isinstance(ids, list) and (not ids or type(ids[0]) is int):
            return self._decode(ids, skip_special_tokens)  # the case that engines need all the time, kept short
        given = _python_ids(ids)
        if given and all(isinstance(one, list) for one in given):
            return [self._decode(one, skip_special_tokens) for one in given]
        return self._decode(given, skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """The texts of several sequences of ids, special tokens included."""
        given = _python_ids(sequences)
        if not all(isinstance(one, list) for one in given):
            given = [given] if given else []
        return [self._decode(one, skip_special_tokens) for one in given]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids {ids!r:.80} cannot be decoded: {error}") from error
        except BaseException as error:
            if not is_backend_failure(error):
                raise
            raise RequestError(f"token ids {ids!r:.80}: the model's tokenizer fails on them: {error}") from error

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or those of a sequence; None for an id that is none of the vocabulary's."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return [self._backend.id_to_token(one) for one in _python_ids(ids) if one not in skipped]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or those of a sequence; the unknown token's for what is none."""
        if isinstance(tokens, str):
            token_id = self._backend.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def decode_stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A stream that turns ids into text one at a time."""
        if self._stream_rules is None:
            self._stream_rules = StreamRules.of(self._backend)
        return TextStream(self._backend, self._stream_rules, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tokenize: bool = False,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """The prompt text of a conversation, rendered as transformers renders it (in a sandbox, within a budget).

        messages: a list of messages, or a list of such lists, which gives a list. chat_template: a template, or the
        name of one of the model's. continue_final_message: leave the last message open for the model to go on with.
        tokenize: give the tokens of the text, as calling the tokenizer does; without `return_dict` their ids alone.
        kwargs (the template's own variables) go to the template. Unlike in transformers a text with a generation prompt
        is the default. Raises RequestError when there is no template or it refuses the messages.
        """
        template = select_template(self.chat_template, chat_template, with_tools=tools is not None)
        is_batch = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
        texts = [
            self._renderer.render(
                template,
                conversation,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self._special_tokens, **kwargs},
            )
            for conversation in (messages if is_batch else [messages])
        ]
        if not tokenize:
            return texts if is_batch else texts[0]
        # Chat templates write the special tokens themselves.
        tokenized = self(texts if is_batch else texts[0], add_special_tokens=False)
        return tokenized if return_dict else tokenized["input_ids"]


def is_backend_failure(error: BaseException) -> bool:
    """Whether `error` is the tokenizers library's own: it raises nothing more specific than Exception, and its
    panics are no Exception at all."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def _python_ids(ids: Any) -> list[Any]:
    """Ids as a list of ints, or of lists of them."""
    if hasattr(ids, "tolist"):  # an array of NumPy or a tensor
        ids = ids.tolist()
    if isinstance(ids, (int, np.integer)):
        return [int(ids)]
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Sequence):
        raise RequestError(f"token ids are {type(ids).__name__}: must be a list of integers")
    return [_python_ids(one) if hasattr(one, "__len__") else _python_id(one) for one in ids]


def _python_id(one: Any) -> int:
    if isinstance(one, (int, np.integer)) and not isinstance(one, bool):
        return int(one)
    raise RequestError(f"{one!r:.80} is no token id: token ids are integers")
