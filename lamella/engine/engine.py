"""The engine for embedding: add requests, step, take outputs. `LLM` is a loop over it."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lamella.argument_checks import shown
from lamella.distributed.start_workers import start_workers
from lamella.engine.config import EngineConfig
from lamella.engine.engine_inspection import EngineInspection
from lamella.engine.engine_view import EngineView, snapshot_of
from lamella.engine.held_interrupts import HeldInterrupts
from lamella.engine.loaded_adapters import LoadedAdapter, LoadedAdapters
from lamella.engine.logits_processors import logits_functions
from lamella.engine.lora_request import LoRARequest
from lamella.engine.model_opening import ServedConfig
from lamella.engine.model_setup import LoadedEngine, load_engine
from lamella.engine.output_processor import OutputProcessor
from lamella.engine.outputs import RequestOutput
from lamella.engine.prompts import ParsedPrompt
from lamella.engine.request_parser import RequestParser, drawn_seed
from lamella.engine.request_rules import make_prompt_scores
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.saved_prefixes import (
    PrefixFile,
    PrefixForm,
    enter_prefix,
    open_prefix,
    prefix_form,
    prefix_ties,
    save_prefix,
)
from lamella.engine.scheduling.request import NO_ADAPTER, Request
from lamella.engine.scheduling.request_rows import RunningTokens, require_fitting
from lamella.engine.scheduling.scheduler_counters import DraftCounters
from lamella.engine.step_failures import CALM, forget_frames, is_out_of_memory
from lamella.engine.turns import Turns, in_turn
from lamella.engine.vllm_keywords import refuse_foreign
from lamella.engine.vllm_request_arguments import (
    ABORT_REQUEST_ARGUMENTS,
    ADD_REQUEST_ARGUMENTS,
    FROM_ENGINE_ARGS_ARGUMENTS,
    RESET_PREFIX_CACHE_ARGUMENTS,
)
from lamella.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    InvariantError,
    PrefixFileError,
    RequestError,
    WorkerLostError,
)
from lamella.kv_cache import invariants
from lamella.kv_cache.counters import GroupUsage, KVCacheCounters
from lamella.kv_cache.pinned_prefixes import PinnedPrefix
from lamella.kv_cache.report import kv_cache_report
from lamella.model_executor.adapters.adapter_reader import ReadAdapter
from lamella.model_executor.prefix_file import OpenPrefix, PrefixTies
from lamella.model_executor.runner import LaunchedStep
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.native.fork_guard import FORK_GUARD
from lamella.observability.engine_snapshot import EngineSnapshot
from lamella.observability.metric_values import Metric
from lamella.output_path import check_output_path

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine started. peak_pages: per group, the most pages that running requests
    held at once; peak_page_bytes: the same in bytes. drafts: what speculation proposed and requests got.
    num_failed_steps: those that were undone and did not end the call of `step`."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    peak_pages: dict[str, int]
    peak_page_bytes: dict[str, int]
    kv_cache: KVCacheCounters
    drafts: DraftCounters
    num_failed_steps: int = 0

    @property
    def pages(self) -> dict[str, GroupUsage]:
        """Pages of each group by state, as they are now."""
        return self.kv_cache.pages


class _Books(enum.Enum):
    """The state of requests and cache. It decides how the engine recovers from an exception (docs/failures.md)."""

    SETTLED = "settled"  # between calls: nothing is under way
    PLANNED = "planned"  # steps are planned, nothing else has changed: `Scheduler.roll_back` undoes them
    HALF_DONE = "half done"  # something is being changed: the scheduler begins anew with what is kept


class Engine:
    """One model and its KV cache. Several engines can live in one process. Any thread may call: calls queue, and each
    waits at most for the step that is running.

    Engine(config) or Engine(model=..., **engine_arguments). shows_progress: say on stderr what loading does where that
    takes long; the log says it either way.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, shows_progress: bool = False, **engine_arguments: Any
    ) -> None:
        if config is not None and engine_arguments:
            raise TypeError("give either a config or engine arguments, not both")
        FORK_GUARD.check()
        if engine_arguments.get("data_parallel_size", 1) != 1 or getattr(config, "data_parallel_size", 1) != 1:
            raise ConfigError("data_parallel_size is of whole engines, and this is one: give it to LLM")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config={shown(config)} is a {type(config).__name__}; give an EngineConfig, or Engine(model=...)"
            )
        started = time.monotonic()
        self._turns = Turns()
        self.config = config if config is not None else EngineConfig(**engine_arguments)
        check_output_path("profile", self.config.profile)
        FORK_GUARD.arm()  # torch has threads even where no native kernels are loaded
        self._loaded: LoadedEngine | None = self._load(shows_progress)
        self.config = dataclasses.replace(self.config, max_model_len=self._loaded.pool.max_model_len)
        self.max_model_len = self._loaded.pool.max_model_len
        self._outputs = OutputProcessor(self._loaded.tokenizer)
        self._parser = RequestParser(self.config, self._loaded.tokenizer, self._loaded.model_config, self.max_model_len)
        self._num_arrived = 0
        self._ties: PrefixTies | None = None  # of saved prefixes, made when they are first asked for
        # Steps in flight, oldest first. Between calls of `step` there is one at most.
        self._launched: deque[LaunchedStep] = deque()
        self._books = _Books.SETTLED
        self._failures = CALM
        self._num_failed_steps = 0
        self._interrupts = HeldInterrupts()
        wants_async = self.config.async_scheduling
        by_default = self._loaded.runner.device.type == "cuda" and self.config.speculation is None
        self.is_async = by_default if wants_async is None else wants_async
        self._view = EngineView(self.config, self._loaded, self._snapshot)
        self.load_seconds = time.monotonic() - started
        if logger.isEnabledFor(logging.INFO):
            logger.info("loaded in %.1f s\n%s", self.load_seconds, self.kv_cache_report())

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **vllm_arguments: Any) -> Engine:
        """Engine(engine_args), as vLLM's LLMEngine is made."""
        known = ("engine_args",)
        refuse_foreign("from_engine_args", vllm_arguments, known=known, foreign=FROM_ENGINE_ARGS_ARGUMENTS)
        return cls(engine_args)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **vllm_arguments: Any,
    ) -> None:
        """Queue a request. Raises RequestError, with nothing changed, if it cannot be run as given.

        prompt: a string, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, the dicts with an
        optional "cache_salt" and "prefix_boundary" (docs/prefixes.md). params: None: `get_default_sampling_params()`.
        lora_request: the adapter to run with, loaded if it is not; ModelLoadError where it cannot be. vLLM's other
        arguments are accepted as long as their values ask for nothing.
        """
        if vllm_arguments:
            known = ("request_id", "prompt", "params", "lora_request")
            refuse_foreign("add_request", vllm_arguments, known=known, foreign=ADD_REQUEST_ARGUMENTS)
        params = self.get_default_sampling_params() if params is None else params
        self.add_parsed(request_id, self.parse(prompt, params, lora_request), params)

    def parse(self, prompt: Any, params: SamplingParams, lora_request: LoRARequest | None = None) -> ParsedPrompt:
        """Check a prompt and its parameters against this model, without queueing anything. An adapter is loaded."""
        self._require_open()
        parsed = self._parser.parse(prompt, params)
        return parsed if lora_request is None else dataclasses.replace(parsed, adapter=self.load_adapter(lora_request))

    @in_turn
    def add_parsed(self, request_id: str, prompt: ParsedPrompt, params: SamplingParams) -> None:
        """Queue what `parse` returned. Whatever is raised, all n samples are queued, or none."""
        loaded = self._require_settled()
        vocab_size = loaded.model_config.vocab_size
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if request_id in self._outputs:
            raise RequestError(f"request_id={request_id!r} is in use: wait for it to finish or choose another")
        adapter = prompt.adapter
        if adapter is not None:
            adapter = loaded.adapters.keep(adapter, self._adapters_in_use)
        num_prompt_tokens = len(prompt.token_ids)
        if params.logprobs == -1:
            params = dataclasses.replace(params, logprobs=vocab_size)
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
                salt=prompt.salt,
                adapter_id=NO_ADAPTER if adapter is None else adapter.number,
                grammar=None if prompt.new_grammar is None else prompt.new_grammar(),
                rules=prompt.rules,
                logits_functions=logits_functions(params.logits_processors),
                # The samples' prompts are one: what is found of it is reported once.
                prompt_scores=make_prompt_scores(params, num_prompt_tokens, vocab_size) if index == 0 else None,
                prefix_boundaries=prompt.prefix_boundaries,
            )
            for index in range(params.n)
        ]
        require_fitting(requests[0])
        conversation = self._outputs.new_conversation(
            prompt.text, params, requests, None if adapter is None else adapter.request
        )
        num_arrived = self._num_arrived
        try:
            self._books = _Books.HALF_DONE
            for request in requests:
                loaded.scheduler.add(request)
            self._num_arrived = num_arrived + 1
            self._outputs.add(conversation)
            self._books = _Books.SETTLED
            self._view.arrived(requests, params)
        except BaseException:
            if request_id not in self._outputs:
                self._num_arrived = num_arrived
            self._recover(loaded)
            raise

    def abort(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; returns their last outputs (finish_reason "abort"), and earlier outputs of theirs that no
        `step` has returned. Unknown ids are ignored: they may just have finished. If it is interrupted, all are ended
        or none; the next `step` returns outputs that this call could not."""
        given = dict.fromkeys([request_id] if isinstance(request_id, str) else request_id)
        self._abort(given)
        return self._outputs.take_of(given)

    @in_turn
    def _abort(self, given: Iterable[str]) -> None:
        loaded = self._require_settled()
        try:
            self._books = _Books.HALF_DONE
            ended = self._outputs.abort([one for one in given if one in self._outputs])
            for request in ended:
                loaded.scheduler.finish(request, "abort")
            self._view.ended(self._outputs.ended)
            self._drop_moot_steps(loaded)
            self._books = _Books.SETTLED
        except BaseException:
            self._recover(loaded)
            raise

    def abort_request(self, request_ids: str | Iterable[str], **vllm_arguments: Any) -> None:
        """`abort` under vLLM's name, which returns nothing."""
        refuse_foreign("abort_request", vllm_arguments, known=("request_ids",), foreign=ABORT_REQUEST_ARGUMENTS)
        self.abort(request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to `step` for: a request that runs or waits, or an output that nobody got."""
        return self._loaded is not None and (len(self._outputs) > 0 or self._outputs.has_outputs)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._outputs)

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished_requests

    def step(self) -> list[RequestOutput]:
        """Run one step of the batch; returns the outputs of requests that got a token (or, for
        FINAL_ONLY, that finished). With async scheduling the next step is launched before this one's outputs are made.

        A request whose logits are no numbers ends alone, with finish_reason "error". A step that fails is undone, and
        this returns without its outputs: the next call does it again. Where memory ran out, that step is smaller. A
        request that fails twice alone, after steps with it failed twice, ends with an output whose `error` is a
        StepFailedError; other requests get what they would have got.

        Raised are: EngineClosedError; an exception that is no Exception, like KeyboardInterrupt; InvariantError where
        check_invariants is on; what is raised while a failed step is being undone. Even then the requests are as they
        were before the step, or as they are after it: call `step` again to go on, which also returns the outputs that
        this call could not. Ctrl-C is held back until the step is done; a second one interrupts it. docs/failures.md
        has the rules."""
        self._interrupts.run(self._step)
        return self._outputs.take()

    @in_turn
    def _step(self) -> None:
        loaded = self._require_settled()
        if self._outputs.has_outputs:
            return  # an earlier step was done, and interrupted before its outputs were returned
        self._view.step_begins()
        try:
            if self._launched or self._launch(loaded):
                if self.is_async and not self._failures.is_watching:
                    self._launch(loaded)
                self._process(loaded)
                self._drop_moot_steps(loaded)
            if self._failures is not CALM:
                self._note_success(loaded)
            if self.config.check_invariants:
                invariants.check(loaded.manager, loaded.scheduler.num_computed())
            self._books = _Books.SETTLED
            self._view.step_ends(loaded)
        except WorkerLostError:
            self._close()
            raise
        except Exception as error:
            if not self._contain(loaded, error):
                raise
        except BaseException:
            self._recover(loaded)
            raise

    def _contain(self, loaded: LoadedEngine, error: Exception) -> bool:
        """Undo the step that failed, and decide what follows from it (`StepFailures`). False: the caller has to know
        the error."""
        scheduler, outputs = loaded.scheduler, self._outputs
        is_to_be_raised = isinstance(error, InvariantError) and self.config.check_invariants
        suspects = outputs.in_a_step()
        if scheduler.considered is not None and scheduler.considered.request_id not in suspects:
            suspects.append(scheduler.considered.request_id)
        if self._failures.suspects_all and not self._failures.groups:
            suspects = []
        num_computed = scheduler.rows.num_computed_at
        positions = {one: outputs.positions_of(one, num_computed) for one in suspects or outputs.ids()}
        known = {one: position for one, position in positions.items() if position is not None}
        if is_to_be_raised or not known:
            self._recover(loaded)
            return False
        self._failures = self._failures.after_failure(
            error,
            known,
            num_step_tokens=scheduler.num_step_tokens,
            max_num_tokens=scheduler.max_num_batched_tokens,
        )
        self._num_failed_steps += 1
        logger.warning("a step failed and is undone", exc_info=error)
        forget_frames(error)
        self._recover(loaded)
        if is_out_of_memory(error):
            loaded.runner.trim_memory()
        return True

    def _note_success(self, loaded: LoadedEngine) -> None:
        self._books = _Books.HALF_DONE
        num_computed = loaded.scheduler.rows.num_computed_at
        self._failures = self._failures.after_step(
            lambda request_id: self._outputs.positions_of(request_id, num_computed),
            max_num_tokens=loaded.scheduler.max_num_batched_tokens,
        )
        self._draw_conclusions(loaded)

    def _draw_conclusions(self, loaded: LoadedEngine) -> None:
        """Have the scheduler do what follows from failed steps. If it is interrupted, it must be called again."""
        failures, scheduler = self._failures, loaded.scheduler
        guilty = {one: error for one, error in failures.guilty.items() if one in self._outputs}
        if guilty:
            for request in self._outputs.fail(guilty):
                logger.error("%s", request.stop_reason)
                scheduler.finish(request, "error", request.stop_reason)
            self._view.ended(self._outputs.ended)
        if failures.guilty:
            self._failures = failures.without_guilty()
        scheduler.limit(failures.most_tokens)
        scheduler.run_only(failures.only)

    def _launch(self, loaded: LoadedEngine) -> bool:
        """Plan and launch a step; False if there is none to launch now."""
        self._books = _Books.HALF_DONE
        plan = loaded.scheduler.schedule()
        self._view.planned(loaded)
        if plan is None:
            return False
        self._books = _Books.PLANNED
        self._launched.append(loaded.runner.launch(plan))
        self._view.launched(plan)
        return True

    def _process(self, loaded: LoadedEngine) -> None:
        """Wait for the oldest launched step and take in what it computed."""
        self._books = _Books.PLANNED
        result = self._launched[0].result()
        self._view.part_ends("wait")
        self._books = _Books.HALF_DONE
        self._launched.popleft()
        new_tokens = loaded.scheduler.update(result)
        self._view.part_ends("update")
        for request, stop_string, num_dropped in self._outputs.process(new_tokens):
            loaded.scheduler.finish(request, "stop", stop_string, num_dropped_tokens=num_dropped)
        self._view.processed(new_tokens, self._outputs.ended)

    def _drop_moot_steps(self, loaded: LoadedEngine) -> None:
        """When no request is left, nobody wants what the steps in flight compute: wait for them, so that their memory
        is free."""
        while self._launched and not len(self._outputs):
            try:
                self._process(loaded)
            except Exception:  # no request loses tokens by it, and outputs that are ready must still be returned
                logger.warning("a step in flight that no request needed any more failed", exc_info=True)
                self._recover(loaded)

    def _recover(self, loaded: LoadedEngine) -> None:
        """Bring everything back to a state between two steps, wherever an exception came from. If this is itself
        interrupted, it must be called again before anything else, which `_require_settled` does."""
        if self._books is _Books.PLANNED:
            self._books = _Books.HALF_DONE  # until the steps are undone
            try:
                self._drain()
                loaded.scheduler.roll_back()
                self._books = _Books.SETTLED
            except Exception:
                logger.warning("a step could not be rolled back; the cache is emptied", exc_info=True)
        is_half_done = self._books is _Books.HALF_DONE
        self._outputs.settle(restores=is_half_done)
        if is_half_done:
            self._drain()
            loaded.scheduler.restart(self._outputs.unfinished(), self._outputs.num_kept_tokens)
        self._books = _Books.HALF_DONE
        self._draw_conclusions(loaded)
        self._books = _Books.SETTLED
        self._view.recovered()

    def _drain(self) -> None:
        """Wait until the steps in flight are over, then drop them: as long as they run they write to pages."""
        while self._launched:
            try:
                self._launched[0].result()
            except Exception:  # most often it is the error that is being handled already
                logger.debug("a step in flight that is dropped failed", exc_info=True)
            self._launched.popleft()

    # Adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of the requests that use it. Returns whether it was not loaded yet.

        Raises ModelLoadError where it cannot be read or is not for this model, RequestError where another adapter has
        its lora_int_id, or adapters are not enabled.
        """
        is_new = isinstance(lora_request, LoRARequest) and lora_request.lora_int_id not in self.list_loras()
        self.load_adapter(lora_request)
        return is_new

    @in_turn
    def remove_lora(self, lora_id: int) -> bool:
        """Let go of an adapter, pinned or not. False where none of this lora_int_id is loaded. Raises RequestError
        while requests use it."""
        return self._require_settled().adapters.remove(lora_id, self._adapters_in_use)

    @in_turn
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded until `remove_lora`, whatever max_cpu_loras says. False where none of this
        lora_int_id is loaded."""
        return self._require_settled().adapters.pin(lora_id)

    @in_turn
    def list_loras(self) -> set[int]:
        """The lora_int_ids of the adapters that are loaded."""
        return self._require_open().adapters.ids()

    def load_adapter(self, lora_request: LoRARequest) -> LoadedAdapter:
        """The adapter for a `ParsedPrompt`, loaded if it is not. Raises as `add_lora`. It is read from its files while
        steps of other threads run."""
        adapters, known = self._find_adapter(lora_request)
        return known if known is not None else self._enter_adapter(lora_request, adapters.read(lora_request))

    @in_turn
    def _find_adapter(self, lora_request: LoRARequest) -> tuple[LoadedAdapters, LoadedAdapter | None]:
        adapters = self._require_settled().adapters
        return adapters, adapters.find(lora_request, self._adapters_in_use)

    @in_turn
    def _enter_adapter(self, lora_request: LoRARequest, read: ReadAdapter) -> LoadedAdapter:
        return self._require_settled().adapters.enter(lora_request, read, self._adapters_in_use)

    def _adapters_in_use(self) -> Counter[int]:
        """The numbers of the adapters of unfinished requests, and of how many each is."""
        return Counter(request.adapter_id for request in self._outputs.unfinished())

    # State, reports and closing

    @property
    def is_closed(self) -> bool:
        return self._loaded is None

    @property
    def is_called_here(self) -> bool:
        """Whether this thread is inside of a call of the engine, as a finalizer that Python runs then may be: that must
        not call it again."""
        return self._turns.is_mine

    @property
    def model_config(self) -> ServedConfig:
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

    def inspect(self) -> EngineInspection:
        """The parts that this engine is made of, for tests and tools to look at. Changes nothing and waits for nothing:
        what a step that runs is changing may be seen half done. Raises EngineClosedError."""
        loaded = self._require_open()
        return EngineInspection(
            loaded.layout, loaded.pool, loaded.manager, loaded.scheduler, loaded.runner, tuple(self._launched)
        )

    @in_turn
    def check_invariants(self) -> None:
        """Raise InvariantError if the KV bookkeeping contradicts itself."""
        loaded = self._require_settled()
        invariants.check(loaded.manager, loaded.scheduler.num_computed())

    @in_turn
    def stats(self) -> EngineStats:
        loaded = self._require_open()
        counters = loaded.scheduler.counters()._asdict()
        hits = counters.pop("hits")
        peaks = loaded.manager.peak_pages()
        page_bytes = {group.name: group.page_bytes for group in loaded.layout.groups}
        return EngineStats(
            **counters,
            peak_pages=peaks,
            peak_page_bytes={name: count * page_bytes[name] for name, count in peaks.items()},
            kv_cache=loaded.manager.counters(hits),
            drafts=loaded.scheduler.draft_counters(),
            num_failed_steps=self._num_failed_steps,
        )

    @in_turn
    def _snapshot(self) -> EngineSnapshot:
        return snapshot_of(self._require_open())

    def get_metrics(self) -> list[Metric]:
        """All metrics, as vLLM's `LLM.get_metrics` returns them: a list of Counter, Gauge, Histogram and Vector, of
        `lamella.metrics`. Any thread may ask. Raises LamellaError where disable_log_stats=True keeps none."""
        self._require_open()
        return self._view.metrics.values()

    def metrics_text(self) -> str:
        """All metrics in Prometheus' text form, for a server to answer /metrics with. Raises as `get_metrics`."""
        self._require_open()
        return self._view.metrics.text()

    @in_turn
    def running_tokens(self) -> RunningTokens:
        """How far the running requests are; cheaper than `stats`."""
        return self._require_open().scheduler.rows.running_tokens()

    @in_turn
    def kv_cache_report(self) -> str:
        """Tables of what each layer keeps, pages and slabs per group, and how many requests fit at several lengths."""
        loaded = self._require_open()
        return kv_cache_report(
            loaded.layout,
            loaded.pool.num_slabs,
            max_model_len=loaded.pool.max_model_len,
            chunk_tokens=loaded.pool.chunk_tokens,
            interval_tokens=loaded.manager.settings.interval_tokens,
            slab_quota=loaded.manager.settings.slab_quota,
            step_pages_bytes=loaded.pool.step_pages_bytes,
            num_blocks_more=loaded.manager.settings.num_blocks_more,
            pinned=loaded.manager.pinned(),
            num_draft_tokens=loaded.manager.settings.num_draft_tokens,
        )

    # Prefixes by name

    def pin_prefix(
        self,
        prompt: Any,
        *,
        cache_salt: str | None = None,
        name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PinnedPrefix:
        """Keep a prompt's KV in the cache until `unpin_prefix`, for all prompts that begin with it: from now on if it
        is cached; otherwise as soon as a request has computed it, which any that begins with it does.

        prompt, lora_request: as for `add_request`; an adapter's prefix serves that adapter, and is kept whether or not
        the adapter stays loaded. name: to unpin it by; None: one is made up. Raises RequestError for prompts that
        cannot be run and a name in use, CapacityError, with nothing changed, where pins would keep more than
        max_pinned_bytes or leave too little for one request of max_model_len."""
        return self._pin_prefix(self.parse_prefix(prompt, cache_salt, lora_request), name)

    @in_turn
    def _pin_prefix(self, prefix: ParsedPrompt, name: str | None) -> PinnedPrefix:
        loaded = self._require_settled()
        known = {one.name for one in loaded.manager.pinned()}
        if name is None:
            name = next(one for one in map("prefix-{}".format, itertools.count()) if one not in known)
        if not isinstance(name, str) or not name:
            raise RequestError(f"name={shown(name)}: must be a string that is not empty, or None")
        return self._change_cache(lambda: loaded.manager.pin(name, prefix.token_ids, prefix.salt))

    @in_turn
    def unpin_prefix(self, prefix: PinnedPrefix | str) -> None:
        """Undo `pin_prefix`, by what that returned or by name: the prefix ages like any other from now on. Raises
        RequestError where no such prefix is pinned."""
        loaded = self._require_settled()
        name = prefix.name if isinstance(prefix, PinnedPrefix) else prefix
        if not isinstance(name, str):
            raise RequestError(f"prefix={shown(prefix)} is no name of a pinned prefix: give what pin_prefix returned")
        self._change_cache(lambda: loaded.manager.unpin(name))

    @in_turn
    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """All pinned prefixes, in the order in which they were pinned, and whether each is cached yet."""
        return self._require_settled().manager.pinned()

    def save_prefix(
        self,
        path: str | Path,
        prompt: Any,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PrefixFile:
        """Write a prompt's KV to a file, for `load_prefix` of another engine (docs/prefixes.md). An existing file is
        replaced at once and whole.

        Raises RequestError where the cache has not all of it (run a request with this prompt first), PrefixFileError
        where the file cannot be written."""
        return self._save_prefix(path, self.parse_prefix(prompt, cache_salt, lora_request))

    @in_turn
    def _save_prefix(self, path: str | Path, prefix: ParsedPrompt) -> PrefixFile:
        loaded = self._require_settled()
        ties = self._prefix_ties(loaded)
        return self._change_cache(lambda: save_prefix(loaded, ties, path, prefix))

    def load_prefix(self, path: str | Path, *, lora_request: LoRARequest | None = None) -> PrefixFile:
        """Put what `save_prefix` wrote into the cache: prompts that begin with it find it, as if it had been computed
        here. It ages as a prompt's `prefix_boundary` does; `pin_prefix` keeps it for good. The file is read and checked
        while steps of other threads run. lora_request: the adapter that it was saved with.

        Raises PrefixFileError, with nothing changed, for a file that is damaged, cut, of another format, or of
        another model, adapter, weight form, arithmetic, KV dtype or layers; RequestError where its window does not fill
        pages of this size; CapacityError where no memory is free."""
        digest = "" if lora_request is None else self.load_adapter(lora_request).digest
        with open_prefix(self._prefix_form(digest), path) as prefix:
            self._enter_prefix(prefix, digest)
            return PrefixFile(prefix.token_ids.tolist(), prefix.salt, prefix.kv_bytes, prefix.file_bytes)

    @in_turn
    def _prefix_form(self, adapter_digest: str) -> PrefixForm:
        loaded = self._require_settled()
        return prefix_form(loaded, dataclasses.replace(self._prefix_ties(loaded), adapter=adapter_digest))

    @in_turn
    def _enter_prefix(self, prefix: OpenPrefix, adapter_digest: str) -> None:
        loaded = self._require_settled()
        self._change_cache(lambda: enter_prefix(loaded, prefix, adapter_digest))

    def parse_prefix(
        self, prompt: Any, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> ParsedPrompt:
        """`parse` for a prefix that is to be pinned or saved, under the salt that requests with it have."""
        parsed = self.parse(prompt, SamplingParams(), lora_request)
        salt = parsed.cache_salt
        if cache_salt is not None:
            if not isinstance(cache_salt, str) or not cache_salt or "\0" in cache_salt:
                raise RequestError(
                    f"cache_salt={shown(cache_salt)}: must be a string that is not empty and holds no null character"
                )
            if salt not in (None, cache_salt):
                raise RequestError(
                    f"cache_salt={shown(cache_salt)}, and the prompt has {shown(salt)}: give one of them"
                )
            salt = cache_salt
        return dataclasses.replace(parsed, cache_salt=salt)

    def _prefix_ties(self, loaded: LoadedEngine) -> PrefixTies:
        if loaded.workers is not None:
            raise RequestError(
                f"tensor_parallel_size={loaded.workers.num_workers}: each worker has the KV of its heads, and files "
                "of prefixes hold that of all; use 1"
            )
        if self._ties is None:
            self._ties = prefix_ties(self.config, loaded)
        return self._ties

    def _change_cache(self, change: Callable[[], Result]) -> Result:
        """Make a change that is refused with nothing changed, or done; whatever else is raised empties the cache."""
        loaded = self._require_settled()
        try:
            self._books = _Books.HALF_DONE
            result = change()
            self._books = _Books.SETTLED
        except (RequestError, ConfigError, PrefixFileError):
            self._books = _Books.SETTLED
            raise
        except BaseException:
            self._recover(loaded)
            raise
        return result

    @in_turn
    def reset_prefix_cache(self, /, **vllm_arguments: Any) -> bool:
        """Forget cached prefixes that no running request uses; True when none is left but pinned ones, which stay."""
        refuse_foreign("reset_prefix_cache", vllm_arguments, known=(), foreign=RESET_PREFIX_CACHE_ARGUMENTS)
        return self._change_cache(self._require_settled().manager.reset_prefix_cache)

    def close(self) -> None:
        """Give all memory back. Unfinished requests are dropped; closing twice is fine.

        A step that another thread runs ends first; that thread's next call raises EngineClosedError."""
        if FORK_GUARD.has_forked:  # the other threads were not copied, and one of them may have held the lock
            self._turns = Turns()
        self._turns.run(self._close)

    def _close(self) -> None:
        loaded, self._loaded = self._loaded, None
        self._launched.clear()
        self._outputs.clear()
        self._books = _Books.SETTLED
        if loaded is not None:
            self._view.close()
        if loaded is not None:
            loaded.let_go()  # the traceback of a failed step keeps `loaded` alive, but must not keep its memory

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, shows_progress: bool) -> LoadedEngine:
        try:
            return load_engine(self.config, shows_progress=shows_progress, start_workers=start_workers)
        except MemoryError as error:
            raise CapacityError(
                f"memory ended while tables were made for max_num_seqs={self.config.max_num_seqs}, "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens} and "
                f"max_model_len={self.config.max_model_len} ({error}); lower them, or free memory"
            ) from error

    def _require_open(self) -> LoadedEngine:
        FORK_GUARD.check()
        loaded = self._loaded
        if loaded is None:
            raise EngineClosedError("the engine is closed: make a new one")
        return loaded

    def _require_settled(self) -> LoadedEngine:
        """Every call that changes something begins with this. Where an exception interrupted the recovery from an
        earlier one, the recovery is completed here first. Raises EngineClosedError."""
        loaded = self._require_open()
        if self._books is not _Books.SETTLED:
            self._recover(loaded)
        return loaded

    def _draw_seed(self) -> int:
        """A seed for a request that gives none: depends on the engine's seed and the order of arrival."""
        return drawn_seed(self.config.seed, self._num_arrived)
