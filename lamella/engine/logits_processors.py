"""A request's own functions of its logits: what may be given, and how they are called.

One takes (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits): sequences of ints that it can only
read, and may keep, and float32 [vocab], which it may write to. It returns the logits to sample from. A class, or
functools.partial of one, stands for objects with state: each sample gets one of its own, which lives as long as the
sample.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from lamella.argument_checks import shown
from lamella.errors import RequestError
from lamella.model_executor.step_plan import LogitsFunction

LogitsProcessor = Callable[..., torch.Tensor]
_FORMS = "(output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits)"


def checked_processors(given: Any) -> tuple[LogitsProcessor, ...]:
    """The processors as a tuple; None: none. Raises RequestError for one that cannot be called with either form."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise RequestError(
            f"logits_processors={shown(given)} is a {type(given).__name__}; give a list of functions of {_FORMS}"
        )
    processors = tuple(given)
    for index, processor in enumerate(processors):
        name = f"logits_processors[{index}]={shown(processor)}"
        if not callable(processor):
            raise RequestError(f"{name} is a {type(processor).__name__}; give a function of {_FORMS}")
        made = _made_class(processor)
        if made is not None:
            if not any("__call__" in vars(base) for base in made.__mro__):
                raise RequestError(f"{name} makes objects that cannot be called; give it a __call__ of {_FORMS}")
            if _num_required(processor) not in (0, None):
                raise RequestError(
                    f"{name} cannot be made without arguments; give functools.partial(the class, its arguments)"
                )
        if _takes_prompt(processor) is None:
            raise RequestError(f"{name} takes other arguments; it must take {_FORMS}")
    return processors


def has_state(processors: Iterable[LogitsProcessor]) -> bool:
    """Whether one of them is made anew for each sample."""
    return any(_made_class(processor) is not None for processor in processors)


def logits_functions(processors: Iterable[LogitsProcessor]) -> tuple[LogitsFunction, ...]:
    """Functions for one sample: called once for each, so that objects with state are the sample's own. One that cannot
    be made raises the same when it is first called, which ends that request."""
    return tuple(_function(processor) for processor in processors)


def _function(processor: LogitsProcessor) -> LogitsFunction:
    function, takes_prompt = processor, bool(_takes_prompt(processor))
    if _made_class(processor) is not None:
        try:
            function = cast(LogitsProcessor, processor())
        except Exception as error:
            return functools.partial(_raise, error)
    if takes_prompt:
        return function
    return functools.partial(_without_prompt, function)


def _raise(error: Exception, *_: Any) -> torch.Tensor:
    raise error


def _without_prompt(
    processor: LogitsProcessor, prompt_ids: Sequence[int], output_ids: Sequence[int], logits: torch.Tensor
) -> torch.Tensor:
    return processor(output_ids, logits)


def _made_class(processor: LogitsProcessor) -> type | None:
    made = processor.func if isinstance(processor, functools.partial) else processor
    return made if isinstance(made, type) else None


def _takes_prompt(processor: LogitsProcessor) -> bool | None:
    """None: it takes neither form."""
    made = _made_class(processor)
    if made is None:
        num_required, most = _num_required(processor), _num_positional(processor)
    else:
        # The object itself is not an argument that the caller gives.
        call = functools.partial(made.__call__, None)
        num_required, most = _num_required(call), _num_positional(call)
    if num_required is None:  # what is written in C may not say
        return False
    if num_required == 3 or (num_required < 2 and most >= 3):
        return True
    return False if num_required <= 2 <= most else None


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _num_required(function: Callable[..., Any]) -> int | None:
    """How many arguments it cannot do without; None: nobody knows."""
    parameters = _parameters(function)
    if parameters is None:
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(one.kind not in optional and one.default is inspect.Parameter.empty for one in parameters)


def _num_positional(function: Callable[..., Any]) -> int:
    """The most that can be given by position."""
    parameters = _parameters(function) or []
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return 99
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional for one in parameters)
