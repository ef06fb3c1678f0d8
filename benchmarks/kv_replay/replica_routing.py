"""Which of several replicas a request goes to: the policies that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lamella.distributed.prefix_routing import PrefixRouter, deal_subtrees

PREFIX, ROUND_ROBIN, LEAST_LOADED, SUBTREES = "prefix", "round-robin", "least-loaded", "subtrees"
POLICIES = (PREFIX, ROUND_ROBIN, LEAST_LOADED, SUBTREES)


class Router(Protocol):
    def choose(self, request_id: str, prompt: np.ndarray, loads: Sequence[float], work: float) -> int:
        """The replica for this prompt, int32 [n]. loads: tokens of all requests that each has not answered; work: what
        this one adds."""


class PrefixRouting:
    """As an engine of several replicas does it."""

    def __init__(self, num_replicas: int, key_tokens: int) -> None:
        self._router = PrefixRouter(num_replicas, key_tokens=key_tokens)

    def choose(self, request_id: str, prompt: np.ndarray, loads: Sequence[float], work: float) -> int:
        return self._router.choose(self._router.key(prompt), loads, work)


class RoundRobin:
    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request_id: str, prompt: np.ndarray, loads: Sequence[float], work: float) -> int:
        self._num_chosen += 1
        return (self._num_chosen - 1) % len(loads)


class LeastLoaded:
    """The first of those with the least."""

    def choose(self, request_id: str, prompt: np.ndarray, loads: Sequence[float], work: float) -> int:
        return min(range(len(loads)), key=loads.__getitem__)


class Dealt:
    """Requests that are all known before the first is sent: subtrees of their prompts' tree."""

    def __init__(
        self, num_replicas: int, request_ids: Sequence[str], prompts: Sequence[np.ndarray], outputs: Sequence[int]
    ) -> None:
        dealt, _ = deal_subtrees(prompts, [float(count) for count in outputs], [0.0] * num_replicas)
        self.replica_of = {request_ids[place]: replica for replica, own in enumerate(dealt) for place in own}
        self.order = [request_ids[place] for own in dealt for place in own]

    def choose(self, request_id: str, prompt: np.ndarray, loads: Sequence[float], work: float) -> int:
        return self.replica_of[request_id]
