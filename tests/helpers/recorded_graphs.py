"""Graphs for a machine without any: a replay calls what was captured again, and holds it against the capture.

A CUDA graph repeats launches: their order, the addresses they read and what Python passed by value are those of the
capture. So whatever reaches a replay otherwise than through memory that the capture has seen is a fault. The metadata
inside a captured call is made of padding on the host, so what a kernel's launch takes from there shows as a wrong
result; other memory, other operations or other numbers are refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}


class _Trace(TorchDispatchMode):
    """operations: name, numbers, and the addresses and shapes of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._made: dict[int, torch.Tensor] = {}  # kept, so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert name not in WAITING, f"{name} waits for the device, which a capture cannot"
        operation: list[Any] = [name]
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                is_made = leaf.untyped_storage().data_ptr() in self._made
                operation.append((None if is_made else leaf.data_ptr(), tuple(leaf.shape), leaf.stride()))
            elif isinstance(leaf, (bool, int, float, str)):
                operation.append(leaf)
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in inputs:
                self._made[leaf.untyped_storage().data_ptr()] = leaf
        if name.startswith("aten.lift_fresh") and result.dim() == 0:  # a number that Python passes by value
            operation = [name, result.item()]
            self._made[result.untyped_storage().data_ptr()] = result
        self.operations.append(tuple(operation))
        return result


class RecordedGraphs:
    """num_replays: of each capture, in the order of the captures."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        index = len(self.num_replays)
        self.num_replays.append(0)
        with _Trace() as captured:
            run()

        def replay() -> None:
            self.num_replays[index] += 1
            with _Trace() as replayed:
                run()
            for number, (before, after) in enumerate(zip(captured.operations, replayed.operations, strict=True)):
                assert before == after, f"operation {number} was captured as {before} and is {after} now"

        return replay
