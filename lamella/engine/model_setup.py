"""From an EngineConfig to a model in memory with a KV arena of the right size."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from lamella.attention.kv_dtype import KV_CACHE_DTYPES
from lamella.distributed.parallel_runner import ParallelRunner
from lamella.distributed.worker_group import WorkerGroup, join_group
from lamella.distributed.workers import Workers
from lamella.engine.config import MAX_CPU_LORAS, EngineConfig
from lamella.engine.loaded_adapters import LoadedAdapters
from lamella.engine.model_opening import LoadedModel, OpenedModel, ServedConfig, open_model
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.engine.scheduling.speculation.drafter import Drafter
from lamella.engine.step_cost_probe import measure_step_costs
from lamella.errors import CapacityError, ConfigError, WorkerLostError
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import KVLayout, build_layout, without_sliding
from lamella.kv_cache.memory import MemoryProfile, allocate_arena, available_memory_bytes, total_memory_bytes
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.sizing import PoolSize, decode_table_widths, size_pool, table_line_widths
from lamella.kv_cache.spec import ceil_div
from lamella.kv_cache.split import split_pools
from lamella.model_executor.decode_graphs import CAPTURABLE_BACKENDS, CudaGraphs
from lamella.model_executor.layers.worker_sum import ONE_WORKER, WorkerSum
from lamella.model_executor.memory_profile import CudaMeter, LargestBatch, profile_memory
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.model_executor.weights.loading import (
    load_sampling_defaults,
    load_tokenizer,
    resolve_model,
)
from lamella.model_executor.weights.model_source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedEngine:
    """Everything that `Engine.close` lets go."""

    tokenizer: Tokenizer
    model_config: ServedConfig
    default_params: SamplingParams
    layout: KVLayout
    pool: PoolSize
    manager: BlockManager
    scheduler: Scheduler
    runner: ModelRunner
    adapters: LoadedAdapters
    source: ModelSource
    workers: Workers | None = None  # who compute with this one

    def let_go(self) -> None:
        """Let go of everything, so that the memory is free even if somebody still holds this object."""
        if self.workers is not None:
            self.workers.close()
        for one in dataclasses.fields(self):
            delattr(self, one.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShard:
    """The model, or one worker's part of it, with memory for its KV: what every worker has."""

    loaded: LoadedModel
    layout: KVLayout
    size: PoolSize
    slab_quota: tuple[int, ...] | None
    interval_tokens: int
    max_batch: LargestBatch
    profile: MemoryProfile | None
    device: torch.device
    uses_graphs: bool
    make_runner: Callable[..., ModelRunner]  # of a class of runners, ModelRunner unless told otherwise


StartWorkers = Callable[[EngineConfig], Workers]


def load_engine(
    config: EngineConfig, *, shows_progress: bool = False, start_workers: StartWorkers | None = None
) -> LoadedEngine:
    """Load tokenizer and weights side by side, then size the KV arena from what memory is left. start_workers: starts
    those that compute with this one, where tensor_parallel_size says so.

    Raises ConfigError, ModelLoadError or CapacityError before memory is taken, where that can be told.
    """
    opened = _open(config, shows_progress)
    if config.tensor_parallel_size == 1 or start_workers is None:
        return _load_engine(config, opened, None)
    _check_workers(config, opened)
    workers = start_workers(config)
    try:
        return _load_engine(config, opened, workers)
    except WorkerLostError as error:
        raise workers.lost(error) from error
    except BaseException:
        workers.close()
        raise


def load_shard(
    config: EngineConfig, group: WorkerGroup, agree: Callable[[int], int], device_name: str | None = None
) -> LoadedShard:
    """What a worker beside the engine loads. agree: gives the smallest of all workers' numbers."""
    opened = _open(config, shows_progress=False)
    device = choose_device(config.device if device_name is None else device_name, group.rank)
    return _load_shard(config, opened, device, group, agree)


class Frontend(NamedTuple):
    """What checks and renders requests of a model whose engines are elsewhere."""

    tokenizer: Tokenizer
    model_config: ServedConfig
    default_params: SamplingParams


def load_frontend(config: EngineConfig) -> Frontend:
    """No weights are read. Raises ConfigError and ModelLoadError as `load_engine` does."""
    opened, cache_dir = _open(config, shows_progress=False), _cache_dir(config)
    tokenizer_source = opened.source
    if config.tokenizer is not None:
        tokenizer_source = resolve_model(config.tokenizer, cache_dir=cache_dir)
    tokenizer = load_tokenizer(tokenizer_source, cache_dir)
    params = SamplingParams(**load_sampling_defaults(opened.source))
    return Frontend(tokenizer, _with_tokenizer_end(opened.model.config, tokenizer), params)


