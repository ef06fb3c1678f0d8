"""What the calls of an LLM are given, one request at a time, and how each is checked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from lamella.argument_checks import WholeRange, shown
from lamella.engine.engine import Engine
from lamella.engine.loaded_adapters import LoadedAdapter
from lamella.engine.lora_request import LoRARequest
from lamella.engine.prompts import ParsedPrompt
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import EngineClosedError, ForkedProcessError, InvariantError, LamellaError, RequestError

ON_ERROR = ("raise", "return")
MOST_PROMPTS_AHEAD = 2**31 - 1
# What is no fault of one request, whatever `on_error` says.
_OF_ALL = (EngineClosedError, ForkedProcessError, InvariantError)


class GivenRequest(NamedTuple):
    """A prompt and what belongs to it, unchecked. error: why nothing of it can be run, found before."""

    prompt: Any
    params: Any
    lora_request: Any = None
    error: LamellaError | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    parsed: ParsedPrompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    prompt: Any  # as it was given
    error: LamellaError


def returns_errors(on_error: Any) -> bool:
    """Whether bad requests become outputs. RequestError for what is no value of `on_error`."""
    if on_error not in ON_ERROR:
        raise RequestError(f'on_error={shown(on_error)} is not known; give "raise" or "return"')
    return bool(on_error == "return")


def check_lookahead(lookahead_prompts: Any) -> int:
    return WholeRange(1, MOST_PROMPTS_AHEAD).check("lookahead_prompts", lookahead_prompts, RequestError)


def is_iterated(prompts: Any) -> bool:
    """Whether prompts are to be taken one by one: an iterator, a generator, a data set; not a prompt or a list."""
    return (
        isinstance(prompts, Iterable)
        and not isinstance(prompts, (str, bytes, bytearray, Mapping, Sequence))
        and not hasattr(prompts, "__array__")
    )


def given_requests(
    prompts: Iterable[Any],
    sampling_params: SamplingParams | Iterable[SamplingParams] | None,
    lora_request: LoRARequest | Iterable[LoRARequest | None] | None,
    default_params: SamplingParams,
) -> Iterator[GivenRequest]:
    """The requests of prompts that are taken one by one. RequestError, now, for arguments that can be none."""
    if isinstance(prompts, Set):
        raise RequestError(f"prompts is a {type(prompts).__name__}, which has no order: give a list or an iterator")
    num_prompts = len(prompts) if isinstance(prompts, Sized) else None
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        all_params: Iterator[Any] = itertools.repeat(sampling_params or default_params)
    elif isinstance(sampling_params, Iterable) and not isinstance(sampling_params, (str, Mapping, Set)):
        all_params = _alongside("sampling_params", sampling_params, num_prompts)
    else:
        raise RequestError(
            f"sampling_params is {type(sampling_params).__name__}: must be a SamplingParams, a list of them or an "
            "iterator of them"
        )
    if lora_request is None or isinstance(lora_request, LoRARequest):
        adapters: Iterator[Any] = itertools.repeat(lora_request)
    elif isinstance(lora_request, Iterable) and not isinstance(lora_request, (str, Mapping, Set)):
        adapters = _alongside("lora_request", lora_request, num_prompts)
    else:
        raise RequestError(
            f"lora_request={shown(lora_request)} is a {type(lora_request).__name__}; give a LoRARequest(lora_name, "
            "lora_int_id, lora_path), or a list or an iterator of them"
        )
    # Prompts come last, so that no entry beside them is taken for a prompt that is not there.
    return _zipped(iter(prompts), all_params, adapters)


def _zipped(prompts: Iterator[Any], all_params: Iterator[Any], adapters: Iterator[Any]) -> Iterator[GivenRequest]:
    for prompt in prompts:
        yield GivenRequest(prompt, next(all_params), next(adapters))
    for beside in (all_params, adapters):
        if isinstance(beside, _Alongside):
            beside.end()


class _Alongside:
    """An iterator of what belongs to each prompt, which says so where it ends before them, and, where it is a list,
    where it does not end with them."""

    def __init__(self, name: str, entries: Iterable[Any]) -> None:
        self._name = name
        self._entries = iter(entries)
        self._num_entries = len(entries) if isinstance(entries, Sized) else None
        self._num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for entry in self._entries:
            self._num_taken += 1
            return entry
        raise RequestError(
            f"{self._name} ended after {self._num_taken} entries while there are more prompts: give one for all, or "
            "one for each prompt"
        )

    def end(self) -> None:
        if self._num_entries is not None and self._num_entries != self._num_taken:
            raise _wrong_number(self._name, self._num_entries, self._num_taken)


def _alongside(name: str, entries: Iterable[Any], num_prompts: int | None) -> _Alongside:
    if num_prompts is not None and isinstance(entries, Sized) and len(entries) != num_prompts:
        raise _wrong_number(name, len(entries), num_prompts)
    return _Alongside(name, entries)


def _wrong_number(name: str, num_entries: int, num_prompts: int) -> RequestError:
    return RequestError(
        f"{name} has {num_entries} entries for {num_prompts} prompts: give one for all, or one per prompt"
    )


def checked_requests(
    engine: Engine, given: Iterable[GivenRequest], *, returns_errors: bool, name: str = "prompts"
) -> Iterator[CheckedRequest | RefusedRequest]:
    """Each request, checked when it is taken. returns_errors: bad ones come as RefusedRequests; otherwise the error of
    the first is raised, with its index in the argument called `name`."""
    for index, request in enumerate(given):
        try:
            if request.error is not None:
                raise request.error
            parsed = engine.parse(request.prompt, request.params)
            adapter = _adapter(engine, request.lora_request)
        except LamellaError as error:
            yield refusal(request.prompt, error, index, returns_errors=returns_errors, name=name)
        else:
            yield CheckedRequest(with_adapter(parsed, adapter), request.params)


def checked_list(
    engine: Engine, given: Sequence[GivenRequest], *, returns_errors: bool, name: str = "prompts"
) -> list[CheckedRequest | RefusedRequest]:
    """`checked_requests` of what is all there: adapters are loaded last, and each once, however many stay loaded."""
    without = [request._replace(lora_request=None) for request in given]
    checked = list(checked_requests(engine, without, returns_errors=returns_errors, name=name))
    found: dict[LoRARequest, LoadedAdapter | LamellaError] = {}
    for index, request in enumerate(given):
        wanted, one = request.lora_request, checked[index]
        if wanted is None or isinstance(one, RefusedRequest):
            continue
        if wanted not in found:
            try:
                found[wanted] = engine.load_adapter(wanted)
            except LamellaError as error:
                if not returns_errors or isinstance(error, _OF_ALL):
                    raise
                found[wanted] = error
        adapter = found[wanted]
        if isinstance(adapter, LamellaError):
            checked[index] = RefusedRequest(request.prompt, adapter)
        else:
            checked[index] = CheckedRequest(with_adapter(one.parsed, adapter), one.params)
    return checked


def with_adapter(parsed: ParsedPrompt, adapter: LoadedAdapter | None) -> ParsedPrompt:
    return parsed if adapter is None else dataclasses.replace(parsed, adapter=adapter)


def refusal(
    prompt: Any, error: LamellaError, index: int, *, returns_errors: bool, name: str = "prompts"
) -> RefusedRequest:
    """The refused request, or its error raised. Errors that are not of one request are always raised."""
    if returns_errors and not isinstance(error, _OF_ALL):
        return RefusedRequest(prompt, error)
    if isinstance(error, RequestError):
        raise type(error)(f"{name}[{index}]: {error}") from error
    raise error


def _adapter(engine: Engine, lora_request: Any) -> LoadedAdapter | None:
    if lora_request is None:
        return None
    if not isinstance(lora_request, LoRARequest):
        raise RequestError(
            f"lora_request={shown(lora_request)} is a {type(lora_request).__name__}; give a LoRARequest(lora_name, "
            "lora_int_id, lora_path), or None"
        )
    return engine.load_adapter(lora_request)
