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
from lamella.engine.config import EngineConfig
from lamella.engine.engine_inspection import EngineInspection
from lamella.engine.held_interrupts import HeldInterrupts
from lamella.engine.loaded_adapters import LoadedAdapter, LoadedAdapters
from lamella.engine.logits_processors import logits_functions
from lamella.engine.lora_request import LoRARequest
from lamella.engine.model_opening import ServedConfig
from lamella.engine.model_setup import LoadedEngine, load_engine
from lamella.engine.output_processor import OutputProcessor
from lamella.engine.outputs import RequestOutput
from lamella.engine.prompts import ParsedPrompt, parse_prompt
from lamella.engine.request_rules import RuleMaker, make_prompt_scores
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
from lamella.engine.structured.compiler import GrammarCompiler
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.engine.turns import Turns, in_turn
from lamella.engine.vllm_keywords import refuse_foreign
from lamella.engine.vllm_request_arguments import (
    ABORT_REQUEST_ARGUMENTS,
    ADD_REQUEST_ARGUMENTS,
    FROM_ENGINE_ARGS_ARGUMENTS,
    RESET_PREFIX_CACHE_ARGUMENTS,
)
from lamella.errors import CapacityError, ConfigError, EngineClosedError, PrefixFileError, RequestError
from lamella.kv_cache import invariants
from lamella.kv_cache.counters import GroupUsage, KVCacheCounters
from lamella.kv_cache.pinned_prefixes import PinnedPrefix
from lamella.kv_cache.report import kv_cache_report
from lamella.model_executor.adapters.adapter_reader import ReadAdapter
from lamella.model_executor.prefix_file import OpenPrefix, PrefixTies
from lamella.model_executor.runner import LaunchedStep
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.native.fork_guard import FORK_GUARD

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine started. peak_pages: per group, the most pages that running requests
    held at once; peak_page_bytes: the same in bytes. drafts: what speculation proposed and requests got."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_preemptions: int
    peak_pages: dict[str, int]
    peak_page_bytes: dict[str, int]
    kv_cache: KVCacheCounters
    drafts: DraftCounters

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
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config={shown(config)} is a {type(config).__name__}; give an EngineConfig, or Engine(model=...)"
            )
        started = time.monotonic()
        self._turns = Turns()
        self.config = config if config is not None else EngineConfig(**engine_arguments)
        FORK_GUARD.arm()  # torch has threads even where no native kernels are loaded
        self._loaded: LoadedEngine | None = self._load(shows_progress)
        self.config = dataclasses.replace(self.config, max_model_len=self._loaded.pool.max_model_len)
        self.max_model_len = self._loaded.pool.max_model_len
        self._outputs = OutputProcessor(self._loaded.tokenizer)
        self._grammars = GrammarCompiler(
            self._loaded.tokenizer,
            self._loaded.model_config.vocab_size,
            self._loaded.model_config.eos_token_ids,
            StructuredOutputsConfig.of(self.config.structured_outputs_config),
        )
        self._num_arrived = 0
        served = self._loaded.model_config
        self._rules = RuleMaker(self._loaded.tokenizer, served.vocab_size, served.eos_token_ids)
        self._ties: PrefixTies | None = None  # of saved prefixes, made when they are first asked for
        # Steps in flight, oldest first. Between calls of `step` there is one at most.
        self._launched: deque[LaunchedStep] = deque()
        self._books = _Books.SETTLED
        self._interrupts = HeldInterrupts()
        wants_async = self.config.async_scheduling
        by_default = self._loaded.runner.device.type == "cuda" and self.config.speculation is None
        self.is_async = by_default if wants_async is None else wants_async
        self.load_seconds = time.monotonic() - started

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
        loaded = self._require_open()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}: must be a SamplingParams")
        vocab_size = loaded.model_config.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            num_top = getattr(params, name)
            if num_top is not None and num_top > vocab_size:
                raise RequestError(f"{name}={num_top}: the vocabulary has only {vocab_size} tokens; -1 is all of them")
        rules = self._rules.make(params)
        parsed = parse_prompt(prompt, loaded.tokenizer, vocab_size=vocab_size, max_model_len=self.max_model_len)
        room = self.max_model_len - len(parsed.token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens}: a prompt of {len(parsed.token_ids)} tokens leaves room for {room} "
                f"within max_model_len={self.max_model_len}"
            )
        if (params.prompt_logprob_start or 0) >= len(parsed.token_ids):
            raise RequestError(
                f"prompt_logprob_start={params.prompt_logprob_start}: the prompt has only {len(parsed.token_ids)} "
                f"tokens; give at most {len(parsed.token_ids) - 1}"
            )
        form = StructuredOutputsParams.of(params.structured_outputs)
        new_grammar = None if form is None else self._grammars.compile(form)
        adapter = None if lora_request is None else self.load_adapter(lora_request)
        return dataclasses.replace(parsed, rules=rules, new_grammar=new_grammar, adapter=adapter)

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

        A request whose logits are no numbers ends alone, with finish_reason "error". Whatever else is raised leaves the
        requests as they were before the step, or as they are after it, and is raised here: call `step` again to go on,
        which also returns the outputs that this call could not. Ctrl-C is held back until the step is done; a second
        one interrupts it. docs/failures.md has the rules."""
        self._interrupts.run(self._step)
        return self._outputs.take()

    @in_turn
    def _step(self) -> None:
        loaded = self._require_settled()
        if self._outputs.has_outputs:
            return  # an earlier step was done, and interrupted before its outputs were returned
        try:
            if not self._launched and not self._launch(loaded):
                self._books = _Books.SETTLED
                return
            if self.is_async:
                self._launch(loaded)
            self._process(loaded)
            self._drop_moot_steps(loaded)
            if self.config.check_invariants:
                invariants.check(loaded.manager, loaded.scheduler.num_computed())
            self._books = _Books.SETTLED
        except BaseException:
            self._recover(loaded)
            raise

    def _launch(self, loaded: LoadedEngine) -> bool:
        """Plan and launch a step; False if there is none to launch now."""
        self._books = _Books.HALF_DONE
        plan = loaded.scheduler.schedule()
        if plan is None:
            return False
        self._books = _Books.PLANNED
        self._launched.append(loaded.runner.launch(plan))
        return True

    def _process(self, loaded: LoadedEngine) -> None:
        """Wait for the oldest launched step and take in what it computed."""
        self._books = _Books.PLANNED
        result = self._launched[0].result()
        self._books = _Books.HALF_DONE
        self._launched.popleft()
        for request, stop_string, num_dropped in self._outputs.process(loaded.scheduler.update(result)):
            loaded.scheduler.finish(request, "stop", stop_string, num_dropped_tokens=num_dropped)

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
        self._books = _Books.SETTLED

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
        )

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
            loaded.let_go()  # the traceback of a failed step keeps `loaded` alive, but must not keep its memory

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, shows_progress: bool) -> LoadedEngine:
        try:
            return load_engine(self.config, shows_progress=shows_progress)
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
        return (self.config.seed * 0x9E3779B97F4A7C15 + self._num_arrived * 0xD1B54A32D192ED03 + 1) % 2**64
