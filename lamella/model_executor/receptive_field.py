"""Which of a step's tokens each layer computes: those that a sampled or scored token, or KV that stays,
depends on.

Go down from the last layer. A layer's output is wanted for the tokens that the layer above takes in. The layer itself
must take in those tokens, for their queries, and two kinds of tokens for K and V: those whose page outlives the step,
and those in step pages that a wanted query sees. So only two things are left out: KV in step pages that nobody reads,
and outputs that lead to nothing. Pages that stay are whole, and what is computed has the same bits as without this.

A layer that reads another layer's KV takes in only the tokens whose output is wanted. What its queries see is computed
by the layer that owns the KV.
"""

from __future__ import annotations

import numpy as np

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.step_plan import StepPlan


class ReceptiveField:
    """attention_specs: what each layer sees; `layout` says whose KV it reads and where that lies."""

    def __init__(self, layout: KVLayout, attention_specs: list[KVCacheSpec]) -> None:
        self._specs = attention_specs
        self._owners = layout.owners
        self._groups = [layout.layer_address(layer)[0] for layer in range(len(layout.owners))]

    def needed_tokens(self, plan: StepPlan) -> dict[int, np.ndarray]:
        """Layer -> which tokens it takes in (int64, ascending); the number of layers -> which of them leave the last.

        A layer that is not in the result takes in all tokens. If a layer is in it, so are all layers above.
        """
        needed = np.zeros(len(plan.token_ids), dtype=bool)
        needed[plan.output_tokens] = True
        request_start = np.repeat(plan.query_start[:-1], np.diff(plan.query_start))
        seen_of: dict[int, np.ndarray] = {}  # layer that owns KV -> which tokens' KV is read, bool [T]
        tokens = {}
        for above in range(len(self._specs), -1, -1):
            if needed.all():
                break
            tokens[above] = needed.nonzero()[0]
            if above == 0:
                break
            layer = above - 1
            owner = self._owners[layer]
            seen = _seen(self._specs[layer], plan.positions, request_start, tokens[above])
            seen_of[owner] = seen | seen_of[owner] if owner in seen_of else seen
            if owner == layer:
                slots = plan.groups[self._groups[layer]].slot_mapping
                is_step_slot = slots >= plan.first_step_slot
                needed = needed | np.where(is_step_slot, seen_of[layer], slots >= 0)
        return tokens


def _seen(spec: KVCacheSpec, positions: np.ndarray, request_start: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Which new tokens (bool [T]) the tokens `queries` (int64 [n]) see. request_start: int64 [T], the first token of
    each one's request."""
    num_tokens = len(positions)
    num_before = positions[queries] - spec.first_visible_each(positions[queries])
    first = np.maximum(queries - num_before, request_start[queries])
    begin = np.bincount(first, minlength=num_tokens + 1)
    end = np.bincount(queries + 1, minlength=num_tokens + 1)
    is_seen: np.ndarray = np.cumsum(begin - end)[:num_tokens] > 0
    return is_seen
