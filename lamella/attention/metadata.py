"""What a step tells the attention of one group: who asks, how far each has come, where its pages are.

Built once per group and step, shared by all layers of the group. Everything is bounded by what the
group can see: a windowed group's tables hold the window's blocks, never the whole context.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from lamella.attention.step_memo import StepMemo
from lamella.errors import InvariantError
from lamella.kv_cache.spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One group's ragged batch of `R` requests and `T` new tokens.

    The first `num_decodes` requests have exactly one new token each; the others are prefills
    (one or more new tokens after any prior context). New token j of request i has position
    seq_lens[i] - query_lens[i] + j.

    block_tables: int64 [rows, width], the tables that device kernels read. Request i has line table_rows[i], and the
    page of its block b is in column (b - first_blocks[i]) % width; -1 is the null page (never read). On a device these
    are the tables of all rows, which stay from step to step: first_blocks is 0, and the lines of a windowed group wrap
    around. On a CPU they are the host's tables. A line covers every block that the request's queries can see.
    first_keys: int64 [R], the lowest position of request i that has KV in this group, 0 unless the request resumed
    without the keys of its window: a query at q sees only keys >= max(first_visible(q), first_keys[i]). Never above
    the first new position, so that each query sees itself at least.
    slot_mapping: int64 [T], page_id * page_tokens + offset of each new token, -1: write nowhere.
    *_host: NumPy arrays for code that must branch on them. block_tables_host is by request, int64 [R, width], and row i
    column j is the page of block first_blocks_host[i] + j; the others have the tensors' values.
    parts: results of of_tokens, by the bytes of its argument. memo: what backends work out from this metadata once and
    read again in the group's other layers. Both are empty when the metadata is made, and are let go with it.
    """

    page_tokens: int
    num_decodes: int
    query_start: torch.Tensor  # int64 [R + 1], prefix sum of query lengths
    seq_lens: torch.Tensor  # int64 [R], context length with this step's tokens
    table_rows: torch.Tensor  # int64 [R]
    first_blocks: torch.Tensor  # int64 [R]
    first_keys: torch.Tensor  # int64 [R]
    block_tables: torch.Tensor  # int64 [rows, width]
    slot_mapping: torch.Tensor  # int64 [T]
    query_start_host: np.ndarray
    seq_lens_host: np.ndarray
    first_blocks_host: np.ndarray
    first_keys_host: np.ndarray
    block_tables_host: np.ndarray
    parts: dict[bytes, AttentionMetadata] = field(default_factory=dict, init=False, compare=False, repr=False)
    memo: StepMemo = field(default_factory=StepMemo, init=False, compare=False, repr=False)

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens_host)

    def of_tokens(self, tokens: np.ndarray) -> AttentionMetadata:
        """The same context with only some of the new tokens (int64 [n], ascending): each run of neighbours in a request
        becomes a request of its own, which ends with the last of them. The same tokens give the same object again."""
        key = tokens.tobytes()
        found = self.parts.get(key)
        if found is None:
            request_of = np.searchsorted(self.query_start_host, tokens, side="right") - 1
            # The sum grows by exactly 1 from a token to the next one if no left-out token and no end of a request lies
            # between them.
            starts = np.flatnonzero(np.diff(tokens + request_of, prepend=-2) != 1)
            requests = request_of[starts]
            query_start = np.append(starts, len(tokens))
            num_behind = self.query_start_host[requests + 1] - 1 - tokens[query_start[1:] - 1]
            seq_lens = self.seq_lens_host[requests] - num_behind
            longer = np.flatnonzero(np.diff(query_start) > 1)
            device = self.seq_lens.device
            rows = to_device(requests, device)
            found = self.parts[key] = AttentionMetadata(
                page_tokens=self.page_tokens,
                num_decodes=int(longer[0]) if len(longer) else len(requests),
                query_start=to_device(query_start, device),
                seq_lens=to_device(seq_lens, device),
                table_rows=self.table_rows[rows],
                first_blocks=self.first_blocks[rows],
                first_keys=self.first_keys[rows],
                block_tables=self.block_tables,
                slot_mapping=self.slot_mapping[to_device(tokens, device)],
                query_start_host=query_start,
                seq_lens_host=seq_lens,
                first_blocks_host=self.first_blocks_host[requests],
                first_keys_host=self.first_keys_host[requests],
                block_tables_host=self.block_tables_host[requests],
            )
        return found

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_host[-1])


def require_covering_tables(
    spec: KVCacheSpec,
    *,
    page_tokens: int,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    first_blocks: np.ndarray,
    first_keys: np.ndarray,
) -> None:
    """Raise InvariantError where a block table starts above what its request's first query sees. The arrays are the
    host's, see AttentionMetadata. This is for kernels, which cannot raise themselves and would read another request's
    memory."""
    first_query = seq_lens - np.diff(query_start)
    first = np.maximum(spec.first_visible_each(first_query), first_keys)
    late = np.flatnonzero(first // page_tokens < first_blocks)
    if late.size:
        raise InvariantError(
            f"requests {late.tolist()} see keys below the first block of their tables; a table must cover every block "
            "from the first visible key on"
        )


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`. On a CPU it is a view; elsewhere a copy that nobody waits for, whose pinned
    source is freed when the copy is done."""
    host = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
