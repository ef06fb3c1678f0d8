"""vLLM's names, as its released packages have them (tests/fixtures/vllm_surface.json), against lamella's."""

from __future__ import annotations

import dataclasses
import re

import pytest

import lamella
from lamella import CompletionOutput, ConfigError, EngineConfig, Logprob, RequestError, RequestOutput, SamplingParams
from lamella.engine.vllm_engine_arguments import ENGINE_ARGUMENTS
from lamella.engine.vllm_keywords import Absent, refuse_foreign
from lamella.engine.vllm_request_arguments import (
    ABORT_REQUEST_ARGUMENTS,
    ADD_REQUEST_ARGUMENTS,
    CHAT_ARGUMENTS,
    FROM_ENGINE_ARGS_ARGUMENTS,
    GENERATE_ARGUMENTS,
    RESET_PREFIX_CACHE_ARGUMENTS,
)
from tests.helpers.porting_page import BEGIN, END, PAGE, SECTIONS, SURFACE, names, parameters, render

CALLS = {
    "LLM.generate": (lamella.LLM.generate, GENERATE_ARGUMENTS),
    "LLM.chat": (lamella.LLM.chat, CHAT_ARGUMENTS),
    "LLM.reset_prefix_cache": (lamella.LLM.reset_prefix_cache, RESET_PREFIX_CACHE_ARGUMENTS),
    "LLMEngine.add_request": (lamella.Engine.add_request, ADD_REQUEST_ARGUMENTS),
    "LLMEngine.from_engine_args": (lamella.Engine.from_engine_args, FROM_ENGINE_ARGS_ARGUMENTS),
    "LLMEngine.abort_request": (lamella.Engine.abort_request, ABORT_REQUEST_ARGUMENTS),
}


def defaults(title):
    """(argument, default) of every release, each pair once."""
    pairs = [pair for release in SURFACE.values() for pair in release["defaults"][title].items()]
    return [pair for index, pair in enumerate(pairs) if pair not in pairs[:index]]


@pytest.mark.parametrize(("name", "value"), [*defaults("EngineArgs"), *defaults("LLM arguments")])
def test_engine_arguments_are_taken_at_vllms_defaults(name, value):
    if name == "model":
        assert EngineConfig(value).model == value
    else:
        config = EngineConfig("m", **{name: value})
        assert config.model == "m"
        if name in ("max_loras", "max_lora_rank"):  # bounds that lamella has not unless they are given
            assert config == dataclasses.replace(EngineConfig("m"), **{name: value})
        elif name not in ("prefix_cache_retention_interval", "gpu_memory_utilization"):
            assert config == EngineConfig("m"), "a default of vLLM's that means the same leaves lamella's"


@pytest.mark.parametrize(("name", "value"), defaults("SamplingParams"))
def test_sampling_parameters_are_taken_at_vllms_defaults(name, value):
    assert SamplingParams(**{name: value}) == SamplingParams()


@pytest.mark.parametrize("title", CALLS)
def test_calls_take_vllms_defaults(title):
    function, foreign = CALLS[title]
    own = parameters(function)
    for name, value in defaults(title):
        refuse_foreign(title, {name: value}, known=own, foreign=foreign)  # raises what is not taken


@pytest.mark.parametrize(
    ("release", "title"), [(release, title) for release in SURFACE for title in SURFACE[release]["names"]]
)
def test_every_name_is_known_or_answered(release, title):
    """Whatever vLLM has: lamella has it, takes it, or says what to use instead; it never calls it a typing error."""
    if title == "LLM arguments":
        title = "EngineArgs"
    section = next(section for section in SECTIONS if section.title == title)
    unanswered = [name for name in names(title) if name not in set(section.own) and name not in section.absent]
    assert unanswered == []


@pytest.mark.parametrize("name", [n for n in names("EngineArgs") if n not in EngineConfig.__dataclass_fields__])
def test_an_argument_that_asks_for_something_is_never_a_typing_error(name):
    entry = ENGINE_ARGUMENTS[name]
    if isinstance(entry, Absent) and entry.harmless is None:
        assert EngineConfig("m", **{name: "something that vLLM takes"}) == EngineConfig("m")
        return
    with pytest.raises(ConfigError) as refusal:
        EngineConfig("m", **{name: "something that vLLM takes"})
    assert str(refusal.value).startswith((f"{name}=", "page_size=", "disable_hybrid_kv_cache=", "retention_grid"))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"pipeline_parallel_size": 2}, "tensor_parallel_size and data_parallel_size"),
        ({"pipeline_parallel_size": True}, "tensor_parallel_size and data_parallel_size"),
        ({"trust_remote_code": True}, "local paths"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens"),
        ({"speculative_model": "small"}, "no draft models"),
        ({"num_gpu_blocks_override": 100}, "kv_cache_memory_bytes"),
        ({"lora_target_modules": ["q_proj"]}, "as PEFT saves them"),
        ({"swap_space": 16}, "computed again"),
        ({"generation_config": "vllm"}, "give SamplingParams"),
        ({"logits_processors": ["module.Class"]}, "SamplingParams.logits_processors"),
        ({"hf_overrides": {"sliding_window": 8}}, "copy of the folder"),
    ],
)
def test_what_is_not_here_says_what_is(arguments, hint):
    (name,) = arguments
    with pytest.raises(ConfigError, match=hint) as refusal:
        EngineConfig("m", **arguments)
    assert str(refusal.value).startswith(f"{name}=")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"thinking_token_budget": 5}, "bounded by allowed_token_ids, bad_words"),
        ({"prompt_logprob_token_ids": [1]}, "report the most likely tokens, or with -1 all"),
        ({"repetition_detection": object()}, "no_repeat_ngram_size and logits_processors"),
        ({"best_of": 3}, "n says"),
        ({"skip_reading_prefix_cache": True}, "cache_salt"),
    ],
)
def test_sampling_that_is_not_here_says_what_is(arguments, hint):
    (name,) = arguments
    for error in (RequestError, ConfigError):
        with pytest.raises(error, match=hint) as refusal:
            SamplingParams(**arguments)
        assert str(refusal.value).startswith(f"{name}=")


