"""Bytes of tensor storages that are alive, counted as they come and go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCounter(TorchDispatchMode):
    """Counts what operations make while it is entered. alive_bytes, peak_bytes: now, and the most there was, without
    what only waits for the garbage collector (Triton's interpreter leaves its arguments in cycles)."""

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = self.peak_bytes = 0
        self._alive: set[int] = set()  # addresses

    def __enter__(self) -> StorageCounter:
        gc.collect()
        gc.freeze()  # collecting costs little where only what is new is looked at
        super().__enter__()
        return self

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        gc.unfreeze()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in inputs | self._alive:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes:
            self._alive.add(address)
            self.alive_bytes += num_bytes
            weakref.finalize(storage, self._let_go, address, num_bytes)
            if self.alive_bytes > self.peak_bytes:
                gc.collect()
                self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._alive.discard(address)
        self.alive_bytes -= num_bytes


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class CountingMeter:
    """A memory meter over a StorageCounter that is entered: a device of `total` bytes, `foreign` of them others'."""

    def __init__(self, counter: StorageCounter, *, total: int, foreign: int) -> None:
        self._counter, self._total, self._foreign = counter, total, foreign

    def total_bytes(self) -> int:
        return self._total

    def free_bytes(self) -> int:
        return self._total - self._foreign - self.held_bytes()

    def held_bytes(self) -> int:
        gc.collect()
        return self._counter.alive_bytes

    def peak_bytes(self, run: Callable[[], object]) -> int:
        before = self._counter.peak_bytes = self.held_bytes()
        run()
        return self._counter.peak_bytes - before
