"""Workers joined by torch.distributed, who sum what each has computed of a layer's output."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from lamella.errors import WorkerLostError

LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 600.0


class WorkerGroup:
    """One worker's view of the group; a `WorkerSum`. It is nobody's default process group, so that several engines can
    be in a process."""

    def __init__(self, group: Any, rank: int, num_workers: int, timeout: timedelta) -> None:
        """timeout: how long a sum waits for the others."""
        self.rank = rank
        self.num_workers = num_workers
        self._group = group
        self._options = AllgatherOptions()
        self._options.timeout = timeout

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """See WorkerSum. Every worker gets every part, and adds them in the order of ranks, in float32: so the bits
        depend on the number of workers alone, not on what else is in the batch or on who comes first, as they would
        with a ring that cuts the tensor into pieces. Raises WorkerLostError where a worker is gone, or has not come
        within the group's time."""
        parts = [torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(self.num_workers)]
        try:
            self._group.allgather([parts], [y.contiguous()], self._options).wait()
        except RuntimeError as error:
            raise WorkerLostError(f"a sum over {self.num_workers} workers was not completed: {error}") from error
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(y.dtype)


def join_group(
    folder: Path,
    rank: int,
    num_workers: int,
    *,
    device: torch.device,
    timeout_seconds: float,
    join_seconds: float = JOIN_SECONDS,
) -> WorkerGroup:
    """Meet the other workers of this machine by a file in `folder`, which all of them can write to, and nobody else.
    Connections are of the loopback interface. timeout_seconds: how long a sum waits for the others; join_seconds: the
    same for the meeting, before which they start. Raises WorkerLostError where not all come in time."""
    group: Any  # a backend as it is, which torch's type stubs do not take for a ProcessGroup
    timeout, joining = timedelta(seconds=timeout_seconds), timedelta(seconds=join_seconds)
    try:
        store = dist.FileStore(str(folder / "meeting"), num_workers)
        store.set_timeout(joining)
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            group = dist.ProcessGroupNCCL(store, rank, num_workers, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = joining
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            group = dist.ProcessGroupGloo(store, rank, num_workers, gloo)
    except RuntimeError as error:
        raise WorkerLostError(f"{num_workers} workers could not be joined: {error}") from error
    return WorkerGroup(group, rank, num_workers, timeout)
