"""A model without arithmetic: KV contents are tags that name exactly which tokens led to them.

The tag of a position is a digest of the salt and all tokens up to it. Executing a step copies and
writes tags as a real runner does bytes, layer by layer, for the tokens that the layer must compute, and every query
checks each key that it may see. The next token is a function of the last tag, so the whole generation can be foretold
from the prompt alone.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.step_memory import GroupPlan
from lamella.model_executor.receptive_field import ReceptiveField
from lamella.model_executor.step_plan import StepPlan, StepResult

VOCAB = 50


def tags_of(salt: str | None, token_ids, after: bytes = b"") -> list[bytes]:
    """One tag per position. after: the tag of the position before the first, where that is not 0."""
    tag = after or repr(salt).encode()
    tags = []
    for token in token_ids:
        tag = hashlib.blake2b(tag + int(token).to_bytes(4, "little"), digest_size=8).digest()
        tags.append(tag)
    return tags


def next_token(tag: bytes) -> int:
    return tag[0] % VOCAB


def foretell(salt: str | None, prompt, num_tokens: int) -> list[int]:
    """The tokens that greedy generation must give."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tags_of(salt, tokens)[-1]))
    return tokens[len(prompt) :]


def keys_seen(kind: str, size: int, position: int) -> range:
    """Which keys a query sees, straight from the definitions."""
    if kind == "full":
        return range(position + 1)
    if kind == "sliding":
        return range(max(0, position - (size - 1)), position + 1)
    return range(position - position % size, position + 1)


class Entry(NamedTuple):
    """KV of one position in one layer: whose it is, and whether it is what it should be."""

    tag: bytes
    is_exact: bool


class LayerPage:
    """One block in one layer."""

    __slots__ = ("address", "entries")

    def __init__(self, address: tuple[int, int], num_entries: int) -> None:
        self.address = address  # layer that keeps the KV, page id
        self.entries: list[Entry | None] = [None] * num_entries


