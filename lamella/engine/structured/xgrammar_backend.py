"""xgrammar as the library that parses grammars and computes masks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lamella.engine.structured.grammar_text import triggered_tags
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.engine.structured.xgrammar_forms import checked_regex, checked_schema
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher


class XGrammarBackend:
    """See GrammarBackend."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def prepare(self) -> None:
        self._compiler_now()

    def compile(self, params: StructuredOutputsParams) -> Callable[[], XGrammarState]:
        from xgrammar import GrammarMatcher

        compiled = self._compiled(self._compiler_now(), params)
        num_words = -(-compiled.tokenizer_info.vocab_size // 32)
        return lambda: XGrammarState(GrammarMatcher(compiled), num_words)

    def _compiled(self, compiler: GrammarCompiler, params: StructuredOutputsParams) -> CompiledGrammar:
        kind = params.kind
        if params.whitespace_pattern is not None:
            raise ValueError("whitespace_pattern is not built for xgrammar; use backend='guidance'")
        if kind in ("json", "json_object"):
            assert isinstance(params.json, str) or kind == "json_object"
            schema = {"type": "object"} if kind == "json_object" else json.loads(str(params.json))
            schema = checked_schema(schema, closes_objects=params.disable_additional_properties)
            return compiler.compile_json_schema(json.dumps(schema), any_whitespace=not params.disable_any_whitespace)
        if kind == "regex":
            return compiler.compile_regex(checked_regex(str(params.regex)))
        if kind == "choice":
            assert params.choice is not None
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
            return compiler.compile_grammar(f"root ::= {choices}")
        if kind == "grammar":
            text = str(params.grammar)
            return compiler.compile_grammar(text) if "::=" in text else compiler.compile_lark(text)
        triggers, tags = triggered_tags(params, self._tokenizer.all_special_tokens)
        if set(triggers) & set(self._tokenizer.all_special_tokens):
            raise ValueError("triggers that are special tokens are not built for xgrammar; use backend='guidance'")
        made = [
            {"begin": begin, "content": {"type": "json_schema", "json_schema": checked_schema(schema)}, "end": end}
            for begin, schema, end in tags
        ]
        place = {"type": "triggered_tags", "triggers": triggers, "tags": made}
        return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": place}))

    def _compiler_now(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    def _make_compiler(self) -> GrammarCompiler:
        """Raises RequestError where the model has no end token, or a tokenizer that xgrammar does not read."""
        from tokenizers import Tokenizer as Tokenizers
        from transformers import PreTrainedTokenizerFast
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

        ends = [token_id for token_id in self._end_token_ids if token_id < self._vocab_size]
        if not ends:
            raise RequestError(
                "structured_outputs needs a model with an end token: without one no output can be complete"
            )
        text = self._tokenizer.as_json()
        vocab_size = max(self._vocab_size, self._tokenizer.vocab_size)
        try:
            fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizers.from_str(text))
            info = TokenizerInfo.from_huggingface(fast, vocab_size=vocab_size, stop_token_ids=ends)
            tokens = list(info.decoded_vocab)
            # A special token is never how its text is spelled. Other added tokens stand for their text as it is.
            for added in json.loads(text)["added_tokens"]:
                tokens[added["id"]] = b"" if added["special"] else added["content"].encode()
            for token_id in self._tokenizer.all_special_ids:
                tokens[token_id] = b""
            # Compiled grammars are kept by our own cache.
            info = TokenizerInfo(tokens, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=ends)
            return GrammarCompiler(info, max_threads=1, cache_enabled=False)
        except Exception as error:  # the library raises nothing more specific
            raise RequestError(f"structured_outputs cannot be used with this model's tokenizer: {error}") from error


class XGrammarState:
    """See GrammarState."""

    def __init__(self, matcher: GrammarMatcher, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words
        self._error = ""

    def accept(self, token_ids: list[int]) -> bool:
        num_allowed = self._accept(token_ids)
        if num_allowed < len(token_ids):
            self._error = f"token {token_ids[num_allowed]} may not come"
        return num_allowed == len(token_ids)

    def take_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def mask(self) -> np.ndarray | None:
        mask: np.ndarray[Any, Any] = np.full((1, self._num_words), -1, dtype=np.int32)
        if self._matcher.is_terminated():
            mask[:] = 0
        else:
            self._matcher.fill_next_token_bitmask(mask)
        if not mask.any():
            self._error = "no token may come"
            return None
        words: np.ndarray[Any, Any] = mask[0].view(np.uint32)
        return words

    def num_allowed(self, token_ids: list[int]) -> int:
        num_allowed = self._accept(token_ids)
        if num_allowed:
            self._matcher.rollback(num_allowed)
        return num_allowed

    def error(self) -> str:
        return self._error

    def _accept(self, token_ids: list[int]) -> int:
        for index, token_id in enumerate(token_ids):
            # Behind an end token nothing comes, and the library says so on stderr if it is asked.
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return index
        return len(token_ids)
