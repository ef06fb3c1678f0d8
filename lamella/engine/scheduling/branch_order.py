"""In which order the branches of waiting prompts are visited: depth first, the longest cached prefix before others.

What is known of a branch is a *claim*: so many tokens of every prompt below it need not be computed. Claims come from

- arrival: what the cache had of a prompt when it was queued;
- starting: a request that starts puts its whole prompt in the cache, so each branch on the way to it is *opened*:
  claimed to its full depth. This makes the visit depth-first: those that share most with the request that has just
  started come next.

The branch with the largest claim is next, and in it the first request in depth-first order. As the cache evicts, a
claim can have become too large. So it is compared with the cache when its turn comes, and lowered if need be. As long
as the request that opened a branch runs, the claim is believed: the prefix may be only half computed, but nobody else
is to compute it.

Among equal claims the branch that was opened last is next, and of branches opened together the deepest. So a branch
whose prefix was lost is finished before another is begun. Of branches that were never opened the oldest is next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from lamella.engine.scheduling.request import NO_ROW, Request
from lamella.engine.scheduling.waiting_tree import Branch, WaitingTree
from lamella.kv_cache.prefix_match import PrefixMatch

_SPARE_ENTRIES = 64


class BranchOrder:
    """match: what the cache has of a request's prompt now.

    A claim is `num_cached` of a Branch (-1: none), `opened` (0: never) and `opener`. The cost of a call depends only on
    the length of the prompt; `next` also asks for one more match for each claim that turns out too large.
    """

    def __init__(self, match: Callable[[Request], PrefixMatch]) -> None:
        self._match = match
        self._tree = WaitingTree()
        self._num_opened = 0
        # A heap, the largest claim first. An entry is stale where its branch is gone or has another claim by now.
        self._claims: list[tuple[int, int, int, Branch]] = []

    def __len__(self) -> int:
        return len(self._tree)

    def add(self, request: Request, num_cached: int) -> None:
        """num_cached: tokens of its prompt that need not be computed."""
        branch = self._tree.add(request)
        while branch.parent is not None and branch.parent.depth >= num_cached:
            branch = branch.parent
        if num_cached > max(0, branch.num_cached):
            branch.opener = None
            self._claim(branch, num_cached)

    def discard(self, request: Request) -> None:
        """The request waits no more and did not start."""
        merged = self._tree.remove(request)
        if merged is not None and merged.branch.num_cached > merged.child.num_cached:
            merged.child.opened, merged.child.opener = merged.branch.opened, merged.branch.opener
            self._claim(merged.child, merged.branch.num_cached)

    def start(self, request: Request) -> None:
        """The request waits no more: its prompt is being computed."""
        path = []
        end = self._tree.branch_of(request)
        stays = len(end.requests) > 1 or end.children
        branch = end if stays else end.parent
        while branch is not None:
            path.append(branch)
            branch = branch.parent
        for branch in reversed(path):
            branch.opener = request
            if branch.num_cached < branch.depth or not branch.opened:
                self._num_opened += 1
                branch.opened = self._num_opened
                self._claim(branch, branch.depth)
        self.discard(request)

    def parting_tokens(self, request: Request) -> int:
        """How many first tokens the request's prompt has in common with the waiting one that parts from it last."""
        parent = self._tree.branch_of(request).parent
        return 0 if parent is None else parent.depth

    def next(self) -> tuple[Request, PrefixMatch]:
        """The request that is next, and what the cache has of its prompt. At least one must wait. It goes on waiting
        until `start` or `discard`."""
        while True:
            branch = self._largest_claim()
            request = self._tree.first(branch)
            match = self._match(request)
            if branch is None or (branch.opener is not None and branch.opener.row != NO_ROW):
                return request, match
            if match.num_tokens >= min(branch.num_cached, len(request.sought_token_ids) - 1):
                return request, match
            branch.opener = None
            if match.num_tokens or branch.opened:
                self._claim(branch, match.num_tokens)
            else:
                branch.num_cached = -1

    def _claim(self, branch: Branch, num_cached: int) -> None:
        branch.num_cached = num_cached
        heapq.heappush(self._claims, _entry(branch))
        if len(self._claims) > 2 * self._tree.num_branches + _SPARE_ENTRIES:
            self._claims = [_entry(branch) for branch in self._tree.branches() if branch.num_cached >= 0]
            heapq.heapify(self._claims)

    def _largest_claim(self) -> Branch | None:
        while self._claims:
            entry = self._claims[0]
            branch = entry[3]
            is_there = branch.requests or branch.children
            if is_there and entry[:2] == (-branch.num_cached, -branch.opened):
                return branch
            heapq.heappop(self._claims)
        return None


def _entry(branch: Branch) -> tuple[int, int, int, Branch]:
    return -branch.num_cached, -branch.opened, branch.index, branch