class FakeExecutor:
    """kinds: per group ("full", 0), ("sliding", W) or ("chunked", C). num_slabs: of the arena; what lies behind
    them is for the time of a step. None: nothing lies there.

    Where a query lacks a key that its layer should see (a replay), what comes out of that layer is inexact, and
    so is the KV of the layers above; a token must never be sampled from such a position.

    prunes: layers compute only the tokens that they must. False: all.
    """

    def __init__(self, layout: KVLayout, kinds: list[tuple[str, int]], num_slabs: int | None = None) -> None:
        self.layout = layout
        self.kinds = kinds
        self._first_step_unit = None if num_slabs is None else num_slabs * layout.slab_units
        self._num_layers = len(layout.owners)
        self._groups = [layout.layer_address(layer)[0] for layer in range(self._num_layers)]
        self._receptive_field = ReceptiveField(layout, [layout.groups[group].spec for group in self._groups])
        # Units from the page's address to the layer's part, and how many that has.
        self._offsets = [layout.layer_address(layer)[1] // layout.unit_bytes for layer in range(self._num_layers)]
        self._units = [
            layout.page_tokens * layout.groups[group].spec.token_bytes // layout.unit_bytes for group in self._groups
        ]
        # Keyed by the unit of memory, shared by all layers of all groups: a place that two think is theirs is
        # overwritten, and noticed.
        self.memory: dict[int, LayerPage] = {}
        self.prunes = True
        self.most_keys_checked = 0
        self.num_replayed_tokens = 0
        self.num_inexact_outputs = 0
        self.num_step_page_tokens = 0
        self.num_unwritten_entries = 0  # KV in step pages that nobody needed, over all layers

    def _entries(self, layer: int, page: int) -> list[Entry | None]:
        """Of one block in an owner's layer. Where another wrote since, nothing is left."""
        first = page + self._offsets[layer]
        address = (layer, page)
        found = self.memory.get(first)
        units = range(first, first + self._units[layer])
        if found is None or found.address != address or any(self.memory.get(unit) is not found for unit in units):
            found = LayerPage(address, self.layout.page_tokens)
            for unit in units:
                self.memory[unit] = found
        return found.entries

    def execute(self, plan: StepPlan, contexts: list[tuple[str | None, list[int]]]) -> StepResult:
        """contexts: per request of the plan its salt and all its tokens so far."""
        for move in plan.moves:
            self._copy(move.group, move.src_pages, move.dst_pages)
        for group, part in enumerate(plan.groups):
            self._copy(group, part.copies.src_pages, part.copies.dst_pages)
        all_tags = [tags_of(salt, tokens) for salt, tokens in contexts]
        all_positions = [self._positions(plan, index) for index in range(len(contexts))]
        for index, (_, tokens) in enumerate(contexts):
            positions, start = all_positions[index], int(plan.query_start[index])
            assert plan.token_ids[start : start + len(positions)].tolist() == [tokens[one] for one in positions]
            assert positions[-1] + 1 == plan.seq_lens[index]
        self._count(plan)
        needed_tokens = self._receptive_field.needed_tokens(plan) if self.prunes else {}
        exact = [dict.fromkeys(positions, True) for positions in all_positions]
        exact = self._of_tokens(plan, exact, needed_tokens.get(0))
        for layer in range(self._num_layers):
            for index, of_position in enumerate(exact):
                if self.layout.owners[layer] == layer:
                    self._write(plan, layer, index, of_position, all_tags[index])
            exact = self._of_tokens(plan, exact, needed_tokens.get(layer + 1))
            for index, of_position in enumerate(exact):
                self._read(plan, layer, index, of_position, all_tags[index])
                self.num_inexact_outputs += sum(not one for one in of_position.values())
        sampled = [
            (index, int(plan.seq_lens[index]) - behind)
            for index, count in enumerate(plan.num_sampled.tolist())
            for behind in range(count, 0, -1)
        ]
        for index, position in sampled:
            assert exact[index].get(position), "a token is sampled from a position that is inexact, or was not computed"
        if self._first_step_unit is not None:
            for unit in [unit for unit in self.memory if unit >= self._first_step_unit]:
                del self.memory[unit]
        token_ids = [next_token(all_tags[index][position]) for index, position in sampled]
        return StepResult(token_ids=np.array(token_ids, dtype=np.int64), logprobs={})

    def _copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        for layer in self.layout.groups[group].layers:
            fresh = [list(self._entries(layer, int(source))) for source in sources]
            for target, entries in zip(targets, fresh, strict=True):
                self._entries(layer, int(target))[:] = entries

    @staticmethod
    def _positions(plan: StepPlan, index: int) -> list[int]:
        return plan.positions[plan.query_start[index] : plan.query_start[index + 1]].tolist()

    @staticmethod
    def _of_tokens(plan: StepPlan, exact: list[dict[int, bool]], tokens: np.ndarray | None) -> list[dict[int, bool]]:
        """What is left of `exact` when only these tokens go on (None: all)."""
        if tokens is None:
            return exact
        left: list[dict[int, bool]] = [{} for _ in exact]
        for token in tokens.tolist():
            index = int(np.searchsorted(plan.query_start, token, side="right")) - 1
            position = int(plan.positions[token])
            left[index][position] = exact[index][position]
        return left

    def _count(self, plan: StepPlan) -> None:
        for group, part in enumerate(plan.groups):
            is_unwritten = part.slot_mapping < 0
            assert self.kinds[group][0] == "full" or not is_unwritten.any(), "windowed KV is always written"
            self.num_replayed_tokens += int(is_unwritten.sum())
            if self._first_step_unit is not None:
                pages = part.slot_mapping // self.layout.page_tokens
                self.num_step_page_tokens += int((pages >= self._first_step_unit).sum())

    def _write(self, plan: StepPlan, layer: int, index: int, exact: dict[int, bool], tags: list[bytes]) -> None:
        page_tokens = self.layout.page_tokens
        rows = slice(int(plan.query_start[index]), int(plan.query_start[index + 1]))
        slots = plan.groups[self._groups[layer]].slot_mapping[rows].tolist()
        for slot, position in zip(slots, plan.positions[rows].tolist(), strict=True):
            if slot < 0:
                continue
            if position in exact:
                entry = Entry(tags[position], exact[position])
                self._entries(layer, slot // page_tokens)[slot % page_tokens] = entry
                continue
            assert slot >= plan.first_step_slot, f"layer {layer}: a page that stays lacks position {position}"
            self._entries(layer, slot // page_tokens)[slot % page_tokens] = None  # what was there might pass for it
            self.num_unwritten_entries += 1

    def _read(self, plan: StepPlan, layer: int, index: int, exact: dict[int, bool], tags: list[bytes]) -> None:
        """Each query checks all that it sees; `exact` (position -> whether) becomes what comes out of the layer."""
        group, owner, page_tokens = self._groups[layer], self.layout.owners[layer], self.layout.page_tokens
        part: GroupPlan = plan.groups[group]
        first_key, first_block = int(part.first_keys[index]), int(part.first_blocks[index])
        views = {position: keys_seen(*self.kinds[group], position) for position in exact}
        table = part.block_tables[index].tolist()
        bad: set[int] = set()
        seen: set[int] = set()
        for view in views.values():
            seen.update(view)
        num_checked = 0
        for key in seen:
            if key < first_key:
                bad.add(key)
                continue
            num_checked += 1
            page = table[key // page_tokens - first_block]
            assert page >= 0, f"layer {layer}: key {key} is needed but its page is gone"
            entry = self._entries(owner, page)[key % page_tokens]
            assert entry is not None, f"layer {layer}: key {key} was never written, or written over"
            assert entry.tag == tags[key], f"layer {layer}: key {key} holds another token's KV"
            if not entry.is_exact:
                bad.add(key)
        self.most_keys_checked = max(self.most_keys_checked, num_checked)
        for position, view in views.items():
            if bad and not bad.isdisjoint(view):
                exact[position] = False
