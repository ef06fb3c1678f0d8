"""Several whole engines that share an LLM's requests, with those methods of an `Engine` that an LLM calls."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from lamella.distributed.prefix_routing import PrefixRouter, deal_subtrees
from lamella.distributed.replica import QueuedRequest
from lamella.distributed.replica_set import Replicas, ReplicaSet
from lamella.engine.config import EngineConfig
from lamella.engine.lora_request import LoRARequest
from lamella.engine.model_setup import load_frontend
from lamella.engine.outputs import CompletionOutput, RequestOutput
from lamella.engine.prompts import ParsedPrompt
from lamella.engine.request_parser import RequestParser, drawn_seed
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.scheduling.request_rows import RunningTokens
from lamella.engine.turns import Turns, in_turn
from lamella.errors import ConfigError, EngineClosedError, RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

_WAIT_SECONDS = 1.0  # so often Ctrl-C is looked for
_KEY_BLOCKS = 4  # prompts that begin with the same so many pages go to the same replica
_MOST_AHEAD = 4  # a replica is given so many times the requests that it runs at once
_EXPECTED_TOKENS = 256  # of an output that may be as long as it likes


@dataclasses.dataclass(slots=True)
class _Request:
    """request_id: the caller's; the replicas know it by `queued.request_id`, which no other request ever has."""

    request_id: str
    queued: QueuedRequest
    prompt: ParsedPrompt
    key: int
    work: float
    replica: int | None = None  # that runs it, or has it in its queue


