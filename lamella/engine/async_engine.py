"""The engine for applications with an event loop: each request is an async iterator of its outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from lamella.argument_checks import shown
from lamella.engine.chat_prompts import Message, chat_prompts
from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine, EngineStats
from lamella.engine.lora_request import LoRARequest
from lamella.engine.model_opening import ServedConfig
from lamella.engine.prompts import ParsedPrompt, Prompt, TokensPrompt
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.saved_prefixes import PrefixFile
from lamella.engine.streaming.admission_gate import AdmissionGate
from lamella.engine.streaming.engine_thread import EngineThread
from lamella.engine.streaming.request_stream import Ask, RequestStream
from lamella.engine.vllm_keywords import refuse_foreign
from lamella.engine.vllm_request_arguments import (
    ASYNC_FROM_ENGINE_ARGS_ARGUMENTS,
    ASYNC_GENERATE_ARGUMENTS,
    CHAT_ARGUMENTS,
)
from lamella.errors import ConfigError, EngineClosedError, RequestError
from lamella.kv_cache.pinned_prefixes import PinnedPrefix
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.native.fork_guard import FORK_GUARD
from lamella.observability.metric_values import Metric

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_NUM_HELPERS = 4


class AsyncEngine:
    """One model and its KV cache, stepped by a thread of its own for callers in any thread and event loop
    (docs/embedding.md).

    AsyncEngine(config) or AsyncEngine(model=..., **engine_arguments): as Engine, which it makes here and now.
    max_queued_requests: how many requests the engine holds beside the max_num_seqs that may run. Further ones wait in
    `generate` until there is room, first come, first served, and are not tokenised before.

    Prompts are tokenised and grammars compiled by helper threads. The methods that are coroutines run there, too: some
    of them wait for the step that is running. `async with` closes it; so does the end of the program, and forgetting
    it.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, max_queued_requests: int = 1024, **engine_arguments: Any
    ) -> None:
        if isinstance(max_queued_requests, bool) or not isinstance(max_queued_requests, int) or max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests={shown(max_queued_requests)}: must be a whole number, 0 or more")
        self._engine = Engine(config, **engine_arguments)
        self._gate = AdmissionGate(self._engine.config.max_num_seqs + max_queued_requests)
        self._helpers = ThreadPoolExecutor(_NUM_HELPERS, thread_name_prefix="lamella-helper")
        self._thread = EngineThread(self._engine, self._gate)
        self._numbers = itertools.count()
        # Does not wait: whoever forgets it may be in the midst of anything.
        weakref.finalize(self, self._thread.ask_to_stop).atexit = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **vllm_arguments: Any) -> AsyncEngine:
        """AsyncEngine(engine_args), as vLLM's AsyncLLM is made."""
        known = ("engine_args",)
        refuse_foreign("from_engine_args", vllm_arguments, known=known, foreign=ASYNC_FROM_ENGINE_ARGS_ARGUMENTS)
        return cls(engine_args)

    # Requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **vllm_arguments: Any,
    ) -> RequestStream:
        """An async iterator of the request's outputs, the last of which is `finished`. `sampling_params.output_kind`
        says what each carries. Outputs that the caller is too slow for are merged into one.

        prompt, sampling_params, lora_request: as for `Engine.add_request`. request_id: None: one is made up. vLLM's
        other arguments are taken as long as their values ask for nothing.

        The request begins when the first output is asked for, and that raises RequestError and ModelLoadError where it
        cannot be run, EngineClosedError after `close` and `drain`, EngineCrashedError where the engine failed.
        """
        known = ("prompt", "sampling_params", "request_id", "lora_request")
        refuse_foreign("generate", vllm_arguments, known=known, foreign=ASYNC_GENERATE_ARGUMENTS)
        return self._stream(
            request_id, sampling_params, lambda params: self._engine.parse(prompt, params, lora_request)
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        prefix_boundary: int | Sequence[int] | None = None,
        **vllm_arguments: Any,
    ) -> RequestStream:
        """`generate` for the answer to one conversation; the arguments are `LLM.chat`'s."""
        known = ("messages", "sampling_params", "request_id", "lora_request", *_CHAT_PROMPT_ARGUMENTS)
        refuse_foreign("chat", vllm_arguments, known=known, foreign=CHAT_ARGUMENTS)

        def parse(params: SamplingParams) -> ParsedPrompt:
            prompts = chat_prompts(
                self.get_tokenizer(),
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                prefix_boundary=prefix_boundary,
            )
            if len(prompts) != 1:
                raise RequestError(f"messages is a list of {len(prompts)} conversations: give one, and call for each")
            return self._engine.parse(prompts[0], params, lora_request)

        return self._stream(request_id, sampling_params, parse)

    async def chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **chat_arguments: Any
    ) -> list[TokensPrompt]:
        """`LLM.chat_prompts`: the prompts of conversations, which `generate`, `pin_prefix` and `save_prefix` take."""
        return await self._call(chat_prompts, self.get_tokenizer(), messages, **chat_arguments)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests before the next step: their iterators give a last output, with finish_reason "abort". Unknown
        ids are ignored: they may just have finished."""
        self._require_running()
        given = [request_id] if isinstance(request_id, str) else list(request_id)
        self._thread.abort([one for one in given if isinstance(one, str)])

    @property
    def num_unfinished_requests(self) -> int:
        """Those that the engine holds, and those that wait for a place in it."""
        return self._gate.num_inside + self._gate.num_waiting

    @property
    def num_waiting_requests(self) -> int:
        """Those that wait because the engine holds as many as it may: for a service that would rather refuse."""
        return self._gate.num_waiting

    # Its end

    async def drain(self, timeout_seconds: float | None = None) -> bool:
        """Take no new requests, and wait until all others have ended; a request counts from when its first output was
        asked for. False if that took longer than the timeout: they run on. Raises EngineCrashedError.

        Outputs may still lie ready for callers when this returns; they stay, whatever becomes of the engine."""
        self._require_running()
        self._gate.stop(lambda: EngineClosedError("the engine is being drained and takes no new requests"))
        loop = asyncio.get_running_loop()
        is_empty = loop.create_future()

        def settle() -> None:
            if not is_empty.done():
                is_empty.set_result(None)

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        self._gate.tell_when_empty(tell)
        try:
            await asyncio.wait_for(is_empty, timeout_seconds)
        except TimeoutError:
            if self.num_unfinished_requests:
                return False
        if self._thread.cause is not None:
            raise self._thread.closed_error()
        return True

    def close(self) -> None:
        """Give all memory back after the step that is running; requests that have not ended raise EngineClosedError.
        Closing twice is fine. In an event loop, `await asyncio.to_thread(engine.close)` does not hold up others."""
        self._thread.stop()
        if not FORK_GUARD.has_forked:
            self._helpers.shutdown(wait=False)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def is_closed(self) -> bool:
        """Whether it takes no requests any more, because it was closed or has failed."""
        return self._thread.is_over

    # What the engine has besides requests

    @property
    def engine(self) -> Engine:
        """The engine that the thread steps. Look at it, but leave adding, aborting, stepping and closing to the
        thread."""
        return self._engine

    @property
    def model_config(self) -> ServedConfig:
        return self._engine.model_config

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with what the model's generation_config.json says of sampling."""
        return self._engine.get_default_sampling_params()

    async def stats(self) -> EngineStats:
        return await self._call(self._engine.stats)

    async def get_metrics(self) -> list[Metric]:
        """`Engine.get_metrics`."""
        return await self._call(self._engine.get_metrics)

    async def metrics_text(self) -> str:
        """`Engine.metrics_text`."""
        return await self._call(self._engine.metrics_text)

    async def kv_cache_report(self) -> str:
        return await self._call(self._engine.kv_cache_report)

    async def reset_prefix_cache(self, **vllm_arguments: Any) -> bool:
        """`Engine.reset_prefix_cache`."""
        return await self._call(self._engine.reset_prefix_cache, **vllm_arguments)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """`Engine.add_lora`."""
        return await self._call(self._engine.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """`Engine.remove_lora`."""
        return await self._call(self._engine.remove_lora, lora_id)

    async def pin_lora(self, lora_id: int) -> bool:
        """`Engine.pin_lora`."""
        return await self._call(self._engine.pin_lora, lora_id)

    async def list_loras(self) -> set[int]:
        """`Engine.list_loras`."""
        return await self._call(self._engine.list_loras)

    async def pin_prefix(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PinnedPrefix:
        """`Engine.pin_prefix`, and compute the prompt now if it is not cached. Where that fails it is not pinned."""
        pinned = await self._call(
            self._engine.pin_prefix, prompt, cache_salt=cache_salt, name=name, lora_request=lora_request
        )
        if pinned.is_cached:
            return pinned
        try:
            await self._compute_prefix(prompt, cache_salt, lora_request)
        except BaseException:
            if not self.is_closed:
                await asyncio.shield(self._call(self._engine.unpin_prefix, pinned))
            raise
        return next(one for one in await self.pinned_prefixes() if one.name == pinned.name)

    async def unpin_prefix(self, prefix: PinnedPrefix | str) -> None:
        """`Engine.unpin_prefix`."""
        await self._call(self._engine.unpin_prefix, prefix)

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """`Engine.pinned_prefixes`."""
        return await self._call(self._engine.pinned_prefixes)

    async def save_prefix(
        self,
        path: str | Path,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PrefixFile:
        """Compute a prompt, as far as it is not cached, and write its KV to a file: see `Engine.save_prefix`."""
        await self._compute_prefix(prompt, cache_salt, lora_request)
        return await self._call(
            self._engine.save_prefix, path, prompt, cache_salt=cache_salt, lora_request=lora_request
        )

    async def load_prefix(self, path: str | Path, *, lora_request: LoRARequest | None = None) -> PrefixFile:
        """`Engine.load_prefix`."""
        return await self._call(self._engine.load_prefix, path, lora_request=lora_request)

    async def _compute_prefix(self, prompt: Prompt, cache_salt: str | None, lora_request: LoRARequest | None) -> None:
        """Run a request with this prompt, whose end becomes a place to resume that goes after others."""

        def parse(params: SamplingParams) -> ParsedPrompt:
            parsed = self._engine.parse_prefix(prompt, cache_salt, lora_request)
            return dataclasses.replace(parsed, prefix_boundaries=(len(parsed.token_ids),))

        async for _ in self._stream(None, SamplingParams(temperature=0, max_tokens=1), parse):
            pass

    def _stream(
        self,
        request_id: str | None,
        params: SamplingParams | None,
        parse: Callable[[SamplingParams], ParsedPrompt],
    ) -> RequestStream:
        self._require_running()
        if not (request_id is None or isinstance(request_id, str)):
            raise RequestError(f"request_id={shown(request_id)}: must be a string, or None")
        own = self.get_default_sampling_params() if params is None else params
        name = f"async-{next(self._numbers)}" if request_id is None else request_id
        return RequestStream(Ask(name, own, lambda: self._call(parse, own)), self._gate, self._thread)

    async def _call(
        self, work: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """Do the work in a helper thread."""
        self._require_running()
        loop = asyncio.get_running_loop()
        try:
            pending = loop.run_in_executor(self._helpers, functools.partial(work, *arguments, **keywords))
        except RuntimeError:  # closed between the line above and here
            raise self._thread.closed_error() from self._thread.cause
        try:
            return await pending
        except EngineClosedError:
            raise self._thread.closed_error() from self._thread.cause

    def _require_running(self) -> None:
        FORK_GUARD.check()
        if self._thread.is_over:
            raise self._thread.closed_error()


_CHAT_PROMPT_ARGUMENTS = (
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
    "prefix_boundary",
)
