"""Prefixes that an engine saves to files and loads from them: what a file is tied to, and the way of the KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from lamella.argument_checks import path_text
from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import LoadedEngine
from lamella.engine.prompts import ParsedPrompt, root_salt
from lamella.errors import PrefixFileError, RequestError
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.prefix_transfers import PrefixPages
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.prefix_file import (
    DTYPE_NAMES,
    OpenPrefix,
    PrefixTies,
    SavedPrefix,
    read_prefix_file,
    write_prefix_file,
)
from lamella.model_executor.prefix_kv import layers_with_kv, read_prefix, write_prefix
from lamella.model_executor.weights.model_identity import model_identity


class PrefixFile(NamedTuple):
    """What a file holds. kv_bytes: its K and V alone; file_bytes: all of it. A prompt of token_ids and more, under
    cache_salt, finds the prefix."""

    token_ids: list[int]
    cache_salt: str | None
    kv_bytes: int
    file_bytes: int


def prefix_ties(config: EngineConfig, loaded: LoadedEngine) -> PrefixTies:
    """What the KV of this engine depends on, and how it is arranged."""
    runner = loaded.runner
    device = runner.device
    capability = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    )
    return PrefixTies(
        model=model_identity(loaded.source),
        weights=f"{runner.model.dtype}, quantization {config.quantization}, {type(runner.model).__name__}",
        arithmetic=f"{device.type} {capability}, attention {runner.backend.name}",
        kv_dtype=DTYPE_NAMES[runner.places[0].cache.keys.dtype],
        layers="; ".join(_described(loaded.layout, layer) for layer in layers_with_kv(loaded.layout)),
    )


def _described(layout: KVLayout, layer: int) -> str:
    spec = _spec_of(layout, layer)
    name = layout.groups[layout.layer_address(layer)[0]].name.partition("#")[0]
    return f"{layer} {name} {spec.num_kv_heads}x({spec.k_dim}+{spec.v_dim})"


def _spec_of(layout: KVLayout, layer: int) -> KVCacheSpec:
    return layout.groups[layout.layer_address(layer)[0]].spec


def save_prefix(loaded: LoadedEngine, ties: PrefixTies, path: object, prefix: ParsedPrompt) -> PrefixFile:
    """Write what the cache has of the prefix. Raises RequestError where it has not all of it, PrefixFileError where the
    file cannot be written."""
    file = Path(path_text("path", path, RequestError))
    token_ids, ties = prefix.token_ids, dataclasses.replace(ties, adapter=prefix.adapter_digest)
    groups = loaded.manager.export_prefix(token_ids, prefix.salt)
    loaded.runner.move_pages(loaded.manager.take_moves())
    layers = read_prefix(loaded.runner, groups, len(token_ids))
    file_bytes = write_prefix_file(file, ties, SavedPrefix(token_ids, prefix.cache_salt, layers))
    kv_bytes = sum(part.keys.nbytes + part.values.nbytes for part in layers.values())
    return PrefixFile(token_ids.tolist(), prefix.cache_salt, kv_bytes, file_bytes)


class PrefixForm(NamedTuple):
    """What a file must have to be for an engine. specs: of each layer that keeps KV."""

    ties: PrefixTies
    specs: Mapping[int, KVCacheSpec]
    most_tokens: int
    vocab_size: int


def prefix_form(loaded: LoadedEngine, ties: PrefixTies) -> PrefixForm:
    specs = {layer: _spec_of(loaded.layout, layer) for layer in layers_with_kv(loaded.layout)}
    return PrefixForm(ties, specs, loaded.pool.max_model_len - 1, loaded.model_config.vocab_size)


def open_prefix(form: PrefixForm, path: object) -> OpenPrefix:
    """Read and check a file, which the caller closes; nothing enters the cache yet. Raises PrefixFileError."""
    file = Path(path_text("path", path, RequestError))
    prefix = read_prefix_file(file, form.ties, form.specs, form.most_tokens)
    largest = int(prefix.token_ids.max())
    if prefix.token_ids.min() < 0 or largest >= form.vocab_size:
        prefix.close()
        raise PrefixFileError(
            f"path={str(file)!r} holds token ids up to {largest}, and the vocabulary has {form.vocab_size}: save it "
            "anew"
        )
    return prefix


def enter_prefix(loaded: LoadedEngine, prefix: OpenPrefix, adapter_digest: str) -> bool:
    """Put what was checked into the cache; False where it has all of it already. Raises what `import_prefix` does, and
    PrefixFileError where the file has changed since it was checked; nothing of it has entered then."""
    num_tokens = len(prefix.token_ids)
    first_tokens = []
    for group in loaded.layout.groups:
        lengths = {prefix.lengths[layer] for layer in group.layers}
        if len(lengths) > 1:
            raise PrefixFileError(
                f"the layers {list(group.layers)} keep KV of equally many tokens, and the file has {sorted(lengths)}: "
                "save it anew"
            )
        first_tokens.append(num_tokens - lengths.pop())
    read_all = partial(prefix.each, in_threads=loaded.runner.device.type == "cpu")

    def write(moves: Sequence[PageMoves], pages: Sequence[PrefixPages]) -> None:
        write_prefix(loaded.runner, moves, pages, num_tokens, read_all)

    return loaded.manager.import_prefix(prefix.token_ids, root_salt(prefix.salt, adapter_digest), first_tokens, write)
