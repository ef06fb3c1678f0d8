"""The engine for embedding: add requests, step, take outputs. `LLM` is a loop over it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import LoadedEngine, load_engine
from lamella.engine.output_processor import OutputProcessor
from lamella.engine.outputs import RequestOutput
from lamella.engine.prompts import ParsedPrompt, parse_prompt
from lamella.engine.request import Request
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import EngineClosedError, RequestError
from lamella.kv_cache import invariants
from lamella.kv_cache.block_manager import GroupUsage
from lamella.kv_cache.counters import KVCacheCounters, count_kv_cache
from lamella.kv_cache.report import kv_cache_report
from lamella.model_executor.model_config import ModelConfig
from lamella.model_executor.runner import LaunchedStep
from lamella.model_executor.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine started. peak_pages: per group, the most pages that running requests
    held at once; peak_page_bytes: the same in bytes."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    peak_pages: dict[str, int]
    peak_page_bytes: dict[str, int]
    kv_cache: KVCacheCounters

    @property
    def pages(self) -> dict[str, GroupUsage]:
        """Per group, now."""
        return self.kv_cache.pages


class Engine:
    """One model and its KV cache. Several engines can live in one process; one thread at a time each.

    Engine(config) or Engine(model=..., **engine_arguments).
    """

    def __init__(self, config: EngineConfig | None = None, **engine_arguments: Any) -> None:
        if config is not None and engine_arguments:
            raise TypeError("give either a config or engine arguments, not both")
        started = time.monotonic()
        self.config = config if config is not None else EngineConfig(**engine_arguments)
        self._loaded: LoadedEngine | None = load_engine(self.config)
        self.config = dataclasses.replace(self.config, max_model_len=self._loaded.pool.max_model_len)
        self.max_model_len = self._loaded.pool.max_model_len
        self._outputs = OutputProcessor(self._loaded.tokenizer)
        self._num_arrived = 0
        self._launched: deque[LaunchedStep] = deque()  # oldest first; between calls of `step` one at most
        wants_async = self.config.async_scheduling
        self.is_async = self._loaded.runner.device.type == "cuda" if wants_async is None else wants_async
        self.load_seconds = time.monotonic() - started

    # Requests

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | None = None) -> None:
        """Queue a request. Raises RequestError, with nothing changed, if it cannot be run as given.

        prompt: a string, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, the dicts with an
        optional "cache_salt". params: None: `get_default_sampling_params()`.
        """
        params = self.get_default_sampling_params() if params is None else params
        self.add_parsed(request_id, self.parse(prompt, params), params)

    def parse(self, prompt: Any, params: SamplingParams) -> ParsedPrompt:
        """Check a prompt and its parameters against this model, without queueing anything."""
        loaded = self._require_open()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}: must be a SamplingParams")
        vocab_size = loaded.model_config.vocab_size
        for token_id in params.stop_token_ids or ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"stop_token_ids has {token_id}: must lie in [0, {vocab_size - 1}], the vocabulary")
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise RequestError(f"logprobs={params.logprobs}: the vocabulary has only {vocab_size} tokens")
        parsed = parse_prompt(prompt, loaded.tokenizer, vocab_size=vocab_size, max_model_len=self.max_model_len)
        room = self.max_model_len - len(parsed.token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens}: a prompt of {len(parsed.token_ids)} tokens leaves room for {room} "
                f"within max_model_len={self.max_model_len}"
            )
        return parsed

    def add_parsed(self, request_id: str, prompt: ParsedPrompt, params: SamplingParams) -> None:
        """Queue what `parse` returned."""
        loaded = self._require_open()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if request_id in self._outputs:
            raise RequestError(f"request_id={request_id!r} is in use: wait for it to finish or choose another")
        num_prompt_tokens = len(prompt.token_ids)
        max_tokens = self.max_model_len if params.max_tokens is None else params.max_tokens
        seed = params.seed if params.seed is not None else self._draw_seed()
        now = time.monotonic()
        requests = [
            Request(
                request_id=request_id,
                sample_index=index,
                params=params,
                token_ids=prompt.token_ids,
                num_prompt_tokens=num_prompt_tokens,
                max_total_tokens=min(num_prompt_tokens + max_tokens, self.max_model_len),
                seed=(seed + index) % 2**64,
                eos_token_ids=frozenset(() if params.ignore_eos else loaded.model_config.eos_token_ids),
                stop_token_ids=frozenset(params.stop_token_ids or ()),
                arrival_time=now,
                salt=prompt.cache_salt,
            )
            for index in range(params.n)
        ]
        self._num_arrived += 1
        self._outputs.add(prompt.text, params, requests)
        for request in requests:
            loaded.scheduler.add(request)

    def abort(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; returns their last outputs (finish_reason "abort"). Unknown ids are ignored:
        they may just have finished."""
        loaded = self._require_open()
        outputs = []
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if one in self._outputs:
                for request in self._outputs.requests_of(one):
                    if not request.is_finished:
                        loaded.scheduler.finish(request, "abort")
                outputs.append(self._outputs.abort(one))
        self._drop_moot_steps(loaded)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self._loaded is not None and len(self._outputs) > 0

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def step(self) -> list[RequestOutput]:
        """Run one step of the batch; returns the outputs of requests that got a token (or, for
        FINAL_ONLY, that finished). With async scheduling the next step is launched before this one's outputs are made.

        A request whose logits are no numbers ends alone, with finish_reason "error". If a step fails, its requests and
        those of a step launched after it wait again, and the error is raised."""
        loaded = self._require_open()
        if not self._launched and not self._launch(loaded):
            return []
        if self.is_async:
            self._launch(loaded)
        outputs = self._process(loaded)
        self._drop_moot_steps(loaded)
        if self.config.check_invariants:
            self.check_invariants()
        return outputs

    def _launch(self, loaded: LoadedEngine) -> bool:
        """Plan and launch a step; False if there is none to launch now."""
        try:
            plan = loaded.scheduler.schedule()
            if plan is None:
                return False
            self._launched.append(loaded.runner.launch(plan))
        except BaseException:
            self._roll_back(loaded)
            raise
        return True

    def _process(self, loaded: LoadedEngine) -> list[RequestOutput]:
        """Wait for the oldest launched step and take in what it computed."""
        try:
            result = self._launched.popleft().result()
        except BaseException:
            self._roll_back(loaded)
            raise
        new_tokens = loaded.scheduler.update(result)
        outputs, stopped = self._outputs.process(new_tokens)
        for request, stop_string in stopped:
            loaded.scheduler.finish(request, "stop", stop_string)
        return outputs

    def _drop_moot_steps(self, loaded: LoadedEngine) -> None:
        """Where no request is left, steps in flight compute nothing for anybody: have their memory back."""
        while self._launched and not len(self._outputs):
            try:
                self._process(loaded)
            except Exception:  # nobody's tokens are lost, and the outputs that are ready must not be
                logger.warning("a step in flight that no request needed any more failed", exc_info=True)

    def _roll_back(self, loaded: LoadedEngine) -> None:
        self._launched.clear()
        loaded.scheduler.roll_back()

    # The rest

    @property
    def model_config(self) -> ModelConfig:
        return self._require_open().model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: SamplingParams() with the model's generation_config.json."""
        return self._require_open().default_params

    @property
    def attention_backend(self) -> str:
        """Name of the backend in use: "native" or "torch" where "auto" was asked for on a CPU."""
        return self._require_open().runner.backend.name

    def get_tokenizer(self) -> Tokenizer:
        return self._require_open().tokenizer

    def check_invariants(self) -> None:
        """Raise InvariantError if the KV bookkeeping contradicts itself."""
        invariants.check(self._require_open().manager)

    def stats(self) -> EngineStats:
        loaded = self._require_open()
        counters = loaded.scheduler.counters()._asdict()
        hits = counters.pop("hits")
        peaks = dict(zip((group.name for group in loaded.layout.groups), loaded.manager.peak_owned, strict=True))
        page_bytes = {group.name: group.page_bytes for group in loaded.layout.groups}
        return EngineStats(
            **counters,
            peak_pages=peaks,
            peak_page_bytes={name: count * page_bytes[name] for name, count in peaks.items()},
            kv_cache=count_kv_cache(loaded.manager, hits),
        )

    def kv_cache_report(self) -> str:
        """Tables of what each layer keeps, pages and slabs per group, and how many requests fit at several lengths."""
        loaded = self._require_open()
        return kv_cache_report(
            loaded.layout,
            loaded.pool.num_slabs,
            max_model_len=loaded.pool.max_model_len,
            chunk_tokens=loaded.pool.chunk_tokens,
            interval_tokens=loaded.manager.interval_tokens,
            slab_quota=loaded.manager.arena.slab_quota,
            step_pages_bytes=loaded.pool.step_pages_bytes,
            num_blocks_more=loaded.manager.num_blocks_more,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes that no running request uses; True when none is left."""
        return self._require_open().manager.reset_prefix_cache()

    def close(self) -> None:
        """Give all memory back. Unfinished requests are dropped; closing twice is fine."""
        self._loaded = None
        self._launched.clear()
        self._outputs.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> LoadedEngine:
        if self._loaded is None:
            raise EngineClosedError("the engine is closed: make a new one")
        return self._loaded

    def _draw_seed(self) -> int:
        """A seed for a request that gives none: depends on the engine's seed and the order of arrival."""
        return (self.config.seed * 0x9E3779B97F4A7C15 + self._num_arrived * 0xD1B54A32D192ED03 + 1) % 2**64
