"""Which of several engines runs a prompt, so that prompts that begin alike meet in one cache. Pure: no processes here.

Two cases. Of a queue that is known, whole subtrees of the prompts' tree are dealt out, by how much work they are
(`deal_subtrees`). A prompt that comes alone goes where prompts with the same first blocks went (`PrefixRouter`), by
consistent hashing with bounded loads (arXiv 1608.01350): no engine gets more than a factor of the mean.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamella.errors import ConfigError

_POINTS_PER_REPLICA = 64  # of the ring
_MOST_PREFIXES = 1 << 16  # whose engine is remembered
# Of a fair share of the work: a subtree of more is taken apart, if it can be, and small ones with a common beginning
# stay together up to so much.
_MOST_WHOLE = 0.5
_MOST_TOGETHER = 0.25


class PrefixRouter:
    """key_tokens: prompts are alike if so many first tokens are (fewer where a prompt has fewer), and their salts.
    most_load: how much more than the mean load a replica may have, as a factor, at least 1.

    ConfigError for numbers out of range.
    """

    def __init__(self, num_replicas: int, *, key_tokens: int, most_load: float = 1.25) -> None:
        if num_replicas < 1 or key_tokens < 1 or not most_load >= 1:
            raise ConfigError(
                f"num_replicas={num_replicas}, key_tokens={key_tokens}, most_load={most_load}: give at least 1 of each"
            )
        self.num_replicas = num_replicas
        self._key_tokens = key_tokens
        self._most_load = most_load
        points = sorted(
            (_hash(f"{replica}/{point}".encode()), replica)
            for replica in range(num_replicas)
            for point in range(_POINTS_PER_REPLICA)
        )
        self._points = [point for point, _ in points]
        self._replicas = [replica for _, replica in points]
        self._last: OrderedDict[int, int] = OrderedDict()  # key -> the replica that a prompt with it went to last

    def key(self, token_ids: Sequence[int] | np.ndarray, salt: str | None = None) -> int:
        tokens = np.asarray(token_ids[: self._key_tokens], dtype=np.int32)
        return _hash(tokens.tobytes() + b"/" + (salt or "").encode())

    def choose(self, key: int, loads: Sequence[float], work: float = 1.0) -> int:
        """The replica for a prompt of this key. loads: each replica's; infinite where it takes none. work: what the
        prompt adds to the load. Not all may be infinite."""
        open_loads = [load for load in loads if load != float("inf")]
        # In whole prompts, so that the first few do not go round the ring.
        most = self._most_load * (sum(open_loads) + work) / len(open_loads) + work
        last = self._last.get(key)
        if last is not None and loads[last] + work <= most:
            self.remember(key, last)
            return last
        start = bisect.bisect_left(self._points, key)
        for offset in range(len(self._points)):
            replica = self._replicas[(start + offset) % len(self._points)]
            if loads[replica] + work <= most:
                self.remember(key, replica)
                return replica
        replica = min(range(self.num_replicas), key=loads.__getitem__)  # the mean is at least the smallest
        self.remember(key, replica)
        return replica

    def remember(self, key: int, replica: int) -> None:
        """Prompts of this key have gone to the replica."""
        self._last[key] = replica
        self._last.move_to_end(key)
        if len(self._last) > _MOST_PREFIXES:
            self._last.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica has lost its cache."""
        for key in [key for key, last in self._last.items() if last == replica]:
            del self._last[key]


@dataclass(frozen=True, slots=True)
class _Subtree:
    """The prompts [start, stop) of the sorted order, which have their first `depth` tokens alike."""

    start: int
    stop: int
    depth: int


def deal_subtrees(
    prompts: Sequence[np.ndarray], output_works: Sequence[float], loads: Sequence[float]
) -> tuple[list[list[int]], list[float]]:
    """Deal prompts (int32 [n] each) out to replicas with these loads: (which prompts each gets, in the order in which
    those that begin alike are neighbours; the loads after that).

    output_works: what each prompt's output is expected to take, in tokens; its prompt takes those that it does not
    share with the one before it. A subtree goes to one replica whole, the largest first, each to the one with the least
    load; one that is too large for a fair share is taken apart at its next fork. Infinite loads take nothing.
    """
    open_replicas = [replica for replica, load in enumerate(loads) if load != float("inf")]
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].astype(">i4").tobytes())
    common = [_common_tokens(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)]
    new_tokens = [len(prompts[index]) - shared for index, shared in zip(order, [0, *common], strict=False)]
    works = [tokens + output_works[index] for index, tokens in zip(order, new_tokens, strict=True)]
    sums = np.concatenate(([0.0], np.cumsum(works)))

    def work_of(subtree: _Subtree) -> float:
        return float(sums[subtree.stop] - sums[subtree.start])

    fair = (float(sums[-1]) + sum(loads[replica] for replica in open_replicas)) / max(1, len(open_replicas))
    pending = [_Subtree(0, len(order), 0)] if order else []
    whole: list[_Subtree] = []
    while pending:
        subtree = pending.pop()
        if subtree.stop - subtree.start == 1 or (subtree.depth > 0 and work_of(subtree) <= fair * _MOST_WHOLE):
            whole.append(subtree)
            continue
        inner = common[subtree.start : subtree.stop - 1]
        depth = min(inner)
        cuts = [subtree.start + place + 1 for place, length in enumerate(inner) if length == depth]
        edges = [subtree.start, *cuts, subtree.stop]
        # Children that have something in common go together, as far as they are a small share.
        most_work = fair * _MOST_TOGETHER if depth > 0 else 0.0
        for start, stop in _pieces(edges, sums, most_work):
            own = common[start : stop - 1]
            is_leafy = bool(own) and min(own) == depth
            part = _Subtree(start, stop, min(own) if own else depth + 1)
            (whole if is_leafy else pending).append(part)
    heap = [(loads[replica], replica) for replica in open_replicas]
    heapq.heapify(heap)
    dealt: list[list[_Subtree]] = [[] for _ in loads]
    for subtree in sorted(whole, key=lambda each: (-work_of(each), each.start)):
        load, replica = heapq.heappop(heap)
        dealt[replica].append(subtree)
        heapq.heappush(heap, (load + work_of(subtree), replica))
    after = list(loads)
    for load, replica in heap:
        after[replica] = load
    places = [
        [order[place] for each in sorted(own, key=lambda one: one.start) for place in range(each.start, each.stop)]
        for own in dealt
    ]
    return places, after


def _pieces(edges: list[int], sums: np.ndarray, most_work: float) -> list[tuple[int, int]]:
    """Neighbouring children, as many together as are at most so much work; a larger one by itself."""
    found: list[tuple[int, int]] = []
    start = edges[0]
    for low, high in itertools.pairwise(edges):
        if low > start and sums[high] - sums[start] > most_work:
            found.append((start, low))
            start = low
    found.append((start, edges[-1]))
    return found


def _common_tokens(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
