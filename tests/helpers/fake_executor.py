"""A model without arithmetic: KV contents are tags that name exactly which tokens led to them.

The tag of a position is a digest of the salt and all tokens up to it. Executing a step copies and
writes tags as a real runner does bytes, and every query checks each key that it may see. The next
token is a function of the last tag, so the whole generation can be foretold from the prompt alone.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lamella.kv_cache.layout import KVLayout
from lamella.model_executor.step_plan import StepPlan, StepResult

VOCAB = 50


def tags_of(salt: str | None, token_ids) -> list[bytes]:
    """One tag per position."""
    tag = repr(salt).encode()
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


class Entry:
    """KV of one position in all layers of one group: whose it is, and in which layers it is what it should be."""

    __slots__ = ("exact_layers", "tag")

    def __init__(self, tag: bytes, exact_layers: set[int]) -> None:
        self.tag = tag
        self.exact_layers = exact_layers


class FakeExecutor:
    """kinds: per group ("full", 0), ("sliding", W) or ("chunked", C).

    Where a query lacks a key that its layer should see (a replay), what comes out of that layer is inexact, and
    so is the KV of the layers above; a token must never be sampled from such a position.
    """

    def __init__(self, layout: KVLayout, kinds: list[tuple[str, int]]) -> None:
        self.layout = layout
        self.kinds = kinds
        self.group_of_layer = [layout.layer_address(layer)[0] for layer in range(len(layout.owners))]
        # Keyed by the unit of memory, shared by all groups: a page that two groups think is theirs is
        # overwritten, and noticed.
        self.memory: dict[int, tuple[int, int, list[Entry | None]]] = {}
        self.most_keys_checked = 0
        self.num_replayed_tokens = 0
        self.num_inexact_outputs = 0

    def _page(self, group: int, page: int) -> list[Entry | None]:
        units = range(page, page + self.layout.groups[group].page_units)
        owners = {id(self.memory.get(unit)) for unit in units}
        owner = self.memory.get(page)
        if owner is None or len(owners) > 1 or owner[:2] != (group, page):
            owner = (group, page, [None] * self.layout.page_tokens)
            for unit in units:
                self.memory[unit] = owner
        return owner[2]

    def execute(self, plan: StepPlan, contexts: list[tuple[str | None, list[int]]]) -> StepResult:
        """contexts: per request of the plan its salt and all its tokens so far."""
        for move in plan.moves:
            self._copy(move.group, move.src_pages, move.dst_pages)
        for group, part in enumerate(plan.groups):
            self._copy(group, part.copies.src_pages, part.copies.dst_pages)
        all_tags = [tags_of(salt, tokens) for salt, tokens in contexts]
        for index, (_, tokens) in enumerate(contexts):
            positions = self._positions(plan, index)
            start = int(plan.query_start[index])
            assert plan.token_ids[start : start + len(positions)].tolist() == [tokens[one] for one in positions]
            assert positions[-1] + 1 == plan.seq_lens[index]
            self._write(plan, index, all_tags[index])
        for index in range(len(contexts)):
            for group, part in enumerate(plan.groups):
                self._check_reads(plan, index, group, part, all_tags[index])
        self._check_exactness(plan, len(contexts))
        sampled = [next_token(all_tags[i][int(plan.seq_lens[i]) - 1]) for i in plan.sample_requests.tolist()]
        return StepResult(token_ids=np.array(sampled, dtype=np.int64), logprobs={})

    def _copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        fresh = [list(self._page(group, int(source))) for source in sources]
        for target, entries in zip(targets, fresh, strict=True):
            self._page(group, int(target))[:] = entries

    @staticmethod
    def _positions(plan: StepPlan, index: int) -> list[int]:
        return plan.positions[plan.query_start[index] : plan.query_start[index + 1]].tolist()

    def _write(self, plan: StepPlan, index: int, tags: list[bytes]) -> None:
        page_tokens = self.layout.page_tokens
        rows = slice(int(plan.query_start[index]), int(plan.query_start[index + 1]))
        num_unwritten = 0
        for group, part in enumerate(plan.groups):
            for slot, position in zip(part.slot_mapping[rows].tolist(), self._positions(plan, index), strict=True):
                if slot < 0:
                    assert self.kinds[group][0] == "full", "windowed KV is always written"
                    num_unwritten += 1
                else:
                    page = self._page(group, slot // page_tokens)
                    page[slot % page_tokens] = Entry(tags[position], set())
        self.num_replayed_tokens += num_unwritten

    def _entry(self, part, index: int, group: int, key: int) -> Entry:
        page = int(part.block_tables[index, key // self.layout.page_tokens - int(part.first_blocks[index])])
        assert page >= 0, f"group {group}: key {key} is needed but its page is gone"
        entry = self._page(group, page)[key % self.layout.page_tokens]
        assert entry is not None, f"group {group}: key {key} was never written"
        return entry

    def _check_reads(self, plan: StepPlan, index: int, group: int, part, tags: list[bytes]) -> None:
        seen: set[int] = set()
        for position in self._positions(plan, index):
            seen.update(keys_seen(*self.kinds[group], position))
        seen = {key for key in seen if key >= part.first_keys[index]}
        for key in seen:
            entry = self._entry(part, index, group, key)
            assert entry.tag == tags[key], f"group {group}: key {key} holds another token's KV"
        self.most_keys_checked = max(self.most_keys_checked, len(seen))

    def _check_exactness(self, plan: StepPlan, num_requests: int) -> None:
        """Layer by layer, as the model runs."""
        exact = [dict.fromkeys(self._positions(plan, index), True) for index in range(num_requests)]
        for layer, group in enumerate(self.group_of_layer):
            part = plan.groups[group]
            page_tokens = self.layout.page_tokens
            for index, of_position in enumerate(exact):
                start = int(plan.query_start[index])
                for offset, is_exact in enumerate(of_position.values()):
                    slot = int(part.slot_mapping[start + offset])
                    if slot >= 0 and is_exact:
                        entry = self._page(group, slot // page_tokens)[slot % page_tokens]
                        assert entry is not None
                        entry.exact_layers.add(layer)
            for index, of_position in enumerate(exact):
                first_key = int(part.first_keys[index])
                bad = {
                    key
                    for key in {key for one in of_position for key in keys_seen(*self.kinds[group], one)}
                    if key < first_key or layer not in self._entry(part, index, group, key).exact_layers
                }
                for position in of_position:
                    if bad and not bad.isdisjoint(keys_seen(*self.kinds[group], position)):
                        of_position[position] = False
        for index in plan.sample_requests.tolist():
            assert exact[index][int(plan.seq_lens[index]) - 1], "a token is sampled from an inexact position"
        self.num_inexact_outputs += sum(not one for of_position in exact for one in of_position.values())
