"""What every engine is asked to do: requests of fixed lengths, of the same random token ids for all."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` requests at once, each with `shared_tokens` prompt tokens that all of them begin with and
    `own_tokens` of its own, and `output_tokens` to generate."""

    name: str
    num_requests: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for field, least in (("num_requests", 1), ("shared_tokens", 0), ("own_tokens", 1), ("output_tokens", 1)):
            if getattr(self, field) < least:
                raise ConfigError(f"{field}={getattr(self, field)} of workload {self.name}: must be at least {least}")

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens

    @property
    def request_tokens(self) -> int:
        """Of one request, prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def total_output_tokens(self) -> int:
        return self.num_requests * self.output_tokens

    def describe(self) -> str:
        shared = f"{self.shared_tokens} shared + " if self.shared_tokens else ""
        return f"{self.name}: {self.num_requests} x ({shared}{self.own_tokens} in, {self.output_tokens} out)"

    def resized(self, **sizes: int | None) -> Workload:
        """With those of `sizes` (fields by name) that are not None; a workload without a shared prefix gets none."""
        given: dict[str, Any] = {field: size for field, size in sizes.items() if size is not None}
        if not self.shared_tokens:
            given.pop("shared_tokens", None)
        return dataclasses.replace(self, **given)

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Token ids of each request, shared ones first. Equal arguments give equal prompts."""
        rng = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
        shared = rng.integers(0, vocab_size, self.shared_tokens)
        own = rng.integers(0, vocab_size, (self.num_requests, self.own_tokens))
        return [[*shared.tolist(), *row] for row in own.tolist()]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", num_requests=1, shared_tokens=0, own_tokens=128, output_tokens=128),
        Workload("short", num_requests=64, shared_tokens=0, own_tokens=128, output_tokens=128),
        Workload("long", num_requests=8, shared_tokens=0, own_tokens=4096, output_tokens=64),
        Workload("prefix", num_requests=32, shared_tokens=2048, own_tokens=64, output_tokens=32),
    )
}

# Not among those to choose: a process's first token, and a little of everything before the clock starts.
FIRST_TOKEN = Workload("first token", num_requests=1, shared_tokens=0, own_tokens=16, output_tokens=1)
WARM_UP = Workload("warm-up", num_requests=2, shared_tokens=0, own_tokens=64, output_tokens=8)


def parse_workloads(names: str) -> list[Workload]:
    """`names`: comma-separated. Raises ConfigError for one that is not known."""
    parsed = []
    for name in dict.fromkeys(names.split(",")):
        if name not in WORKLOADS:
            raise ConfigError(f"workload {name!r} is not known; choose of {', '.join(WORKLOADS)}")
        parsed.append(WORKLOADS[name])
    return parsed
