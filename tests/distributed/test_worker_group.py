"""Sums over workers: in one order, whatever comes with a row; and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lamella.distributed.worker_group import WorkerGroup, join_group
from lamella.errors import WorkerLostError

CPU = torch.device("cpu")


def joined(folder: Path, num_workers: int, timeout_seconds: float = 30.0) -> list[WorkerGroup]:
    with ThreadPoolExecutor(num_workers) as pool:
        return list(
            pool.map(
                lambda rank: join_group(folder, rank, num_workers, device=CPU, timeout_seconds=timeout_seconds),
                range(num_workers),
            )
        )


def summed(groups: list[WorkerGroup], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.sum(parts[group.rank]), groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_of_ranks_in_order(tmp_path: Path, dtype: torch.dtype) -> None:
    """Values whose sum depends on the order: any other one gives other bits."""
    groups = joined(tmp_path, 3)
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(7, 33, generator=generator) * 10.0**rank).to(dtype) for rank in range(3)]
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    for found in summed(groups, parts):
        assert torch.equal(found, expected)
    if dtype == torch.float32:
        assert not torch.equal(expected, parts[0] + (parts[1] + parts[2]))
    for row in range(7):  # alone, and as a view that is not adjacent
        for found in summed(groups, [part[row : row + 1, ::2] for part in parts]):
            assert torch.equal(found, expected[row : row + 1, ::2])


def test_a_worker_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match="could not be joined"):
        join_group(tmp_path, 0, 2, device=CPU, timeout_seconds=30, join_seconds=0.2)


def test_a_worker_that_stops_coming(tmp_path: Path) -> None:
    groups = joined(tmp_path, 2, timeout_seconds=0.3)
    with pytest.raises(WorkerLostError, match="a sum over 2 workers was not completed"):
        groups[0].sum(torch.ones(2, 2))


def test_groups_of_one_process_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = joined(tmp_path / "a", 2), joined(tmp_path / "b", 2)
    found: dict[int, list[torch.Tensor]] = {}

    def run(which: int, groups: list[WorkerGroup]) -> None:
        time.sleep(0.01 * which)
        found[which] = summed(groups, [torch.full((1, 1), 10.0**which)] * 2)

    threads = [threading.Thread(target=run, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.item() for one in found[0]] == [2.0, 2.0]
    assert [one.item() for one in found[1]] == [20.0, 20.0]
    assert not torch.distributed.is_initialized()
