"""generation_config.json: the tokens that end a text, and how the model's makers would sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_ranges import TOKEN_ID
from lamella.model_executor.models.typed_fields import TypedFields, is_integer
from lamella.model_executor.models.typed_json import read_json_object

GENERATION_CONFIG = "generation_config.json"
_MAX_COUNT = 2**31 - 1
_HIGHEST_TEMPERATURE = 2.0  # the limit of SamplingParams, as are the other ranges
_USUAL_MAX_TOKENS = 16  # the default of SamplingParams

# What generate() of transformers takes beyond what is read here. A value in the tuple, or null, asks for nothing.
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "max_length": (),  # it limits prompt and output together, so it is no max_tokens
    "min_length": (0,),
    "max_time": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "num_return_sequences": (1,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """eos_token_ids: None where the file does not name any. sampling: by the names of SamplingParams' fields.
    not_honoured: what the file asks for beyond that, and the engine does not do, by the file's own names."""

    eos_token_ids: tuple[int, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    not_honoured: Mapping[str, Any] = field(default_factory=dict)


def read_generation_config(path: Path) -> GenerationConfig:
    """What the file at `path` says.

    A model that is to be decoded greedily (do_sample false) gives temperature 0 and none of what shapes sampling.
    Raises ModelLoadError for a field out of its range.
    """
    return parse_generation_config(read_json_object(path))


def parse_generation_config(fields: TypedFields) -> GenerationConfig:
    """As `read_generation_config`, from the file's fields."""
    sampling = {
        "temperature": fields.optional_number("temperature", low=0.0, high=_HIGHEST_TEMPERATURE),
        "top_k": fields.optional_integer("top_k", high=_MAX_COUNT),
        "top_p": fields.optional_number("top_p", above=0.0, high=1.0),
        "min_p": fields.optional_number("min_p", low=0.0, high=1.0),
    }
    if fields.optional_boolean("do_sample") is False:
        sampling = {"temperature": 0.0}
    wanted: dict[str, Any] = {
        **sampling,
        "repetition_penalty": fields.optional_number("repetition_penalty", above=0.0, high=1e6),
        "max_tokens": fields.optional_integer("max_new_tokens", low=1, high=_MAX_COUNT),
        "min_tokens": fields.optional_integer("min_new_tokens", high=_MAX_COUNT),
        "stop": _stop_strings(fields),
        "no_repeat_ngram_size": fields.optional_integer("no_repeat_ngram_size", high=_MAX_COUNT) or None,
        "bad_words_ids": _bad_words_ids(fields),
        "suppress_tokens": fields.token_ids("suppress_tokens", high=TOKEN_ID.high) or None,
        "begin_suppress_tokens": fields.token_ids("begin_suppress_tokens", high=TOKEN_ID.high) or None,
    }
    least, most = wanted["min_tokens"], wanted["max_tokens"]
    if least is not None and most is not None and least > most:
        raise ModelLoadError(
            f"{fields.place}: min_new_tokens={least} is more than max_new_tokens={most}; lower it, or leave one out"
        )
    if least is not None and most is None and least > _USUAL_MAX_TOKENS:
        wanted["max_tokens"] = least  # the default of SamplingParams would be less than min_tokens
    has_ends = fields.has_value("eos_token_id")
    return GenerationConfig(
        fields.token_ids("eos_token_id", high=TOKEN_ID.high) if has_ends else None,
        {name: value for name, value in wanted.items() if value is not None},
        {
            key: fields.raw(key)
            for key, neutral in _NOT_HONOURED.items()
            if fields.has_value(key) and fields.raw(key) not in neutral
        },
    )


def _bad_words_ids(fields: TypedFields) -> tuple[tuple[int, ...], ...] | None:
    if not fields.has_value("bad_words_ids"):
        return None
    given = fields.raw("bad_words_ids")
    if not isinstance(given, list) or not all(isinstance(one, list) and one for one in given):
        raise fields.error("bad_words_ids", "a list of lists of token ids, none of them empty")
    if not all(is_integer(token_id) and 0 <= token_id <= TOKEN_ID.high for one in given for token_id in one):
        raise fields.error("bad_words_ids", f"lists of token ids from 0 to {TOKEN_ID.high}")
    return tuple(map(tuple, given)) or None


def _stop_strings(fields: TypedFields) -> tuple[str, ...] | None:
    if not fields.has_value("stop_strings"):
        return None
    is_one = isinstance(fields.raw("stop_strings"), str)
    strings = (fields.string("stop_strings"),) if is_one else fields.strings("stop_strings")
    if "" in strings:
        raise fields.error("stop_strings", "strings that are not empty")
    return strings or None