class _Opened(NamedTuple):
    source: ModelSource
    model: OpenedModel


def _open(config: EngineConfig, shows_progress: bool) -> _Opened:
    source = resolve_model(config.model, config.load_format, cache_dir=_cache_dir(config))
    return _Opened(source, open_model(config.model_impl, source, shows_progress=shows_progress))


def _cache_dir(config: EngineConfig) -> Path | None:
    return Path(config.cache_dir) if config.cache_dir is not None else None


def _check_workers(config: EngineConfig, opened: _Opened) -> None:
    """Raise ConfigError, before any is started, for what several workers cannot do together."""
    given = f"tensor_parallel_size={config.tensor_parallel_size}"
    if config.enable_lora:
        raise ConfigError(
            f"{given} with enable_lora=True: adapters are not cut for workers; merge it into the model, or use 1"
        )
    if config.quantization not in (None, "none"):
        raise ConfigError(
            f"{given} with quantization={config.quantization!r}: weights are cut as floats, and this form's scales and "
            "blocks span what is cut; leave one of them out"
        )
    if config.speculation is not None:
        raise ConfigError(
            f"{given} with a speculative_config: what a step costs is measured on one worker; leave one of them out"
        )
    opened.model.check_workers(config.tensor_parallel_size)


def _load_engine(config: EngineConfig, opened: _Opened, workers: Workers | None) -> LoadedEngine:
    cache_dir = _cache_dir(config)
    source, model_config = opened.source, opened.model.config
    tokenizer_source = source if config.tokenizer is None else resolve_model(config.tokenizer, cache_dir=cache_dir)
    default_params = SamplingParams(**load_sampling_defaults(source))
    device = choose_device(config.device, 0)
    group: WorkerSum = ONE_WORKER
    if workers is not None:
        group = workers.watched(
            lambda: join_group(
                workers.folder, 0, workers.num_workers, device=device, timeout_seconds=workers.timeout_seconds
            )
        )
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="lamella-tokenizer") as pool:
        tokenizer_loading = pool.submit(load_tokenizer, tokenizer_source, cache_dir)
        shard = _load_shard(config, opened, device, group, _alone if workers is None else workers.agree)
        tokenizer = tokenizer_loading.result()
    size, layout = shard.size, shard.layout
    manager = BlockManager(
        layout,
        num_slabs=size.num_slabs,
        num_rows=config.max_num_seqs,
        max_model_len=size.max_model_len,
        interval_tokens=shard.interval_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        slab_quota=shard.slab_quota,
        retention=_retention(config),
        windowed_replay=config.windowed_replay,
        skips_prompts=config.windowed_replay,
        step_pages_bytes=size.step_pages_bytes,
        max_pinned_bytes=config.max_pinned_bytes,
        num_draft_tokens=config.num_draft_tokens,
    )
    scheduler = Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        chunk_tokens=size.chunk_tokens,
        scheduling_policy=config.scheduling_policy,
        short_text_tokens=model_config.short_text_tokens,
        max_loras=config.max_loras,
        drafter=_drafter(config, shard.make_runner, layout, size, model_config),
    )
    runner = shard.make_runner() if workers is None else shard.make_runner(partial(ParallelRunner, workers))
    if device.type != "cpu":
        runner.reserve_tables(shard.max_batch.num_requests, shard.max_batch.line_widths)
    if shard.uses_graphs:
        _capture_graphs(runner, shard.max_batch, shard.profile, device)
    model_config = _with_tokenizer_end(model_config, tokenizer)
    adapters = LoadedAdapters(
        shard.loaded.adapters if config.enable_lora else None,
        runner.adapters,
        max_loaded=config.max_cpu_loras or config.max_loras or MAX_CPU_LORAS,
        max_rank=config.max_lora_rank,
    )
    return LoadedEngine(
        tokenizer, model_config, default_params, layout, size, manager, scheduler, runner, adapters, source, workers
    )


def _alone(number: int) -> int:
    return number


