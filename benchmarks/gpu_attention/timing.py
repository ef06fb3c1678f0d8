"""Time on a GPU, by its own clock, and the speeds that a GPU reaches at best."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 1 << 30  # larger than any cache; writing it takes longer than the host takes to launch what is timed
COPY_BYTES = 1 << 32
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was reached in this run: bytes read and written per second by a copy of COPY_BYTES, and floating-point
    operations per second by a product of two bf16 matrices of MATMUL_SIZE."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Timer:
    """Times calls on one device. num_warmups calls go before num_repeats that count."""

    device: torch.device
    num_warmups: int
    num_repeats: int

    def seconds(self, call: Callable[[], object]) -> float:
        """Median over the repeats, each with a cold L2 cache, from when the device has come to the call until it is
        done with it."""
        with torch.cuda.device(self.device):
            flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
            for _ in range(self.num_warmups):
                call()
            events = []
            for _ in range(self.num_repeats):
                flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3

    def ceilings(self) -> Ceilings:
        return Ceilings(self._copy_bytes_per_second(), self._matmul_flops_per_second())

    def _copy_bytes_per_second(self) -> float:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self.seconds(lambda: target.copy_(source))

    def _matmul_flops_per_second(self) -> float:
        a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * MATMUL_SIZE**3 / self.seconds(lambda: torch.mm(a, b))
