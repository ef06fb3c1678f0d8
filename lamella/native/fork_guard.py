"""What a forked child must be told: the threads that kernels run on did not come along.

fork copies the memory of a process and one of its threads. OpenMP's pool then believes in workers that do not exist,
and the first parallel loop waits for them for ever, in lamella's kernels and in torch's. Nothing can repair that in the
child, so whatever could reach such a loop asks here first.
"""

from __future__ import annotations

import os

from lamella.errors import ForkedProcessError


class ForkGuard:
    """Armed by whatever loads kernels or a model; a process that is forked afterwards has `has_forked` set."""

    __slots__ = ("_is_armed", "has_forked")

    def __init__(self) -> None:
        self.has_forked = False
        self._is_armed = False

    def arm(self) -> None:
        """From now on, mark processes that are forked from this one. Those forked before are free to load."""
        if not self._is_armed and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._mark)
            self._is_armed = True

    def _mark(self) -> None:
        self.has_forked = True  # raising here would do nothing: Python only prints what such a hook raises

    def check(self) -> None:
        """Raise ForkedProcessError in a child of a process that had loaded something."""
        if self.has_forked:
            raise ForkedProcessError(
                "this process was forked after lamella had loaded kernels or a model: the threads that they run on "
                'were not copied, and the first step would wait for them for ever; use "spawn" '
                '(multiprocessing.get_context("spawn")), or fork before anything is loaded'
            )


# The one piece of state that belongs to the process: what it says is true of the process, not of any engine in it.
FORK_GUARD = ForkGuard()
