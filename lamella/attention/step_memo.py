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

    Each metadata has one of its own, empty when it is made (also by `dataclasses.replace`). Nobody else holds it, so it
    goes when the step has run and its metadata is let go. A field is filled by the backend that it is named after, at
    the first layer that asks. An entry follows from the metadata and from its key alone, and does not change once it is
    there; so a key names all that counts of a layer: the spec of what it sees, and where it matters the number of its
    query heads and which of the requests are meant.
    """

    # check_write, of torch and triton: the lowest and the highest slot, for caches of any size.
    slot_bounds: tuple[int, int] | None = None
    # Where new K and V go.
    torch_write: WriteTargets | None = None
    # What is seen -> the pages that decodes read.
    torch_decode: dict[KVCacheSpec, DecodePlan] = field(default_factory=dict)
    # What is seen, query heads -> the tiles of prefills.
    torch_prefill: dict[tuple[KVCacheSpec, int], tuple[PrefillRequest, ...]] = field(default_factory=dict)
    # What is seen, query heads, first request, the one behind the last -> their tiles and addresses.
    native_batches: dict[tuple[KVCacheSpec, int, int, int], HeldBatch] = field(default_factory=dict)
    # check_tables, of triton: the block tables are known to cover what such layers see.
    covered_specs: set[KVCacheSpec] = field(default_factory=set)
    # What is seen -> where the keys are that decodes see. Its class imports Triton.
    triton_windows: dict[KVCacheSpec, object] = field(default_factory=dict)
    # What is seen, which requests -> the keys that are gathered, and their mask.
    xformers_packed: dict[tuple[KVCacheSpec, range], PackedKeys] = field(default_factory=dict)
    # What is seen, pages per id -> the mask over pages as they lie, None where there is none. Its class is xformers'.
    xformers_paged: dict[tuple[KVCacheSpec, int], object] = field(default_factory=dict)
