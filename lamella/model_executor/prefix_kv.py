"""The KV of a prefix as tensors in the order of its tokens, out of pages and into pages, whatever their layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lamella.attention.metadata import to_device
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.prefix_transfers import PrefixPages
from lamella.model_executor.runner import ModelRunner

_RUN_PAGES = 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """K [num_tokens, num_kv_heads, k_dim] and V [num_tokens, num_kv_heads, v_dim] of one layer, of a prefix's last
    tokens, on the host: as integers as wide as KV's dtype, so that no bit changes on the way."""

    keys: torch.Tensor
    values: torch.Tensor


def layers_with_kv(layout: KVLayout) -> list[int]:
    """The layers that keep KV of their own."""
    return [layer for layer in range(len(layout.owners)) if not layout.is_shared(layer)]


def word_of(itemsize_bytes: int) -> torch.dtype:
    """The integers that KV of this width is passed on as."""
    return _WORDS[itemsize_bytes]


@torch.inference_mode()
def read_prefix(runner: ModelRunner, groups: Sequence[PrefixPages], num_tokens: int) -> dict[int, LayerTokens]:
    """What pages hold of a prefix of `num_tokens` tokens, by layer, from each group's first block on."""
    page_tokens, found = runner.layout.page_tokens, {}
    for layer in layers_with_kv(runner.layout):
        place = runner.places[layer]
        spec, part = place.params.spec, groups[place.group]
        length = max(0, num_tokens - part.first_block * page_tokens)
        page_ids = to_device(part.pages, runner.device)
        tensors = []
        for pages, dim in ((place.cache.keys, spec.k_dim), (place.cache.values, spec.v_dim)):
            tokens = _words(pages)[page_ids].reshape(-1, spec.num_kv_heads, dim)
            tensors.append(tokens[:length].contiguous().cpu())
        found[layer] = LayerTokens(*tensors)
    return found


@torch.inference_mode()
def write_prefix(
    runner: ModelRunner,
    moves: Sequence[PageMoves],
    groups: Sequence[PrefixPages],
    layers: Mapping[int, LayerTokens],
    num_tokens: int,
) -> None:
    """Make the moves, then fill the pages of a prefix of `num_tokens` tokens with `layers`, each of which begins at its
    group's first block or before. What the last block has beyond the prefix becomes zeros."""
    page_tokens = runner.layout.page_tokens
    runner.move_pages(moves)
    # Of each group, (the pages of a layer's K or V, what they are to hold: [num_tokens, num_kv_heads, dim]).
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in groups]
    for layer, given in layers.items():
        place = runner.places[layer]
        first_token = groups[place.group].first_block * page_tokens
        for pages, tokens in ((place.cache.keys, given.keys), (place.cache.values, given.values)):
            length = max(0, num_tokens - first_token)
            parts[place.group].append((_words(pages), tokens[len(tokens) - length :]))
    if runner.device.type == "cpu":
        _write_on_host(groups, parts, page_tokens)
        return
    for group, tensors in zip(groups, parts, strict=True):
        page_ids = to_device(group.pages, runner.device)
        for words, tokens in tensors if len(page_ids) else ():
            tokens = _whole_pages(tokens, page_tokens)
            words[page_ids] = tokens.reshape(-1, *words.shape[1:]).to(runner.device)


def _write_on_host(
    groups: Sequence[PrefixPages], parts: Sequence[list[tuple[torch.Tensor, torch.Tensor]]], page_tokens: int
) -> None:
    """Several threads write, each a run of pages in all layers at a time. Most of the work may be the system's, which
    finds memory for an arena that nobody has used yet; and a thread that is kept waiting holds up no other, as it would
    in torch's copies."""

    def write(group: int, start: int) -> None:
        page_ids = groups[group].pages[start : start + _RUN_PAGES]
        for words, tokens in parts[group]:
            run = tokens[start * page_tokens : (start + len(page_ids)) * page_tokens]
            words.numpy()[page_ids] = _whole_pages(run, page_tokens).numpy().reshape(-1, *words.shape[1:])

    runs = [(group, start) for group, each in enumerate(groups) for start in range(0, len(each.pages), _RUN_PAGES)]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done in [pool.submit(write, *run) for run in runs]:
            done.result()


def _whole_pages(tokens: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """The tokens, and zeros up to the end of their last page."""
    missing = -len(tokens) % page_tokens
    return torch.cat([tokens, tokens.new_zeros(missing, *tokens.shape[1:])]) if missing else tokens


def _words(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(_WORDS[pages.element_size()])
