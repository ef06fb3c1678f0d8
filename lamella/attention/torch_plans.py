"""What the torch backend works out from a step's metadata, as values: where new KV goes, which pages and tiles are
read. A group's layers share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WriteTargets:
    """tokens: int64 [n], the tokens that have a slot; None: all have one. For each of them, page_ids has its page and
    offsets its place in the page."""

    tokens: torch.Tensor | None
    page_ids: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int64 [n]


@dataclass(frozen=True, slots=True)
class Piece:
    """The same range of pages of every request of a batch, request by request."""

    page_ids: torch.Tensor  # int64 [num_requests * num_pages]
    num_tokens: int  # per request
    hidden_rows: torch.Tensor  # int64: rows of [num_requests * num_tokens] that hold nothing the query sees


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows [start, stop) of the plan's order: requests with the same number of pages, rounded up."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    hidden: torch.Tensor  # bool [num_requests, 1, num_tokens], of all pieces


@dataclass(frozen=True, slots=True)
class DecodePlan:
    order: torch.Tensor  # int64 [num_decodes], the rows in the order of the batches
    rank: torch.Tensor  # int64 [num_decodes], where each row is in `order`
    batches: tuple[DecodeBatch, ...]
    max_pages: int  # most pages of a piece, those of all its requests together


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries [start, stop) of a request's new tokens against keys [first_key, stop_key) of its gathered rows."""

    start: int
    stop: int
    first_key: int
    stop_key: int
    left: torch.Tensor | None  # bool [queries, 1, width]: hidden among the band's first `width` keys
    right: torch.Tensor | None  # bool [queries, 1, queries]: hidden among the tile's own keys


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Rows [start, stop) of the prefill queries, and the pages from the first key that they see."""

    start: int
    stop: int
    first_position: int  # of the first query
    lowest_key: int  # lowest position that has KV
    page_ids: torch.Tensor  # int64 [num_pages]
    base: int  # position of the first page's first token
    tiles: tuple[QueryTile, ...]