class ReplicatedEngine:
    """Every request is run until its output is there, once: of a replica that is lost, the requests that it has not
    answered run again elsewhere, with the same seeds. Outputs are those of one engine.

    Raises ConfigError for what several engines cannot do.
    """

    def __init__(self, config: EngineConfig, start: Callable[[EngineConfig], Replicas] | None = None) -> None:
        """start: starts the replicas; None: on Ray."""
        started = time.monotonic()
        _check(config)
        self.config = config
        front = load_frontend(config)
        self._tokenizer, self.model_config, self._default_params = front
        num_replicas = config.data_parallel_size
        self._replicas: Replicas | None = (start or _on_ray)(config)
        self.max_model_len = self._replicas.max_model_len
        self._parser = RequestParser(config, front.tokenizer, front.model_config, self.max_model_len)
        self._router = PrefixRouter(num_replicas, key_tokens=_KEY_BLOCKS * config.page_size)
        # Those that are not finished, in the order of their arrival, by the replicas' names for them; and these names.
        self._requests: dict[str, _Request] = {}
        self._names: dict[str, str] = {}
        self._new: list[str] = []  # that are nobody's yet
        self._queues: list[deque[str]] = [deque() for _ in range(num_replicas)]
        self._given: list[set[str]] = [set() for _ in range(num_replicas)]
        self._aborted: list[list[str]] = [[] for _ in range(num_replicas)]
        self._outputs: list[RequestOutput] = []
        self._num_arrived = 0
        self._turns = Turns()
        self.load_seconds = time.monotonic() - started

    # Requests, as Engine has them

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, *, lora_request: Any = None
    ) -> None:
        params = self.get_default_sampling_params() if params is None else params
        self.add_parsed(request_id, self.parse(prompt, params, lora_request), params)

    def parse(self, prompt: Any, params: SamplingParams, lora_request: LoRARequest | None = None) -> ParsedPrompt:
        self._open_replicas()
        if lora_request is not None:
            self.load_adapter(lora_request)
        return self._parser.parse(prompt, params)

    @in_turn
    def add_parsed(self, request_id: str, prompt: ParsedPrompt, params: SamplingParams) -> None:
        self._open_replicas()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if request_id in self._names:
            raise RequestError(f"request_id={request_id!r} is in use: wait for it to finish or choose another")
        if params.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise RequestError(
                f"output_kind={params.output_kind}: with data_parallel_size a request may run again elsewhere, so that "
                "only its last output is given; use RequestOutputKind.FINAL_ONLY"
            )
        if params.seed is None:
            params = dataclasses.replace(params, seed=drawn_seed(self.config.seed, self._num_arrived))
        given: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
        if prompt.text is not None:
            given["prompt"] = prompt.text
        if prompt.cache_salt is not None:
            given["cache_salt"] = prompt.cache_salt
        if prompt.prefix_boundaries:
            given["prefix_boundary"] = list(prompt.prefix_boundaries)
        most_tokens = self.max_model_len - len(prompt.token_ids)
        expected = min(most_tokens, _EXPECTED_TOKENS if params.max_tokens is None else params.max_tokens) * params.n
        name = str(self._num_arrived)
        self._names[request_id] = name
        self._requests[name] = _Request(
            request_id,
            QueuedRequest(name, given, params),
            prompt,
            self._router.key(prompt.token_ids, prompt.salt),
            float(expected),
        )
        self._new.append(name)
        self._num_arrived += 1

    def abort(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        given = dict.fromkeys([request_id] if isinstance(request_id, str) else request_id)
        self._abort(given)
        taken = [output for output in self._outputs if output.request_id in given]
        self._outputs = [output for output in self._outputs if output.request_id not in given]
        return taken

    @in_turn
    def _abort(self, given: Iterable[str]) -> None:
        self._open_replicas()
        for request_id in given:
            name = self._names.pop(request_id, None)
            if name is None:
                continue
            request = self._requests.pop(name)
            replica = request.replica
            if replica is None:
                self._new.remove(name)
            elif name in self._given[replica]:
                self._given[replica].remove(name)
                self._aborted[replica].append(name)
            else:
                self._queues[replica].remove(name)
            self._outputs.append(_aborted_output(request))

    def has_unfinished_requests(self) -> bool:
        return self._replicas is not None and bool(self._requests or self._outputs)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[RequestOutput]:
        """Outputs of requests that have finished, after waiting for some for a while. Raises ReplicaLostError, after
        which the engine is closed."""
        self._step()
        outputs, self._outputs = self._outputs, []
        return outputs

    @in_turn
    def _step(self) -> None:
        replicas = self._open_replicas()
        self._deal(replicas)
        self._give(replicas)
        try:
            answers = replicas.wait(_WAIT_SECONDS)
        except BaseException:
            if replicas.is_closed:
                self._close()
            raise
        for index, outputs in answers:
            if outputs is None:
                self._take_back(index)
                continue
            for output in outputs:
                self._given[index].discard(output.request_id)
                request = self._requests.pop(output.request_id, None)
                if request is not None:  # else it was aborted meanwhile
                    del self._names[request.request_id]
                    self._outputs.append(dataclasses.replace(output, request_id=request.request_id))

    # Who runs what

    def _deal(self, replicas: Replicas) -> None:
        """Requests that are nobody's go into the replicas' queues: many by the tree of their prompts, a few by what
        prompts like them did."""
        if not self._new:
            return
        loads = [self._load(replicas, index) for index in range(len(self._queues))]
        if all(load == float("inf") for load in loads):
            return
        new, self._new = [self._requests[request_id] for request_id in self._new], []
        if len(new) > 2 * len(self._queues):
            dealt, _ = deal_subtrees(
                [request.prompt.token_ids for request in new], [request.work for request in new], loads
            )
            for index, places in enumerate(dealt):
                for place in places:
                    self._enqueue(new[place], index)
                    self._router.remember(new[place].key, index)
            return
        for request in new:
            work = request.work + len(request.prompt.token_ids)
            index = self._router.choose(request.key, loads, work)
            loads[index] += work
            self._enqueue(request, index)

    def _load(self, replicas: Replicas, index: int) -> float:
        if replicas.is_lost(index):
            return float("inf")
        waiting = [*self._queues[index], *self._given[index]]
        return sum(self._requests[one].work + len(self._requests[one].prompt.token_ids) for one in waiting)

    def _enqueue(self, request: _Request, index: int) -> None:
        request.replica = index
        self._queues[index].append(request.queued.request_id)

    def _give(self, replicas: Replicas) -> None:
        """Every replica that waits gets the next of its queue; one with nothing left, half of the longest."""
        most = _MOST_AHEAD * self.config.max_num_seqs
        for index, queue in enumerate(self._queues):
            if not replicas.is_ready(index):
                continue
            if not queue and not self._given[index]:
                self._steal(index)
            added = [queue.popleft() for _ in range(min(len(queue), most - len(self._given[index])))]
            if not added and not self._given[index] and not self._aborted[index]:
                continue
            aborted, self._aborted[index] = self._aborted[index], []
            self._given[index].update(added)
            replicas.run(index, [self._requests[request_id].queued for request_id in added], aborted)

    def _steal(self, index: int) -> None:
        longest = max(range(len(self._queues)), key=lambda each: len(self._queues[each]))
        for _ in range((len(self._queues[longest]) + 1) // 2):
            request = self._requests[self._queues[longest].pop()]
            request.replica = index
            self._queues[index].appendleft(request.queued.request_id)

    def _take_back(self, index: int) -> None:
        """What a lost replica has not answered, and what waited for it, is nobody's again."""
        self._router.forget(index)
        lost = [*self._given[index], *self._queues[index]]
        self._given[index].clear()
        self._queues[index].clear()
        self._aborted[index].clear()
        for request_id in lost:
            self._requests[request_id].replica = None
        self._new = [request_id for request_id, request in self._requests.items() if request.replica is None]

    # State and closing, as Engine has them

    @property
    def is_closed(self) -> bool:
        return self._replicas is None

    @property
    def is_called_here(self) -> bool:
        return self._turns.is_mine

    def get_default_sampling_params(self) -> SamplingParams:
        return self._default_params

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def running_tokens(self) -> RunningTokens:
        """None: how far requests are is known where they run, and progress moves with those that finish."""
        return RunningTokens(0, 0)

    @in_turn
    def counters(self) -> list[dict[str, int]]:
        """Each replica's own totals, such as num_prompt_tokens and num_cached_tokens; while no request runs."""
        replicas = self._idle_replicas("counters")
        return list(replicas.each(lambda actor: actor.counters.remote(), 60.0))

    def get_metrics(self) -> NoReturn:
        raise RequestError("get_metrics with data_parallel_size above 1: each engine counts for itself; see counters()")

    @property
    def num_restarts(self) -> int:
        """How often a replica was lost and started again."""
        return self._open_replicas().num_restarts

    @in_turn
    def reset_prefix_cache(self, **vllm_arguments: Any) -> bool:
        replicas = self._idle_replicas("reset_prefix_cache")
        return all(replicas.each(lambda actor: actor.reset_prefix_cache.remote(), 60.0))

    def load_adapter(self, lora_request: Any) -> NoReturn:
        raise RequestError("lora_request with data_parallel_size above 1: adapters are not loaded into several engines")

    def pin_prefix(self, prompt: Any, **keywords: Any) -> NoReturn:
        raise RequestError("pin_prefix with data_parallel_size above 1: each engine has a cache of its own; use 1")

    def unpin_prefix(self, prefix: Any) -> NoReturn:
        raise RequestError("no prefix is pinned: with data_parallel_size above 1 none can be")

    def pinned_prefixes(self) -> list[Any]:
        return []

    def save_prefix(self, path: str | Path, prompt: Any, **keywords: Any) -> NoReturn:
        raise RequestError("save_prefix with data_parallel_size above 1: each engine has a cache of its own; use 1")

    def load_prefix(self, path: str | Path) -> NoReturn:
        raise RequestError("load_prefix with data_parallel_size above 1: each engine has a cache of its own; use 1")

    def parse_prefix(self, prompt: Any, cache_salt: str | None = None) -> NoReturn:
        raise RequestError("prefixes with data_parallel_size above 1: each engine has a cache of its own; use 1")

    def close(self) -> None:
        """End all engines. Unfinished requests are dropped; closing twice is fine."""
        self._turns.run(self._close)

    def _close(self) -> None:
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.close()
        self._requests.clear()
        self._names.clear()
        self._outputs.clear()

    def __enter__(self) -> ReplicatedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_replicas(self) -> Replicas:
        if self._replicas is None:
            raise EngineClosedError("the engine is closed: make a new one")
        return self._replicas

    def _idle_replicas(self, name: str) -> Replicas:
        replicas = self._open_replicas()
        if self._requests or any(self._aborted):
            raise RequestError(f"{name} while requests run: engines answer between batches; wait for them")
        return replicas


def _on_ray(config: EngineConfig) -> Replicas:
    return ReplicaSet(
        config.data_parallel_size,
        _arguments_of_one(config),
        actor_options(config),
        answer_seconds=float(config.distributed_timeout_seconds),
    )


def _check(config: EngineConfig) -> None:
    given = f"data_parallel_size={config.data_parallel_size}"
    if config.distributed_executor_backend == "mp":
        raise ConfigError(f'{given}: several engines run on Ray; use distributed_executor_backend="ray"')
    if config.enable_lora:
        raise ConfigError(f"{given} with enable_lora=True: adapters are not loaded into several engines; use 1")


def _arguments_of_one(config: EngineConfig) -> dict[str, Any]:
    """What each engine is made of. Its workers, if it has some, are processes of its own."""
    arguments = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {**arguments, "data_parallel_size": 1, "distributed_executor_backend": None, "ray_actor_options": None}


def actor_options(config: EngineConfig) -> dict[str, Any]:
    """What Ray is told of each engine: `ray_actor_options` for each of its workers."""
    options = {"num_cpus": 1, **(config.ray_actor_options or {})}
    size = config.tensor_parallel_size
    resources = options.get("resources")
    multiplied = {name: options[name] * size for name in ("num_cpus", "num_gpus", "memory") if options.get(name)}
    if resources:
        multiplied["resources"] = {name: amount * size for name, amount in resources.items()}
    return {**options, **multiplied}


def _aborted_output(request: _Request) -> RequestOutput:
    completions = [
        CompletionOutput(index=index, text="", token_ids=[], finish_reason="abort")
        for index in range(request.queued.params.n)
    ]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt.text,
        prompt_token_ids=request.prompt.token_ids.tolist(),
        outputs=completions,
        finished=True,
    )