def _load_shard(
    config: EngineConfig,
    opened: _Opened,
    device: torch.device,
    workers: WorkerSum,
    agree: Callable[[int], int],
) -> LoadedShard:
    """agree: gives the smallest of all workers' numbers, so that all have equally much memory for KV."""
    model_config = opened.model.config
    max_model_len = _check_max_model_len(config, model_config)
    dtype = _choose_dtype(config.dtype, model_config, device)
    kv_dtype = KV_CACHE_DTYPES[config.kv_cache_dtype]
    loaded = opened.model.load(config, dtype, kv_dtype, device, workers)
    kv_dtype = kv_dtype or dtype
    backend, attention_specs = loaded.backend, loaded.attention_specs

    stored_specs = without_sliding(attention_specs) if config.disable_hybrid_kv_cache else attention_specs
    layout = build_layout(stored_specs, page_tokens=config.page_size, kv_sharing=loaded.kv_sharing)
    interval_tokens = config.swa_eviction_interval or config.page_size
    table_bounds = {
        "max_model_len": max_model_len or model_config.max_position_embeddings,
        "interval_tokens": interval_tokens,
        "num_blocks_more": _num_blocks_more(config),
        "num_draft_tokens": config.num_draft_tokens,
    }
    max_batch = LargestBatch(
        num_requests=config.max_num_seqs,
        num_tokens=config.max_num_batched_tokens,
        table_widths=decode_table_widths(layout, **table_bounds),
        line_widths=table_line_widths(layout, chunk_tokens=config.max_num_batched_tokens, **table_bounds),
    )
    uses_graphs = device.type == "cuda" and not config.enforce_eager and backend.name in CAPTURABLE_BACKENDS
    uses_graphs = uses_graphs and loaded.is_capturable
    memory_bytes, profile = _checked_memory_bytes(config.kv_cache_memory_bytes, device), None
    if memory_bytes is None and device.type == "cuda":
        profile = profile_memory(
            loaded.runnable,
            backend,
            layout,
            attention_specs,
            CudaMeter(device),
            max_batch,
            kv_dtype=kv_dtype,
            with_graphs=uses_graphs,
        )
        memory_bytes = profile.kv_bytes(config.gpu_memory_utilization)
    elif memory_bytes is None:
        free_bytes = available_memory_bytes(device) // workers.num_workers  # which all take of the same
        memory_bytes = int(free_bytes * config.kv_cache_memory_fraction)
    memory_bytes = agree(memory_bytes)
    size, slab_quota, interval_tokens = _size_memory(config, layout, model_config, memory_bytes, max_model_len)
    arena = allocate_arena(layout, size.num_slabs, device, step_pages_bytes=size.step_pages_bytes)

    def make_runner(made: Callable[..., ModelRunner] = ModelRunner) -> ModelRunner:
        return made(
            loaded.runnable,
            backend,
            layout,
            attention_specs,
            arena,
            kv_dtype=kv_dtype,
            kv_scales=loaded.kv_scales,
            prunes=loaded.prunes,
        )

    return LoadedShard(
        loaded=loaded,
        layout=layout,
        size=size,
        slab_quota=slab_quota,
        interval_tokens=interval_tokens,
        max_batch=max_batch,
        profile=profile,
        device=device,
        uses_graphs=uses_graphs,
        make_runner=make_runner,
    )


def _drafter(
    config: EngineConfig,
    make_runner: Callable[[], ModelRunner],
    layout: KVLayout,
    size: PoolSize,
    model_config: ServedConfig,
) -> Drafter | None:
    """What guesses tokens, with what steps cost, measured over the arena while it is empty; None: no speculation."""
    settings = config.speculation
    if settings is None:
        return None
    manager = BlockManager(
        layout,
        num_slabs=size.num_slabs,
        num_rows=1,
        max_model_len=size.max_model_len,
        interval_tokens=config.page_size,
        enable_prefix_caching=False,
        num_draft_tokens=settings.num_draft_tokens,
    )
    costs = measure_step_costs(
        make_runner(),
        manager,
        vocab_size=model_config.vocab_size,
        chunk_tokens=size.chunk_tokens,
        max_tokens=min(config.max_num_batched_tokens, config.max_num_seqs + settings.num_draft_tokens),
    )
    return Drafter(settings, costs)


def _with_tokenizer_end(model_config: ServedConfig, tokenizer: Tokenizer) -> ServedConfig:
    """The configuration with the tokenizer's own end token among the end tokens, as in vLLM: some chat models were made
    from others and name their own end token only there."""
    token_id = tokenizer.eos_token_id
    if token_id is None or token_id >= model_config.vocab_size:
        return model_config
    end_ids = tuple(dict.fromkeys((*model_config.eos_token_ids, token_id)))
    return dataclasses.replace(model_config, eos_token_ids=end_ids)


def _capture_graphs(
    runner: ModelRunner, max_batch: LargestBatch, profile: MemoryProfile | None, device: torch.device
) -> None:
    started, meter = time.monotonic(), CudaMeter(device)
    before = meter.free_bytes()
    runner.capture_decodes(CudaGraphs(device), max_num_seqs=max_batch.num_requests, table_widths=max_batch.table_widths)
    taken = before - meter.free_bytes()
    logger.info(
        "captured decode graphs of up to %d requests in %.1f s; they take %.2f GiB",
        max_batch.num_requests,
        time.monotonic() - started,
        taken / 2**30,
    )
    if profile is not None and taken > profile.graph_bytes:
        logger.warning(
            "decode graphs take %.2f GiB, more than the %.2f GiB set aside for them, so that more of the device than "
            "gpu_memory_utilization is in use; lower it by as much, or set enforce_eager=True",
            taken / 2**30,
            profile.graph_bytes / 2**30,
        )


