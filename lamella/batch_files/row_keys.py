"""Which keys a row of a batch file may have, and what is done with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lamella.argument_checks import nearest_name, shown
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.vllm_keywords import ANY, Absent, absent
from lamella.engine.vllm_request_arguments import SAMPLING_ARGUMENTS
from lamella.errors import RequestError, UnsupportedArgumentError

CHAT_KEYS = (
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
PROMPT_KEYS = ("prompt", "prompt_token_ids")
CACHE_KEYS = ("cache_salt", "prefix_boundary")
# Of SamplingParams' fields, those that rows cannot have.
ABSENT_FIELDS = absent(
    "a batch file's rows hold outputs and nothing of their prompts: call LLM.generate for it",
    prompt_logprobs=(),
    prompt_logprob_start=(0,),
) | absent("JSON can hold no functions: call LLM.generate with them", logits_processors=()) | absent(
    "each answer is written once, when it is whole", output_kind=()
)  # fmt: skip
SAMPLING_KEYS = frozenset(
    {field.name for field in dataclasses.fields(SamplingParams)} - set(ABSENT_FIELDS) | set(SAMPLING_ARGUMENTS)
)
ABSENT_KEYS: dict[str, Absent] = {
    **ABSENT_FIELDS,
    **absent("answers are written when they are whole", stream=(False,), stream_options=()),
    **absent("the prompt is in the input", echo=(False,)),
    **absent("text is continued at its end alone", suffix=()),
    **absent("answers are text: read calls of tools from it", tool_choice=("auto", "none"), function_call=("none",)),
    **absent("give tools", functions=()),
    **absent("answers are text: read calls of tools from it", parallel_tool_calls=(True, False)),
    **absent("models read and write text", modalities=(["text"],), audio=()),
    **absent("how much a model reasons is up to its chat template: chat_template_kwargs", reasoning_effort=()),
    **absent("drafts come from texts that are there: speculative_config", prediction=()),
    **absent("how long answers are is up to max_tokens", verbosity=()),
    **absent("nothing is stored", store=(False,)),
    **absent("nobody is told", user=ANY, metadata=ANY, safety_identifier=ANY, prompt_cache_key=ANY),
    **absent("there is one service", service_tier=("auto", "default")),
}


def sampling_values(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among `given`; RequestError for keys that are neither these nor among `others`, and for
    what is not here. null asks for nothing, whatever the key."""
    values = {}
    for name, value in given.items():
        if value is None or name in others:
            continue
        if name in SAMPLING_KEYS:
            values[name] = value
        elif name not in ABSENT_KEYS:
            near = nearest_name(name, (*SAMPLING_KEYS, *others, *ABSENT_KEYS))
            raise RequestError(f"{name}={shown(value)}: there is no such key{near}; leave it out")
        else:
            refuse_absent(name, value)
    return values


def refuse_absent(name: str, value: Any) -> None:
    entry = ABSENT_KEYS.get(name)
    if entry is not None and not (entry.asks_for_nothing(value) or value in (entry.harmless or ())):
        raise UnsupportedArgumentError(f"{name}={shown(value)} is not here; {entry.instead}")
