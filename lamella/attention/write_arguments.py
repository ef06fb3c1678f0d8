"""Checks of what is handed to `write_kv`: a wrong slot is another request's KV, or nobody's memory."""

from __future__ import annotations

import torch

from lamella.attention.contract import LayerCache
from lamella.attention.metadata import AttentionMetadata
from lamella.errors import InvariantError


def check_write(cache: LayerCache, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
    """For backends with token-major pages: raise InvariantError unless there is one slot, one key and one value for
    each token, of the cache's shape. Slots on a CPU must be -1 or lie in the cache; elsewhere looking at them would
    wait for the device."""
    slots, num_tokens = metadata.slot_mapping, len(key)
    _, page_tokens, num_kv_heads, k_dim = cache.keys.shape
    for name, rows, dim in (("key", key, k_dim), ("value", value, cache.values.shape[3])):
        if tuple(rows.shape) != (num_tokens, num_kv_heads, dim):
            raise InvariantError(
                f"{name} has shape {list(rows.shape)}; {num_tokens} keys take [{num_tokens}, {num_kv_heads}, {dim}]"
            )
    if slots.dtype is not torch.int64 or tuple(slots.shape) != (num_tokens,):
        raise InvariantError(
            f"slot_mapping is {slots.dtype} {list(slots.shape)}; {num_tokens} tokens take int64 [{num_tokens}]"
        )
    if page_tokens != metadata.page_tokens:
        raise InvariantError(f"slots count pages of {metadata.page_tokens} tokens; the cache has {page_tokens} a page")
    stop = cache.keys.shape[0] * page_tokens
    if slots.device.type == "cpu" and num_tokens:
        bounds = metadata.memo.slot_bounds
        if bounds is None:
            least, most = slots.aminmax()
            bounds = metadata.memo.slot_bounds = int(least), int(most)
        lowest, highest = bounds
        if lowest < -1 or highest >= stop:
            raise InvariantError(
                f"slot_mapping holds {lowest if lowest < -1 else highest}; a slot must lie in [-1, {stop})"
            )
