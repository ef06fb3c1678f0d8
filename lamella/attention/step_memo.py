"""What a step's layers need not work out twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamella.attention.packed_keys import PackedKeys
from lamella.attention.torch_plans import DecodePlan, PrefillRequest, WriteTargets
from lamella.kv_cache.spec import KVCacheSpec
from lamella.native.attention import HeldBatch


@dataclass(slots=True, eq=False)
class StepMemo:
    """What backends found out from one AttentionMetadata, for the other layers that are given the same.

    Each metadata has a memo of its own, empty when it is made (also by `dataclasses.replace`). Nobody else holds it, so
    it goes when the step has run and its metadata is let go. A field is filled by the backend that it is named after,
    at the first layer that asks. An entry depends on nothing but the metadata and its key, and does not change once it
    is there. So a key names all of a layer that matters: the spec of what it sees, and where needed the number of its
    query heads and which requests are meant.
    """

    # The lowest and the highest slot, for `check_write` of torch and triton, whatever the size of the cache.
    slot_bounds: tuple[int, int] | None = None
    # Where new K and V go.
    torch_write: WriteTargets | None = None
    # Spec -> the pages that decodes read.
    torch_decode: dict[KVCacheSpec, DecodePlan] = field(default_factory=dict)
    # Spec, number of query heads -> the tiles of prefills.
    torch_prefill: dict[tuple[KVCacheSpec, int], tuple[PrefillRequest, ...]] = field(default_factory=dict)
    # Spec, number of query heads, first request, one past the last -> the tiles and addresses of these requests.
    native_batches: dict[tuple[KVCacheSpec, int, int, int], HeldBatch] = field(default_factory=dict)
    # Specs for which `check_tables` of triton has found that the block tables cover all that is seen.
    covered_specs: set[KVCacheSpec] = field(default_factory=set)
    # Spec -> where the keys are that decodes see: a WindowIndices. That class imports Triton, so it is not named here.
    triton_windows: dict[KVCacheSpec, object] = field(default_factory=dict)
    # Spec, range of requests -> the keys that are gathered, and their mask.
    xformers_packed: dict[tuple[KVCacheSpec, range], PackedKeys] = field(default_factory=dict)
    # Spec, pages per id -> the mask over pages in place, an object of xformers; None where there is none.
    xformers_paged: dict[tuple[KVCacheSpec, int], object] = field(default_factory=dict)
