"""Engine arguments, checked when given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from lamella.argument_checks import FRACTION, MOST_SEED, MOST_TOKENS, WholeRange, path_text, shown, truth_value
from lamella.attention.choice import BACKEND_NAMES
from lamella.attention.kv_dtype import KV_CACHE_DTYPES
from lamella.engine.scheduling.speculation.settings import SpeculationSettings
from lamella.engine.scheduling.waiting_queue import SCHEDULING_POLICIES
from lamella.engine.speculative_config import speculation_settings
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.vllm_engine_arguments import ENGINE_ARGUMENTS, NONE_IS_DEFAULT
from lamella.engine.vllm_keywords import takes_vllm_keywords
from lamella.errors import ConfigError
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.split import check_ratio
from lamella.model_executor.layers.choice import QUANTIZATIONS

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
KV_SPLITS = ("elastic", "ratio")
MODEL_IMPLS = ("auto", "native", "transformers")
MODEL_IMPL_ALIASES = {"vllm": "native"}
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}

# The ranges keep arrays small that have one entry for each request, each token of a step or each page.
WHOLE_NUMBERS = {
    "seed": WholeRange(0, MOST_SEED),
    "max_num_seqs": WholeRange(1, 2**16),
    "max_num_batched_tokens": WholeRange(1, 2**24),
    "page_size": WholeRange(1, 2**16),
    "swa_eviction_interval": WholeRange(1, MOST_TOKENS),
    "kv_cache_memory_bytes": WholeRange(1, 2**50),
    "retention_grid_tokens": WholeRange(1, MOST_TOKENS),
    "max_loras": WholeRange(1, 2**16),
    "max_cpu_loras": WholeRange(1, 2**16),
    "max_lora_rank": WholeRange(1, 2**16),
    "max_pinned_bytes": WholeRange(0, 2**50),
    "tensor_parallel_size": WholeRange(1, 2**10),
    "data_parallel_size": WholeRange(1, 2**14),
    "distributed_timeout_seconds": WholeRange(1, 2**20),
}
EXECUTOR_BACKENDS = (None, "mp", "ray")
MAX_CPU_LORAS = 16
MAX_MODEL_LEN = WholeRange(-1, MOST_TOKENS, f'a whole number from 1 to {MOST_TOKENS}, or "auto" (or -1)')
_FRACTIONS = ("kv_cache_memory_fraction", "gpu_memory_utilization")
_TRUTH_VALUES = (
    "enable_prefix_caching",
    "disable_hybrid_kv_cache",
    "windowed_replay",
    "enforce_eager",
    "check_invariants",
    "enable_lora",
    "disable_log_stats",
    "async_scheduling",
)


@takes_vllm_keywords(ENGINE_ARGUMENTS, ConfigError, NONE_IS_DEFAULT)
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. Names follow vLLM's engine arguments where both have the thing; vLLM's others are taken where
    they ask for nothing, and block_size is page_size.

    model: Hugging Face folder, .gguf file, or "demo:gemma-3-270m".
    tokenizer: folder or file to use instead of the model's.
    load_format: "auto", "safetensors", "gguf" or "dummy" (random weights).
    model_impl: whose layers run: "native" (lamella's; "vllm" means the same), "transformers" (those of the installed
        transformers, on lamella's attention and KV cache), or "auto": native ones where there are some for the model.
    dtype: numbers to compute with: "auto" (the checkpoint's; float32 on CPU), "float32" or "float", "bfloat16",
        "float16" or "half".
    quantization: weights in fewer bits, on a CPU: "int8", "w8a8" (the fastest for many requests), "gguf" (the GGUF
        file's own) or "none". "int8" rounds weights when they are loaded and keeps activations float32; "w8a8" takes
        the same weights in products of integers, activations in 16 bits; "gguf" takes the blocks as they are (results
        as with float32, in a quarter of its memory). On the native CPU path.
    device: "auto" (CUDA where there is one), "cpu", "cuda", or "cuda:1" for the second.
    seed: base of the seeds of requests that give none, 0 to 2**64 - 1. None is 0.
    max_model_len: longest prompt + output in tokens; None: the model's own; "auto" (or -1): the longest that the KV
        memory allows.
    max_num_seqs: most requests that run at once, up to 65536.
    max_num_batched_tokens: most tokens in one step, up to 2**24: long prompts are computed in chunks of this size.
    page_size: tokens per KV page, the unit in which KV memory is handed out.
    swa_eviction_interval: tokens that must have left a sliding window before their memory is freed; None: one page.
    enable_prefix_caching: keep the KV of prompts and outputs, so that a later prompt that begins alike starts there.
    scheduling_policy: who starts next: "fcfs" (first come, first served) or "prefix" (longest cached prefix first,
        nobody waits forever). LLM and the command line use "prefix" unless told otherwise.
    retention: which prefixes of sliding layers stay cached: "tails" (the ends of prompts and outputs), "all" or "none".
    retention_grid_tokens: with "tails", keep one every so many tokens, too; None: no more than the ends.
    max_pinned_bytes: the most KV memory that pinned prefixes may keep, beside which one request of max_model_len must
        fit; None: all that leaves room for one.
    disable_hybrid_kv_cache: keep every layer's KV for the request's life, as if no layer had a window.
    windowed_replay: where a prompt's full-attention KV is cached and its sliding windows are gone, compute those
        again, if that costs less than half of what it saves. In a model with sliding layers only, compute no more of a
        prompt than its last token depends on.
    kv_split: how full and sliding layers share the KV memory: "elastic" lends it to them as they need it; "ratio"
        divides it once, into fixed pools.
    swa_full_tokens_ratio: tokens that a sliding pool holds per token of the full-attention pool, 1e-6 to 1e6, with
        kv_split "ratio" only; None: 0.8 or, without prefix caching, no more than max_num_seqs requests can hold.
    kv_cache_dtype: numbers that keys and values are stored in: "auto" (as they are computed), "fp8" or "fp8_e4m3" (8
        bits with 3 of mantissa, half the memory of 16 bits), "fp8_e5m2" (more range, less precision). Divided by the
        checkpoint's scales, where it has some. Not on the native CPU path; a CPU takes attention_backend "torch".
    kv_cache_memory_bytes: memory for keys and values (KV), such as 2147483648; None: on a CPU kv_cache_memory_fraction
        of what is free, on CUDA what gpu_memory_utilization leaves.
    kv_cache_memory_fraction: share of the memory that is free once the weights are loaded to use for KV, on a CPU.
    gpu_memory_utilization: share of a CUDA device's memory that may be in use, by whomever: what weights, the largest
        step (measured at start-up) and captured graphs leave of it is the KV memory.
    enforce_eager: do not capture CUDA graphs of decode steps.
    attention_backend: attention kernels: "auto" (the fastest that is there), "native", "torch", "triton", "xformers"
        or "reference".
    async_scheduling: plan and launch a step while the one before it runs; None: on CUDA only, and not with speculation.
        Outputs are the same.
    structured_outputs_config: how outputs that have a form are made, such as {"compile_timeout_seconds": 5}.
    enable_lora: take requests with a lora_request, on native families.
    max_loras: most different adapters among the requests that run at once; others wait. None: as many as they have.
    max_cpu_loras: most adapters that stay loaded; those that requests use and pinned ones do in any case. At least
        max_loras; None: max_loras, or 16.
    max_lora_rank: largest rank of an adapter; None: any.
    speculative_config: draft tokens from texts that are there and verify several in a step, such as {"method":
        "suffix"} or {"method": "ngram", "num_speculative_tokens": 8}; None: do not. Outputs are the same.
    tensor_parallel_size: workers that compute every layer together, each with its share of heads, MLP columns and
        experts (docs/scaling.md). Memory for KV is each worker's own.
    data_parallel_size: whole engines that share an LLM's requests, each with a model and a cache of its own.
    distributed_executor_backend: what starts other processes: "mp" (on this machine) or "ray"; None: "mp" for
        workers, "ray" for engines.
    distributed_timeout_seconds: how long a worker that is there may let the others wait, in seconds.
    ray_actor_options: what Ray is told of each process that it starts, such as {"num_cpus": 4} or {"num_gpus": 1}.
    cache_dir: folder for converted weights; None: the user's cache folder.
    check_invariants: check the KV bookkeeping after every step (slow; for tests and debugging).
    disable_log_stats: keep no metrics, and log no line of how fast it goes.
    profile: file to write a trace of steps, requests and KV memory to, for Perfetto and `lamella trace-picture`; None:
        none.
    """

    model: str
    _: KW_ONLY
    tokenizer: str | None = None
    load_format: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    seed: int = 0
    max_model_len: int | str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    swa_eviction_interval: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    retention: str = "tails"
    retention_grid_tokens: int | None = None
    max_pinned_bytes: int | None = None
    disable_hybrid_kv_cache: bool = False
    windowed_replay: bool = True
    kv_split: str = "elastic"
    swa_full_tokens_ratio: float | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_fraction: float = 0.4
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    attention_backend: str = "auto"
    async_scheduling: bool | None = None
    structured_outputs_config: StructuredOutputsConfig | Mapping[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    distributed_timeout_seconds: int = 60
    ray_actor_options: Mapping[str, Any] | None = None
    cache_dir: str | None = None
    check_invariants: bool = False
    disable_log_stats: bool = False
    profile: str | None = None

    def __post_init__(self) -> None:
        self._check_values()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step must have room for one token of every running request"
            )

        if self.max_loras is not None and self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is below max_loras={self.max_loras}: adapters that run are "
                "loaded; give at least as many"
            )

    def _check_values(self) -> None:
        """Bring every field to its own type and check its range, or refuse it."""
        for name in ("model", "tokenizer", "cache_dir", "profile"):
            value = getattr(self, name)
            if value is not None or name == "model":
                self._set(name, path_text(name, value, ConfigError))
        if isinstance(self.dtype, torch.dtype):
            self._set("dtype", str(self.dtype).removeprefix("torch."))
        if isinstance(self.dtype, str):
            self._set("dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        if isinstance(self.model_impl, str):
            self._set("model_impl", MODEL_IMPL_ALIASES.get(self.model_impl, self.model_impl))
        self._require_one_of("load_format", LOAD_FORMATS)
        self._require_one_of("model_impl", MODEL_IMPLS)
        self._require_one_of("dtype", DTYPES)
        self._require_one_of("quantization", QUANTIZATIONS)
        self._require_one_of("attention_backend", BACKEND_NAMES)
        self._require_one_of("kv_cache_dtype", tuple(KV_CACHE_DTYPES))
        self._require_one_of("kv_split", KV_SPLITS)
        self._require_one_of("scheduling_policy", SCHEDULING_POLICIES)
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size == 1:  # vLLM's word for no other
            self._set("distributed_executor_backend", None)
        self._require_one_of("distributed_executor_backend", EXECUTOR_BACKENDS)
        if not (self.ray_actor_options is None or isinstance(self.ray_actor_options, Mapping)):
            raise ConfigError(
                f"ray_actor_options={shown(self.ray_actor_options)}: give a mapping, such as {{'num_cpus': 4}}"
            )
        self._check_device()
        for name, whole in WHOLE_NUMBERS.items():
            if getattr(self, name) is not None:
                self._set(name, whole.check(name, getattr(self, name), ConfigError))
        if isinstance(self.max_model_len, str) and self.max_model_len != "auto":
            raise ConfigError(f"max_model_len={shown(self.max_model_len)} is not known; give {MAX_MODEL_LEN}")
        if not (self.max_model_len is None or isinstance(self.max_model_len, str)):
            length = MAX_MODEL_LEN.check("max_model_len", self.max_model_len, ConfigError)
            if length == 0:
                raise ConfigError(f"max_model_len=0 is out of range; give {MAX_MODEL_LEN}")
            self._set("max_model_len", length)
        for name in _FRACTIONS:
            self._set(name, FRACTION.check(name, getattr(self, name), ConfigError))
        for name in _TRUTH_VALUES:
            if name != "async_scheduling" or self.async_scheduling is not None:
                self._set(name, truth_value(name, getattr(self, name), ConfigError))
        self._set("structured_outputs_config", StructuredOutputsConfig.of(self.structured_outputs_config))
        RetentionPolicy(self.retention, self.retention_grid_tokens)  # raises ConfigError where one is wrong
        if self.speculation is not None and self.async_scheduling:
            raise ConfigError(
                "async_scheduling=True with a speculative_config: what comes next depends on what the step in flight "
                "accepts, so no step can be planned while one runs; leave one of them out"
            )
        if self.swa_full_tokens_ratio is not None:
            self._set("swa_full_tokens_ratio", check_ratio(self.swa_full_tokens_ratio))
            if self.kv_split != "ratio":
                raise ConfigError(
                    f"swa_full_tokens_ratio={self.swa_full_tokens_ratio!r} is given, but with "
                    f'kv_split="{self.kv_split}" memory is not divided by a ratio; set kv_split="ratio" as well, or '
                    "leave the ratio out"
                )

    @property
    def speculation(self) -> SpeculationSettings | None:
        """What speculative_config asks for; None: no speculation."""
        return speculation_settings(self.speculative_config)

    @property
    def num_draft_tokens(self) -> int:
        """The most drafts of a request in a step."""
        settings = self.speculation
        return 0 if settings is None else settings.num_draft_tokens

    def _check_device(self) -> None:
        if isinstance(self.device, torch.device):
            self._set("device", str(self.device))
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", self.device, re.ASCII):
            raise ConfigError(f'device={shown(self.device)} is not supported: use "auto", "cpu", "cuda" or "cuda:0"')

    def _require_one_of(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if not (value is None or isinstance(value, str)) or value not in choices:
            known = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{name}={shown(value)} is not known; choose one of {known}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
