"""docs/porting.md: vLLM's names from the fixture, what becomes of each from lamella's own code and tables.

`python -m tests.helpers.porting_page` writes the tables anew; a test compares them with the page.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lamella
from lamella.argument_checks import FRACTION, RealRange
from lamella.engine import config, sampling_params, sampling_values
from lamella.engine.vllm_engine_arguments import ENGINE_ARGUMENTS
from lamella.engine.vllm_keywords import Absent, Renamed
from lamella.engine.vllm_request_arguments import (
    ABORT_REQUEST_ARGUMENTS,
    ADD_REQUEST_ARGUMENTS,
    CHAT_ARGUMENTS,
    FROM_ENGINE_ARGS_ARGUMENTS,
    GENERATE_ARGUMENTS,
    PROMPT_KEYS,
    RESET_PREFIX_CACHE_ARGUMENTS,
    SAMPLING_ARGUMENTS,
)
from lamella.kv_cache.split import LEAST_RATIO, MOST_RATIO

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "porting.md"
SURFACE = json.loads((ROOT / "tests" / "fixtures" / "vllm_surface.json").read_text(encoding="utf-8"))["releases"]
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

NO_POOLING = "lamella generates only: there is no pooling, embedding, ranking or classification"
NO_WORKERS = "workers take plans of steps and nothing else: call the LLM or its engine"
NO_ASYNC_CALLS = "call `generate` with all prompts, or use an `AsyncEngine`"


class Section(NamedTuple):
    """title: as in the fixture. own: lamella's names. differs: name -> how, where it is not the same.
    absent: name -> what lamella says of it."""

    title: str
    own: Iterable[str]
    differs: Mapping[str, str]
    absent: Mapping[str, Any]


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "vllm_arguments")]


def fields(value: type) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


ENGINE_DIFFERENCES = {
    "model": "a local folder, a .gguf file or a demo model's name, and no hub's; always to be given",
    "tokenizer": "a local folder or file",
    "load_format": '"auto", "safetensors", "gguf", "dummy"',
    "model_impl": '"auto", "native" (which "vllm" means), "transformers"; no "terratorch"',
    "dtype": '"auto" is float32 on a CPU',
    "kv_cache_dtype": '"auto", "fp8", "fp8_e4m3", "fp8_e5m2"',
    "seed": "None is 0",
    "max_model_len": '"auto" is -1: the longest that the KV memory holds',
    "quantization": '"int8", "w8a8", "gguf", or None; a checkpoint\'s own quantization is not read',
    "max_num_seqs": "256 by default",
    "max_num_batched_tokens": "2048 by default",
    "gpu_memory_utilization": "0.9 by default, and CUDA's alone: on a CPU kv_cache_memory_fraction",
    "scheduling_policy": '"fcfs", or "prefix", the longest cached prefix first, which is LLM\'s default; no "priority"',
    "attention_backend": '"auto", "native", "torch", "triton", "xformers", "reference"',
    "enable_prefix_caching": "hits are exact to the token, not to the block",
    "async_scheduling": "None: on CUDA only, and not with speculation",
    "speculative_config": 'methods "suffix" and "ngram" alone; suffix_decoding_max_cached_requests is 0 by default',
    "enforce_eager": "nothing is compiled at run time in any case",
    "device": '"auto", "cpu", "cuda", "cuda:1"',
    "enable_lora": "on native families",
    "max_loras": "None by default: nothing is reserved for it",
    "max_lora_rank": "None by default: any rank, nothing is reserved for it",
    "max_cpu_loras": "adapters in use and pinned ones stay loaded beyond it; None: max_loras, or 16",
}

SECTIONS = [
    Section("exports", lamella.__all__, {"PromptType": "text or token ids", "EngineArgs": "is `EngineConfig`",
        "LLMEngine": "is `Engine`", "AsyncEngineArgs": "is `EngineConfig`",
        "AsyncLLMEngine": "is `AsyncEngine` ([embedding.md](embedding.md))"}, {
        **dict.fromkeys(["ModelRegistry"], "models are those that lamella knows"),
        **dict.fromkeys(["__version_tuple__"], "`__version__` is a string"),
        "initialize_ray_cluster": "Ray is found or started where distributed_executor_backend names it",
        **dict.fromkeys(["PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
            "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput",
            "PoolingParams"], NO_POOLING),
    }),
    Section("EngineArgs", fields(lamella.EngineConfig), ENGINE_DIFFERENCES, ENGINE_ARGUMENTS),
    Section("LLM methods", dir(lamella.LLM), {
        "generate": "may be called with the arguments below",
        "chat": "may be called with the arguments below",
        "get_tokenizer": "lamella's own tokenizer, which has the methods that vLLM's callers use",
        "get_default_sampling_params": "with what generation_config.json says",
        "beam_search": "`BeamSearchParams` has vLLM's names and meaning; a temperature scales log-probabilities",
        "score": "of generation: log-probabilities of given continuations; there are no cross-encoders",
    }, {
        **dict.fromkeys(["enqueue", "enqueue_chat", "wait_for_completion"], NO_ASYNC_CALLS),
        **dict.fromkeys(["collective_rpc", "apply_model", "get_world_size"], NO_WORKERS),
        **dict.fromkeys(["start_profile", "stop_profile"], "profile the process with a profiler of your own"),
        **dict.fromkeys(["sleep", "wake_up", "release_kv_cache_memory"], "`close()` gives all memory back"),
        "reset_mm_cache": "prompts are text or token ids",
        "get_metrics": "`llm.engine.stats()`",
        "deprecate_legacy_api": "internal to vLLM",
        "set_tokenizer": "give `tokenizer=` when the LLM is made",
        **dict.fromkeys(["encode", "embed", "classify"], NO_POOLING),
    }),
    Section("LLM.generate", parameters(lamella.LLM.generate), {}, GENERATE_ARGUMENTS),
    Section("LLM.chat", parameters(lamella.LLM.chat), {"messages": "text only"}, CHAT_ARGUMENTS),
    Section("LLM.reset_prefix_cache", parameters(lamella.LLM.reset_prefix_cache), {}, RESET_PREFIX_CACHE_ARGUMENTS),
    Section("SamplingParams", fields(lamella.SamplingParams), {
        "n": "the only one that may be given by position",
        "repetition_penalty": "1e-6 to 1e6",
        "logit_bias": "numbers are not clamped to -100 to 100; stored as a tuple of pairs",
        "bad_words": "with a space before it, however its tokens differ; stored as a tuple",
        "allowed_token_ids": "stored as a tuple",
        "prompt_logprobs": "what need not be scored may come from the cache",
        "prompt_logprob_start": "entries before it are None",
        "logits_processors": "vLLM 0.8's functions; a class is made for each sample, and so may have state",
        "seed": "0 to 2**64 - 1, -1 as None",
        "stop": "stored as a tuple", "stop_token_ids": "stored as a tuple",
    }, SAMPLING_ARGUMENTS),
    Section("SamplingParams methods", dir(lamella.SamplingParams), {
        "clone": "a SamplingParams is frozen: `dataclasses.replace(params, max_tokens=5)` makes one with a change",
    }, {
        "from_optional": "leave out what is None",
        **dict.fromkeys(["update_from_generation_config", "update_from_tokenizer", "verify", "for_sampler_warmup",
            "sampling_type", "eos_token_id", "all_stop_token_ids", "bad_words_token_ids", "num_logprobs"],
            "internal to vLLM"),
    }),
    Section("TextPrompt", lamella.TextPrompt.__annotations__, {}, PROMPT_KEYS),
    Section("TokensPrompt", lamella.TokensPrompt.__annotations__, {}, PROMPT_KEYS),
    Section("RequestOutput", fields(lamella.RequestOutput), {
        "metrics": "lamella's RequestMetrics, always there",
        "num_cached_tokens": "exact to the token",
    }, vars(lamella.RequestOutput)),
    Section("CompletionOutput", fields(lamella.CompletionOutput), {
        "finish_reason": '"error" where a request\'s logits are no numbers, or a logits processor of its own fails',
    }, vars(lamella.CompletionOutput)),
    Section("Logprob", fields(lamella.Logprob), {}, {}),
    Section("LLMEngine methods", dir(lamella.Engine), {
        "abort_request": "`abort` returns the last outputs",
        "reset_prefix_cache": "cached prefixes of running requests stay",
        "remove_lora": "an error while requests use the adapter",
    }, {
        "from_vllm_config": "`from_engine_args`, or `Engine(model=...)`",
        "has_unfinished_requests_dp": "`has_unfinished_requests`",
        **dict.fromkeys(["get_supported_tasks", "validate_outputs"], "lamella generates only"),
        **dict.fromkeys(["start_profile", "stop_profile"], "profile the process with a profiler of your own"),
        **dict.fromkeys(["reset_mm_cache", "reset_encoder_cache"], "prompts are text or token ids"),
        **dict.fromkeys(["sleep", "wake_up", "is_sleeping", "release_kv_cache_memory"],
            "`close()` gives all memory back"),
        **dict.fromkeys(["get_metrics", "do_log_stats", "do_log_stats_with_interval"], "`stats()`"),
        **dict.fromkeys(["tokenizer", "get_tokenizer_group"], "`get_tokenizer()`"),
        **dict.fromkeys(["collective_rpc", "apply_model"], NO_WORKERS),
        **dict.fromkeys(["set_weight_version", "get_weight_version"], "weights do not change while an engine lives"),
        **dict.fromkeys(["get_vllm_config", "get_model_config"], "`config`, `model_config`"),
    }),
    Section("LLMEngine.from_engine_args", parameters(lamella.Engine.from_engine_args), {}, FROM_ENGINE_ARGS_ARGUMENTS),
    Section("LLMEngine.add_request", parameters(lamella.Engine.add_request), {}, ADD_REQUEST_ARGUMENTS),
    Section("LLMEngine.abort_request", parameters(lamella.Engine.abort_request), {}, ABORT_REQUEST_ARGUMENTS),
]  # fmt: skip


def names(title: str) -> list[str]:
    """vLLM's, over all releases read, in the order of the newest. EngineArgs has those of LLM, too."""
    titles = (title, "LLM arguments") if title == "EngineArgs" else (title,)
    return list(dict.fromkeys(name for release in SURFACE.values() for one in titles for name in release["names"][one]))


