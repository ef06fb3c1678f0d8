"""Grammars of requests, compiled within a time, and kept for the next that ask for the same."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from lamella.argument_checks import shown
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.guidance_backend import GuidanceBackend
from lamella.engine.structured.output_grammar import GrammarState, OutputGrammar
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.engine.structured.xgrammar_backend import XGrammarBackend
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

# The parser descends into rules by recursion, so that a chain of as many rules as a text can hold needs some 400 MiB.
# Only what is used of a stack takes memory.
_STACK_BYTES = 2**29
_MOST_AT_ONCE = 4
_STACK_LOCK = threading.Lock()


NewState = Callable[[], GrammarState]


class GrammarBackend(Protocol):
    """A library for one model. Any thread may call."""

    def prepare(self) -> None:
        """Make of the vocabulary what takes time once. Raises RequestError for a vocabulary that cannot be used."""
        ...

    def compile(self, params: StructuredOutputsParams) -> NewState:
        """What makes the state of a sample. Raises RequestError, or anything else whose text says what is wrong."""
        ...


class GrammarCompiler:
    """Of one model. Any thread may call; whoever calls waits, and no step does.

    A grammar that takes longer than `compile_timeout_seconds` is an error of its request. Its thread cannot be stopped,
    but the library's own limits end it; as long as four such run, further grammars are refused.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...], config: StructuredOutputsConfig
    ) -> None:
        backend = XGrammarBackend if config.backend == "xgrammar" else GuidanceBackend
        self._backend: GrammarBackend = backend(tokenizer, vocab_size, end_token_ids)
        self._num_mask_words = -(-vocab_size // 32)
        self._config = config
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, NewState] = OrderedDict()
        self._num_running = 0

    def compile(self, params: StructuredOutputsParams) -> Callable[[], OutputGrammar]:
        """What makes a grammar's state for a sample. Raises RequestError for a grammar that cannot be used."""
        params = dataclasses.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or self._config.disable_any_whitespace,
            disable_additional_properties=params.disable_additional_properties
            or self._config.disable_additional_properties,
        )
        with self._lock:
            new_state = self._compiled.get(params)
            if new_state is not None:
                self._compiled.move_to_end(params)
        if new_state is None:
            self._backend.prepare()
            made = new_state = self._within_time(params, lambda: self._new_state(params))
            with self._lock:
                self._compiled[params] = made
                while len(self._compiled) > self._config.cache_size:
                    self._compiled.popitem(last=False)
        return lambda: OutputGrammar(new_state(), self._num_mask_words)

    def _new_state(self, params: StructuredOutputsParams) -> NewState:
        try:
            return self._backend.compile(params)
        except RequestError:
            raise
        except Exception as error:  # the libraries raise nothing more specific
            raise RequestError(f"{_named(params)} cannot be used: {error}") from error

    def _within_time(self, params: StructuredOutputsParams, work: Callable[[], NewState]) -> NewState:
        with self._lock:
            if self._num_running >= _MOST_AT_ONCE:
                raise RequestError(
                    f"{_named(params)}: {self._num_running} other grammars are being compiled; try again "
                    "when one is done"
                )
            self._num_running += 1
        future: Future[NewState] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # goes to whoever waits
                future.set_exception(error)
            finally:
                with self._lock:
                    self._num_running -= 1

        _start_with_stack(run)
        seconds = self._config.compile_timeout_seconds
        try:
            return future.result(seconds)
        except TimeoutError:
            raise RequestError(
                f"{_named(params)} takes longer to compile than compile_timeout_seconds={seconds:g}; give a smaller "
                "one, or raise it in structured_outputs_config"
            ) from None


def _start_with_stack(run: Callable[[], None]) -> None:
    """Start a thread that has room for deep grammars. It does not keep the process from ending."""
    thread = threading.Thread(target=run, name="lamella-grammar", daemon=True)
    with _STACK_LOCK:
        before = threading.stack_size()
        try:
            threading.stack_size(_STACK_BYTES)
            thread.start()
        finally:
            threading.stack_size(before)


def _named(params: StructuredOutputsParams) -> str:
    value: Any = getattr(params, params.kind)
    return f"structured_outputs: {params.kind}={shown(value)}"
