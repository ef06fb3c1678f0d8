"""What users pass as a prompt, checked and turned into token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from lamella.argument_checks import nearest_name, shown
from lamella.engine.loaded_adapters import LoadedAdapter
from lamella.engine.prefix_boundaries import joined, require_text, tokens_before, whole_numbers
from lamella.engine.scheduling.token_rules import TokenRules
from lamella.engine.structured.output_grammar import OutputGrammar
from lamella.engine.vllm_request_arguments import PROMPT_KEYS
from lamella.errors import RequestError, UnsupportedArgumentError
from lamella.model_executor.text.tokenizer import Tokenizer


class TextPrompt(TypedDict, total=False):
    prompt: str | Sequence[str]
    cache_salt: str
    prefix_boundary: int | Sequence[int]


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str
    prefix_boundary: int | Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
KEYS = ("prompt", "prompt_token_ids", "cache_salt", "prefix_boundary")
FORMS = 'a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """text: None where only token ids were given. token_ids: int32 [n], n >= 1.
    cache_salt: prefixes are shared only between prompts of equal salt.
    rules: what the request's parameters ask of the choice of tokens, for this model; None: nothing.
    new_grammar: makes the state of a sample in the grammar that its output is to follow; None: it follows none.
    adapter: what it runs with; None: the model alone.
    prefix_boundaries: numbers of first tokens, ascending, behind which other prompts will part from this one."""

    text: str | None
    token_ids: np.ndarray
    cache_salt: str | None
    new_grammar: Callable[[], OutputGrammar] | None = None
    rules: TokenRules | None = None
    adapter: LoadedAdapter | None = None
    prefix_boundaries: tuple[int, ...] = ()

    @property
    def salt(self) -> str | None:
        """What tells the KV of the prompt from that of others of the same tokens."""
        return root_salt(self.cache_salt, self.adapter_digest)

    @property
    def adapter_digest(self) -> str:
        """Empty without an adapter."""
        return "" if self.adapter is None else self.adapter.digest


def root_salt(cache_salt: str | None, adapter_digest: str) -> str | None:
    """What the root of the prefix tree is named by that prompts of this salt and adapter start from."""
    return f"{cache_salt or ''}\0lora:{adapter_digest}" if adapter_digest else cache_salt


def split_prompts(prompts: Any) -> list[Any]:
    """One prompt or many -> a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1:
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is {type(prompts).__name__}: must be {FORMS}, or a list or an iterator of these")
    if prompts and all(_is_integer(token) for token in prompts):
        return [prompts]
    return list(prompts)


def parse_prompt(prompt: Any, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> ParsedPrompt:
    """Check one prompt. Raises RequestError saying which form or token is wrong and what would work."""
    text: str | None = None
    salt: str | None = None
    tokens: Any = prompt
    boundary: Any = None
    part_ends: list[int] = []
    if isinstance(prompt, Mapping):
        _check_keys(prompt)
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt or "\0" in salt):
            raise RequestError(
                f"cache_salt={shown(salt)}: must be a string that is not empty and holds no null character"
            )
        text = prompt.get("prompt")
        tokens = prompt.get("prompt_token_ids")
        boundary = prompt.get("prefix_boundary")
        if isinstance(text, (list, tuple)) and tokens is None:
            require_text(boundary)
            text, part_ends = joined(text)
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f'prompt["prompt"] is {type(text).__name__}: must be a string, or a list of strings that are its parts'
            )
    elif isinstance(prompt, str):
        text, tokens = prompt, None
    boundaries: list[int] = []
    if tokens is None and text is not None:
        # An empty text is a prompt if the tokenizer adds a token of its own, such as <bos>.
        tokens = tokenizer.encode(text)
        places = part_ends or whole_numbers(boundary, 1, len(text), "characters")
        boundaries = tokens_before(tokenizer, text, tokens, places, add_special_tokens=True) if places else []
        boundary = None
    token_ids = _check_token_ids(tokens, vocab_size)
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"prompt has {len(token_ids)} tokens, which leaves no room for output within "
            f"max_model_len={max_model_len}: shorten it to at most {max_model_len - 1} tokens"
        )
    if boundary is not None:
        boundaries = whole_numbers(boundary, 1, len(token_ids), "tokens")
    return ParsedPrompt(text, token_ids, salt, prefix_boundaries=tuple(boundaries))


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key in prompt:
        if key in KEYS:
            continue
        entry = PROMPT_KEYS.get(key) if isinstance(key, str) else None
        if entry is None:
            near = nearest_name(key, KEYS) if isinstance(key, str) else ""
            keys = shown(sorted(map(str, prompt)))
            raise RequestError(f"prompt has the keys {keys}, of which {shown(key)} is unknown: must be {FORMS}{near}")
        if not entry.asks_for_nothing(prompt[key]):
            raise UnsupportedArgumentError(f"prompt has {key}={shown(prompt[key])}, which is vLLM's; {entry.instead}")
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise RequestError(f"prompt has the keys {shown(sorted(map(str, prompt)))}: must be {FORMS}")


def _check_token_ids(tokens: Any, vocab_size: int) -> np.ndarray:
    if isinstance(tokens, np.ndarray):
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes, bytearray)):
        raise RequestError(f"prompt is {type(tokens).__name__}: must be {FORMS}")
    if not len(tokens):
        raise RequestError("prompt is empty: give at least one character or token id")
    for index, token in enumerate(tokens):
        if not _is_integer(token):
            raise RequestError(f"prompt token {index} is {shown(token)}: token ids are integers")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt token {index} is {shown(token)}: must lie in [0, {vocab_size - 1}], the vocabulary"
            )
    return np.asarray(tokens, dtype=np.int32)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