def _retention(config: EngineConfig) -> RetentionPolicy:
    return RetentionPolicy(config.retention, config.retention_grid_tokens)


def _num_blocks_more(config: EngineConfig) -> int:
    return _retention(config).num_blocks_more if config.enable_prefix_caching else 0


def _size_memory(
    config: EngineConfig,
    layout: KVLayout,
    model_config: ServedConfig,
    memory_bytes: int,
    max_model_len: int | None,
) -> tuple[PoolSize, tuple[int, ...] | None, int]:
    """The arena's size, each group's slabs where pools are fixed, and the eviction interval in tokens."""
    wanted_chunk = config.max_num_batched_tokens
    interval_tokens = config.swa_eviction_interval or config.page_size
    slab_quota = None
    if config.kv_split == "ratio":
        pools = split_pools(
            layout,
            memory_bytes=memory_bytes,
            ratio=config.swa_full_tokens_ratio,
            max_model_len=max_model_len,
            longest_model_len=model_config.max_position_embeddings,
            chunk_tokens=wanted_chunk,
            interval_tokens=interval_tokens,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
            num_blocks_more=_num_blocks_more(config),
            num_draft_tokens=config.num_draft_tokens,
        )
        size, slab_quota = PoolSize(pools.num_slabs, pools.chunk_tokens, pools.max_model_len), pools.slab_quota
        if pools.interval_tokens < interval_tokens:
            logger.info(
                "the eviction interval is capped at %d tokens: the windowed pools hold no more", pools.interval_tokens
            )
        interval_tokens = pools.interval_tokens
    else:
        pinned_bytes = _pinned_bytes(config, layout)
        size = size_pool(
            layout,
            memory_bytes=memory_bytes,
            set_aside_bytes=pinned_bytes,
            max_model_len=max_model_len,
            longest_model_len=model_config.max_position_embeddings,
            chunk_tokens=wanted_chunk,
            interval_tokens=interval_tokens,
            with_step_pages=config.retention != "all",  # "all" keeps every page, so none would be a step page
            num_blocks_more=_num_blocks_more(config),
            num_draft_tokens=config.num_draft_tokens,
        )
    if size.chunk_tokens < wanted_chunk:
        logger.info(
            "prefill chunks of one request are capped at %d tokens: the KV memory holds no more beside a request of "
            "%d tokens",
            size.chunk_tokens,
            size.max_model_len,
        )
    return size, slab_quota, interval_tokens


def _pinned_bytes(config: EngineConfig, layout: KVLayout) -> int:
    """Bytes of whole slabs that max_pinned_bytes may take: each group may need a slab that it does not fill."""
    if not config.max_pinned_bytes:
        return 0
    return (ceil_div(config.max_pinned_bytes, layout.slab_bytes) + len(layout.groups)) * layout.slab_bytes


def _checked_memory_bytes(memory_bytes: int | None, device: torch.device) -> int | None:
    """kv_cache_memory_bytes as it was given. Raises CapacityError where the device has less, before tables are made for
    pages that it could not hold."""
    total_bytes = total_memory_bytes(device) if memory_bytes is not None else 0
    if memory_bytes is not None and memory_bytes > total_bytes:
        raise CapacityError(
            f"kv_cache_memory_bytes={memory_bytes} is more than the {total_bytes} bytes that {device} has; give less, "
            "or None to take what is left"
        )
    return memory_bytes


def choose_device(name: str, rank: int) -> torch.device:
    """rank: of the worker; the CUDA devices behind the first are those of the workers behind it."""
    device = _device_of(name)
    if rank == 0 or device.type == "cpu":
        return device
    return _device_of(f"cuda:{(device.index or 0) + rank}")


def _device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device={name!r} is not known: use "auto", "cpu" or "cuda"') from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device={name!r} is not supported: use "auto", "cpu" or "cuda"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device={name!r}: this torch finds no CUDA device; use device="cpu"')
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0; give one of these"
        )
    return device


def _choose_dtype(name: str, model_config: ServedConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        # CPUs without 16-bit arithmetic emulate it several times slower than float32.
        name = "float32" if device.type == "cpu" else model_config.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_max_model_len(config: EngineConfig, model_config: ServedConfig) -> int | None:
    """The length asked for; None: the longest that fits."""
    longest = model_config.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len in ("auto", -1):
        return None
    assert isinstance(config.max_model_len, int)
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the model was made for at most {longest} positions; "
            f"give that or less"
        )
    return config.max_model_len