def rows(section: Section) -> list[tuple[str, str, str]]:
    """(names, status, what to know). KeyError for a name of vLLM's of which nothing is said."""
    own = set(section.own)
    same = [name for name in names(section.title) if name in own and name not in section.differs]
    made = [(_listed(same), "same", "")] if same else []
    made += [
        (f"`{name}`", "differs", section.differs[name])
        for name in names(section.title)
        if name in own & set(section.differs)
    ]
    grouped: dict[tuple[str, str], list[str]] = {}
    for name in names(section.title):
        if name in own:
            continue
        entry = section.absent[name]
        if entry is None:
            grouped.setdefault(("there, always None", ""), []).append(f"`{name}`")
        elif isinstance(entry, Renamed):
            grouped.setdefault(("differs", entry.says), []).append(f"`{name}`")
        elif isinstance(entry, Absent):
            grouped.setdefault(("not here", entry.instead), []).append(_with_values(name, entry))
        else:
            grouped.setdefault(("not here", entry), []).append(f"`{name}`")
    return made + [(", ".join(listed), *key) for key, listed in grouped.items()]


def ranges() -> list[tuple[str, str]]:
    """Of every number of SamplingParams and EngineConfig."""
    of_sampling = {
        **sampling_params.WHOLE_NUMBERS,
        **sampling_params.REAL_NUMBERS,
        **dict.fromkeys(
            ("stop_token_ids", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
            sampling_values.TOKEN_ID,
        ),
        "logit_bias": sampling_values.BIAS,
    }
    of_engine = {
        **config.WHOLE_NUMBERS,
        "max_model_len": config.MAX_MODEL_LEN,
        **dict.fromkeys(("kv_cache_memory_fraction", "gpu_memory_utilization"), FRACTION),
        "swa_full_tokens_ratio": RealRange(LEAST_RATIO, MOST_RATIO),
    }
    return [
        (f"{owner}.{name}", str(allowed))
        for owner, table in (("SamplingParams", of_sampling), ("EngineConfig", of_engine))
        for name, allowed in table.items()
    ]


def render() -> str:
    parts = ["### Ranges of numbers", "", "| | |", "|---|---|"]
    parts += [f"| `{name}` | {allowed} |" for name, allowed in ranges()]
    parts.append("")
    for section in SECTIONS:
        heading = "EngineArgs, and arguments of LLM" if section.title == "EngineArgs" else section.title
        parts += [f"### {heading}", "", "| vLLM | here | |", "|---|---|---|"]
        parts += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(section)]
        parts.append("")
    return "\n".join(parts)


def _listed(listed: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in listed)


def _with_values(name: str, entry: Absent) -> str:
    if entry.harmless is None:
        return f"`{name}=...`"
    values = " or ".join(repr(value) for value in entry.harmless) or "None"
    return f"`{name}={values}`"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{render()}\n{END}{after}", encoding="utf-8")
