"""The KV of a prefix as tensors in the order of its tokens, out of pages and into pages, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lamella.attention.metadata import to_device
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.prefix_transfers import PrefixPages
from lamella.model_executor.runner import ModelRunner

# Takes a layer, "keys" or "values", the place in the prefix of the first token, and words [n, num_kv_heads, dim], which
# hold until it returns.
TakeTokens = Callable[[int, str, int, torch.Tensor], None]

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
    num_tokens: int,
    read_all: Callable[[TakeTokens], None],
) -> None:
    """Make the moves, then fill the pages of a prefix of `num_tokens` tokens with what `read_all` gives: of each layer
    all tokens from its group's first block on, and perhaps some before. What the last block has beyond the prefix
    becomes zeros."""
    page_tokens = runner.layout.page_tokens
    runner.move_pages(moves)

    def write(layer: int, name: str, position: int, tokens: torch.Tensor) -> None:
        cache, part = runner.places[layer].cache, groups[runner.places[layer].group]
        missing = max(0, min(len(tokens), part.first_block * page_tokens - position))
        words = _words(cache.keys if name == "keys" else cache.values)
        _write_tokens(words, part, page_tokens, position + missing, tokens[missing:])

    read_all(write)
    rest = -num_tokens % page_tokens
    for layer in layers_with_kv(runner.layout) if rest else ():
        place = runner.places[layer]
        if len(groups[place.group].pages):
            for pages in (place.cache.keys, place.cache.values):
                zeros = torch.zeros(rest, *_dims_of_token(pages, page_tokens), dtype=word_of(pages.element_size()))
                _write_tokens(_words(pages), groups[place.group], page_tokens, num_tokens, zeros)


def _write_tokens(
    words: torch.Tensor, part: PrefixPages, page_tokens: int, position: int, tokens: torch.Tensor
) -> None:
    """Put the tokens (from `position` of the prefix on) into their pages."""
    whole = range(-(-position // page_tokens), (position + len(tokens)) // page_tokens)
    if not whole:
        _write_slots(words, part, page_tokens, position, tokens)
        return
    before, behind = whole.start * page_tokens - position, whole.stop * page_tokens - position
    _write_slots(words, part, page_tokens, position, tokens[:before])
    page_ids = part.pages[whole.start - part.first_block : whole.stop - part.first_block]
    _assign(words, (page_ids,), tokens[before:behind])
    _write_slots(words, part, page_tokens, position + behind, tokens[behind:])


def _write_slots(words: torch.Tensor, part: PrefixPages, page_tokens: int, position: int, tokens: torch.Tensor) -> None:
    """The same for parts of pages."""
    if len(tokens):
        blocks, slots = np.divmod(np.arange(position, position + len(tokens)), page_tokens)
        within_page = np.unravel_index(slots, _token_dims(words, page_tokens))
        _assign(words, (part.pages[blocks - part.first_block], *within_page), tokens)


def _assign(words: torch.Tensor, places: tuple[np.ndarray, ...], tokens: torch.Tensor) -> None:
    tokens = tokens.reshape(-1, *words.shape[len(places) :])
    if words.device.type == "cpu":  # by NumPy: a thread that is kept waiting holds up no other, as in torch's copies
        words.numpy()[places] = tokens.numpy()
    else:
        words[tuple(to_device(place, words.device) for place in places)] = tokens.to(words.device)


def _token_dims(pages: torch.Tensor, page_tokens: int) -> tuple[int, ...]:
    """The dimensions that a page's tokens are arranged in: of panels and within one, where there are panels."""
    count = 2 if pages.shape[1] == page_tokens else 3
    return tuple(pages.shape[1:count])


def _dims_of_token(pages: torch.Tensor, page_tokens: int) -> tuple[int, ...]:
    return tuple(pages.shape[1 + len(_token_dims(pages, page_tokens)) :])


def _words(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(_WORDS[pages.element_size()])
