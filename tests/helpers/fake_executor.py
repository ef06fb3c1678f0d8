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


class FakeExecutor:
    """kinds: per group ("full", 0), ("sliding", W) or ("chunked", C)."""

    def __init__(self, layout: KVLayout, kinds: list[tuple[str, int]]) -> None:
        self.layout = layout
        self.kinds = kinds
        # Keyed by the unit of memory, shared by all groups: a page that two groups think is theirs is
        # overwritten, and noticed.
        self.memory: dict[int, tuple[int, int, list[bytes | None]]] = {}
        self.most_keys_checked = 0

    def _page(self, group: int, page: int) -> list[bytes | None]:
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
        page_tokens = self.layout.page_tokens
        for move in plan.moves:
            moved = [list(self._page(move.group, int(source))) for source in move.src_pages]
            for target, tags in zip(move.dst_pages, moved, strict=True):
                self._page(move.group, int(target))[:] = tags
        for group, part in enumerate(plan.groups):
            fresh = [list(self._page(group, int(source))) for source in part.copies.src_pages]
            for target, tags in zip(part.copies.dst_pages, fresh, strict=True):
                self._page(group, int(target))[:] = tags
        all_tags = [tags_of(salt, tokens) for salt, tokens in contexts]
        for index, (_, tokens) in enumerate(contexts):
            start, end = int(plan.query_start[index]), int(plan.query_start[index + 1])
            positions = plan.positions[start:end].tolist()
            assert plan.token_ids[start:end].tolist() == [tokens[position] for position in positions]
            assert positions[-1] + 1 == plan.seq_lens[index]
            for part_index, part in enumerate(plan.groups):
                for slot, position in zip(part.slot_mapping[start:end].tolist(), positions, strict=True):
                    assert slot >= 0
                    page = self._page(part_index, slot // page_tokens)
                    page[slot % page_tokens] = all_tags[index][position]
        for index in range(len(contexts)):
            for group, part in enumerate(plan.groups):
                self._check_reads(plan, index, group, part, all_tags[index])
        sampled = [next_token(all_tags[i][int(plan.seq_lens[i]) - 1]) for i in plan.sample_requests.tolist()]
        return StepResult(token_ids=np.array(sampled, dtype=np.int64), logprobs={})

    def _check_reads(self, plan: StepPlan, index: int, group: int, part, tags: list[bytes]) -> None:
        page_tokens = self.layout.page_tokens
        kind, size = self.kinds[group]
        first_block = int(part.first_blocks[index])
        seen: set[int] = set()
        for position in plan.positions[plan.query_start[index] : plan.query_start[index + 1]].tolist():
            seen.update(keys_seen(kind, size, position))
        seen = {key for key in seen if key >= part.first_keys[index]}
        for key in seen:
            page = int(part.block_tables[index, key // page_tokens - first_block])
            assert page >= 0, f"group {group}: key {key} is needed but its page is gone"
            tag = self._page(group, page)[key % page_tokens]
            assert tag == tags[key], f"group {group}: key {key} holds another token's KV"
        self.most_keys_checked = max(self.most_keys_checked, len(seen))
