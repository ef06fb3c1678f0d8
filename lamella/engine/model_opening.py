"""Which code runs a model: a native family's layers, or transformers' own on lamella's attention.

Either way a model is opened in two parts. Opening reads what the files say and refuses what cannot be run; loading
reads weights. What is loaded plugs into the runner alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from lamella.attention.choice import choose_backend
from lamella.attention.contract import AttentionBackend
from lamella.engine.config import EngineConfig
from lamella.errors import ConfigError, ModelLoadError, UnbuiltVariantError
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.adapters.adapter_reader import AdapterReader, NativeAdapterReader
from lamella.model_executor.layers.choice import choose_operators
from lamella.model_executor.layers.description import Model
from lamella.model_executor.layers.stack import Stack
from lamella.model_executor.layers.worker_sum import ONE_WORKER, WorkerSum
from lamella.model_executor.models.config import ModelConfig, kv_sharing
from lamella.model_executor.models.mlp_config import ExpertsConfig
from lamella.model_executor.models.registry import weight_map
from lamella.model_executor.models.sharding import Worker, check_divisible, shard_attention, shard_config
from lamella.model_executor.models.transformers_backend.text_config import TransformersConfig
from lamella.model_executor.runner import RunnableModel
from lamella.model_executor.weights.kv_scales import KVScales, load_kv_scales
from lamella.model_executor.weights.loading import end_token_ids, has_native_family, load_config, load_weights
from lamella.model_executor.weights.model_source import ModelSource
from lamella.model_executor.weights.shard_loading import load_shard

logger = logging.getLogger(__name__)

ServedConfig = ModelConfig | TransformersConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """attention_specs: what each layer sees. kv_sharing: layer -> the layer whose KV it reads. prunes: as for
    ModelRunner. is_capturable: whether its decode steps can be captured as CUDA graphs. adapters: what reads adapters
    for it; None: it runs without."""

    runnable: RunnableModel
    backend: AttentionBackend
    attention_specs: list[KVCacheSpec]
    kv_sharing: Mapping[int, int]
    kv_scales: Sequence[KVScales] | None = None
    prunes: bool = True
    is_capturable: bool = True
    adapters: AdapterReader | None = None


class OpenedModel(Protocol):
    """A model whose files have been found to describe something that can be run."""

    config: ServedConfig

    def check_workers(self, num_workers: int) -> None:
        """Raise ConfigError where so many workers (2 or more) cannot compute it together."""
        ...

    def load(
        self,
        engine: EngineConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        device: torch.device,
        workers: WorkerSum = ONE_WORKER,
    ) -> LoadedModel:
        """kv_dtype: what K and V are stored in; None: `dtype`. workers: who computes each layer together, by whom the
        model is cut. Raises ConfigError for options that the model cannot be run with, ModelLoadError for its
        weights."""
        ...


def open_model(model_impl: str, source: ModelSource, *, shows_progress: bool = False) -> OpenedModel:
    """model_impl: "native", "transformers", or "auto": native where there is a family for the model that builds its
    variant, which the log says where there is not. Raises ModelLoadError where the model cannot be run so, with the
    reason."""
    if model_impl == "transformers" or (model_impl == "auto" and not has_native_family(source)):
        return _TransformersBackendModel(source)
    try:
        return _NativeModel(source, shows_progress)
    except UnbuiltVariantError as refusal:
        if model_impl == "native":
            raise
        try:
            opened = _TransformersBackendModel(source)
        except ModelLoadError as error:
            raise ModelLoadError(f"{refusal}; and {error}") from error
        logger.warning("transformers' code runs it, as the native family is not built for it: %s", refusal)
        return opened


class _NativeModel:
    def __init__(self, source: ModelSource, shows_progress: bool) -> None:
        self._source = source
        self._shows_progress = shows_progress
        self._config = load_config(source)
        self.config: ServedConfig = self._config

    def check_workers(self, num_workers: int) -> None:
        if any(layer.attention.qk_norm == "projection" for layer in self._config.layers):
            raise ConfigError(
                f"tensor_parallel_size={num_workers}: Q and K of this model are normed as whole rows, over the heads "
                "of all workers, and workers meet only behind attention and behind the MLP; use 1"
            )
        worker = self._worker(0, num_workers, cuts_experts=True)
        try:
            check_divisible(self._config, replace(worker, cuts_experts=self._cuts_experts(num_workers, "torch")))
        except ConfigError as error:
            raise ConfigError(f"tensor_parallel_size={num_workers}: {error}") from error

    def _cuts_experts(self, num_workers: int, backend_name: str) -> bool:
        """Whether each expert is divided among all workers: the kernels that run all experts of a layer want it so.
        Else each worker has its own, where that comes out even."""
        experts = [each for layer in self._config.layers for each in (layer.mlp, layer.experts_beside)]
        counts = [each.num_experts for each in experts if isinstance(each, ExpertsConfig)]
        return backend_name in ("native", "triton") or any(count % num_workers for count in counts)

    def _worker(self, rank: int, num_workers: int, *, cuts_experts: bool, backend_name: str = "") -> Worker:
        is_native = backend_name == "native"
        return Worker(rank, num_workers, cuts_experts, keeps_vocabulary=True, adds_biases_in_products=is_native)

    def load(
        self,
        engine: EngineConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        device: torch.device,
        workers: WorkerSum = ONE_WORKER,
    ) -> LoadedModel:
        config, source = self._config, self._source
        kv_scales = None
        if kv_dtype is not None:
            kv_scales = load_kv_scales(source, weight_map(config), num_layers=config.num_layers)
        rank, num_workers, is_cut = workers.rank, workers.num_workers, workers.num_workers > 1
        attending = self._worker(rank, num_workers, cuts_experts=True)
        specs = [
            shard_attention(layer.attention, attending).spec((kv_dtype or dtype).itemsize) for layer in config.layers
        ]
        backend = choose_backend(
            engine.attention_backend, device, specs=specs, dtype=kv_dtype or dtype, page_tokens=engine.page_size
        )
        if dtype == torch.float32 != getattr(torch, config.dtype):
            logger.info("%s: stored in %s, computed in float32", source.name, config.dtype)
        cache_dir = Path(engine.cache_dir) if engine.cache_dir is not None else None
        if is_cut:
            cuts_experts = self._cuts_experts(num_workers, backend.name)
            worker = self._worker(rank, num_workers, cuts_experts=cuts_experts, backend_name=backend.name)
            model = Model(shard_config(config, worker), dtype)
            operators = choose_operators(engine.quantization, backend.name, source, model, workers)
            weights = load_shard(source, config, worker, dtype, form=operators.weight_form, cache_dir=cache_dir)
        else:
            model = Model(config, dtype)
            operators = choose_operators(engine.quantization, backend.name, source, model)
            weights = load_weights(
                source,
                model,
                form=operators.weight_form,
                cache_dir=cache_dir,
                shows_progress=self._shows_progress,
            )
        model.load({name: tensor.to(device) for name, tensor in weights.items()})
        return LoadedModel(
            runnable=Stack(model, operators),
            backend=backend,
            attention_specs=specs,
            kv_sharing=kv_sharing(config),
            kv_scales=kv_scales,
            is_capturable=not is_cut,
            adapters=None if is_cut else NativeAdapterReader(model, operators, weight_map(config)),
        )


class _TransformersBackendModel:
    def __init__(self, source: ModelSource) -> None:
        # Here and not above: transformers takes seconds to import.
        from lamella.model_executor.models.transformers_backend.loading import check_model

        self._checked = check_model(source, end_token_ids(source))
        self.config: ServedConfig = self._checked.config

    def check_workers(self, num_workers: int) -> None:
        raise ConfigError(
            f"tensor_parallel_size={num_workers} is for native families, whose weight maps say how each weight is cut, "
            f"and transformers' code runs {self._checked.run_by.model_class.__name__} here; use 1"
        )

    def load(
        self,
        engine: EngineConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        device: torch.device,
        workers: WorkerSum = ONE_WORKER,
    ) -> LoadedModel:
        from lamella.model_executor.models.transformers_backend.loading import load_checked

        if engine.quantization not in (None, "none"):
            raise ConfigError(
                f"quantization={engine.quantization!r} is for native families, and transformers' code runs "
                f"{self._checked.run_by.model_class.__name__} here; leave it out"
            )
        if engine.enable_lora:
            raise ConfigError(
                "enable_lora=True is for native families, and transformers' code runs "
                f"{self._checked.run_by.model_class.__name__} here, whose linear layers lamella does not call itself; "
                "merge the adapter into the model"
            )
        stored = kv_dtype or dtype
        runnable, specs, owners = load_checked(self._checked, dtype, device, itemsize_bytes=stored.itemsize)
        backend = choose_backend(
            engine.attention_backend, device, specs=specs, dtype=stored, page_tokens=engine.page_size
        )
        return LoadedModel(
            runnable=runnable,
            backend=backend,
            attention_specs=specs,
            kv_sharing=owners,
            prunes=runnable.prunes,
            is_capturable=False,
        )
