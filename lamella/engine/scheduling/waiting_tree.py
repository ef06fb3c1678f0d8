"""Waiting prompts as a prefix tree of their own: compressed, exact to the token.

    salt None ── "<bos> You are a" ─┬─ "poet." ── ...          a branch: tokens that all who wait below it share
                                    └─ "judge. Is" ─┬─ "a<b?"
                                                    └─ "c<d?"

Siblings differ in their first token, so the way down takes one dictionary look-up per branch. The cost of adding or
removing a prompt depends on the prompt's own length, not on how many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lamella.engine.scheduling.request import Request

Salt = str | None


@dataclass(slots=True, eq=False)
class Branch:
    """tokens: a whole prompt (int32) that passes here; the branch's own part of it is [parent's depth, depth).

    requests: those whose prompt ends here. children: by their first token. Both are oldest first; a child is as old as
    the first prompt that came by. The last three fields are BranchOrder's.
    """

    index: int  # branches are numbered as they are made, so the older of two has the lower one
    parent: Branch | None
    tokens: np.ndarray
    depth: int  # tokens from the root to the branch's end
    requests: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    children: OrderedDict[int, Branch] | None = None  # made with the first: most branches never have any
    num_cached: int = -1
    opened: int = 0
    opener: Request | None = None


class Merged(NamedTuple):
    """`branch` has been removed: its only child now holds its part of the prompts, too."""

    branch: Branch
    child: Branch


class WaitingTree:
    """One root for each salt: prompts of different salts share nothing."""

    def __init__(self) -> None:
        self._roots: OrderedDict[Salt, Branch] = OrderedDict()
        self._branch_of: dict[Request, Branch] = {}
        self._num_made = 0
        self.num_branches = 0

    def __len__(self) -> int:
        return len(self._branch_of)

    def branch_of(self, request: Request) -> Branch:
        """The branch that the request's prompt ends at."""
        return self._branch_of[request]

    def add(self, request: Request) -> Branch:
        """Returns the branch that the request's prompt ends at."""
        tokens = request.token_ids
        branch = self._roots.get(request.salt)
        if branch is None:
            branch = self._roots[request.salt] = self._make(None, tokens, 0)
        while branch.depth < len(tokens):
            first_token = int(tokens[branch.depth])
            if branch.children is None:
                branch.children = OrderedDict()
            child = branch.children.get(first_token)
            if child is None:
                child = branch.children[first_token] = self._make(branch, tokens, len(tokens))
            else:
                common = _common_depth(child, tokens, branch.depth)
                if common < child.depth:
                    child = self._split(child, common)
            branch = child
        branch.requests[request] = None
        self._branch_of[request] = branch
        return branch

    def remove(self, request: Request) -> Merged | None:
        """Forget a request, with the branches that only led to it."""
        branch = self._branch_of.pop(request)
        del branch.requests[request]
        if not branch.requests and not branch.children:
            parent = branch.parent
            self._forget(branch)
            if parent is None:
                del self._roots[request.salt]
                return None
            assert parent.children is not None
            del parent.children[int(branch.tokens[parent.depth])]
            branch = parent
        parent = branch.parent
        if parent is None:
            if not branch.requests and not branch.children:
                self._forget(branch)
                del self._roots[request.salt]
            return None
        if branch.requests or not branch.children or len(branch.children) > 1:
            return None
        _, child = branch.children.popitem()
        child.parent = parent
        assert parent.children is not None
        parent.children[int(child.tokens[parent.depth])] = child
        self._forget(branch)
        return Merged(branch, child)

    def first(self, branch: Branch | None) -> Request:
        """Of the requests that wait at or below `branch` (None: anywhere), the first in depth-first order: a prompt
        comes before those that go on from it, the oldest branch before its siblings."""
        if branch is None:
            branch = next(iter(self._roots.values()))
        while not branch.requests:
            assert branch.children is not None, "a branch leads to a prompt"
            branch = next(iter(branch.children.values()))
        return next(iter(branch.requests))

    def branches(self) -> Iterator[Branch]:
        """All, each before its children."""
        open_branches = list(self._roots.values())
        while open_branches:
            branch = open_branches.pop()
            yield branch
            open_branches += (branch.children or {}).values()

    def _make(self, parent: Branch | None, tokens: np.ndarray, depth: int) -> Branch:
        self._num_made += 1
        self.num_branches += 1
        return Branch(self._num_made, parent, tokens, depth)

    def _forget(self, branch: Branch) -> None:
        branch.parent = None
        self.num_branches -= 1

    def _split(self, branch: Branch, depth: int) -> Branch:
        """A new branch that ends at `depth`, inside `branch`, which goes on from there."""
        parent = branch.parent
        assert parent is not None
        assert parent.children is not None
        upper = self._make(parent, branch.tokens, depth)
        parent.children[int(branch.tokens[parent.depth])] = upper  # in the same place among its siblings
        upper.children = OrderedDict({int(branch.tokens[depth]): branch})
        branch.parent = upper
        return upper


def _common_depth(branch: Branch, tokens: np.ndarray, start: int) -> int:
    """Up to which depth a prompt agrees with the branch, which begins at `start`."""
    end = min(branch.depth, len(tokens))
    differs = branch.tokens[start:end] != tokens[start:end]
    parting = int(differs.argmax())
    return start + parting if differs[parting] else end