def test_renamed_arguments_mean_lamellas():
    assert EngineConfig("m", block_size=32) == EngineConfig("m", page_size=32)
    assert EngineConfig("m", block_size=None) == EngineConfig("m")
    assert EngineConfig("m", block_size=32, page_size=32).page_size == 32
    with pytest.raises(ConfigError, match=r"block_size=32 is page_size=32 here.*contradicts page_size=16"):
        EngineConfig("m", block_size=32, page_size=16)
    with pytest.raises(ConfigError, match="page_size=0 is out of range"):
        EngineConfig("m", block_size=0)
    assert EngineConfig("m", disable_hybrid_kv_cache_manager=True).disable_hybrid_kv_cache
    dense = EngineConfig("m", prefix_cache_retention_interval=None)
    sparse, grid = (EngineConfig("m", prefix_cache_retention_interval=interval) for interval in (0, 64))
    assert [(config.retention, config.retention_grid_tokens) for config in (dense, sparse, grid)] == [
        ("all", None),
        ("tails", None),
        ("tails", 64),
    ]


@pytest.mark.parametrize("name", ["seed", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"])
def test_none_is_the_default_where_vllm_has_it_so(name):
    assert EngineConfig("m", **{name: None}) == EngineConfig("m")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("stop_tokens_ids", "stop_token_ids"),
     ("topk", "top_k")],
)  # fmt: skip
def test_a_typing_error_names_the_nearest_sampling_parameter(given, nearest):
    with pytest.raises(TypeError, match=f"'{given}'; did you mean '{nearest}'"):
        SamplingParams(**{given: 1})


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("max_num_seq", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization"), ("pagesize", "page_size"),
     ("tensor_parallel", "tensor_parallel_size")],
)  # fmt: skip
def test_a_typing_error_names_the_nearest_engine_argument(given, nearest):
    with pytest.raises(TypeError, match=f"'{given}'; did you mean '{nearest}'"):
        lamella.LLM("no/such/model", **{given: 1})
    with pytest.raises(TypeError, match=f"'{given}'; did you mean '{nearest}'"):
        lamella.Engine(model="no/such/model", **{given: 1})


def test_nothing_is_suggested_where_nothing_is_near():
    with pytest.raises(TypeError, match=r"'zzz'$"):
        SamplingParams(zzz=1)


@pytest.mark.parametrize("release", SURFACE)
@pytest.mark.parametrize(("title", "made"), [
    ("CompletionOutput", CompletionOutput(0, "", [])),
    ("RequestOutput", RequestOutput("0", None, [], outputs=[], finished=True)),
    ("Logprob", Logprob(-1.0)),
])  # fmt: skip
def test_outputs_have_vllms_fields(release, title, made):
    for name in SURFACE[release]["names"][title]:
        assert hasattr(made, name), name
        if name not in made.__dataclass_fields__:
            assert getattr(made, name) is None, name


def test_vllms_modules_have_vllms_names():
    from lamella.inputs import PromptType, TextPrompt, TokensPrompt
    from lamella.outputs import RequestOutput as RequestOutputOfModule
    from lamella.sampling_params import RequestOutputKind
    from lamella.sampling_params import SamplingParams as SamplingParamsOfModule

    assert SamplingParamsOfModule is SamplingParams
    assert RequestOutputOfModule is RequestOutput
    assert RequestOutputKind is lamella.RequestOutputKind
    assert TokensPrompt(prompt_token_ids=[1, 2]) == {"prompt_token_ids": [1, 2]}
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    assert PromptType is lamella.PromptType
    assert (lamella.TokensPrompt, lamella.TextPrompt) == (TokensPrompt, TextPrompt)


def test_the_porting_page_is_what_the_code_does():
    tables = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert tables.strip() == render().strip(), "run: python -m tests.helpers.porting_page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_the_porting_page_has_every_name(section):
    heading = re.escape(section.title)
    (table,) = re.findall(
        rf"^### {heading}(?:,[^\n]*)?\n(.*?)(?=^###|\Z)", PAGE.read_text(encoding="utf-8"), re.S | re.M
    )
    listed = set(re.findall(r"`(\w+)(?:=[^`]*)?`", "\n".join(row.split(" | ")[0] for row in table.splitlines())))
    assert set(names(section.title)) <= listed
