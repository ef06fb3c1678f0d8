"""Prompts that are all there from the start, through scheduler and block manager without a model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.sizing import size_pool
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.step_plan import StepResult
from tests.helpers.simulation import full, sliding

GREEDY = SamplingParams(temperature=0)
LONGEST = 640


class Prompt(NamedTuple):
    token_ids: np.ndarray
    salt: str | None = None

    @property
    def sort_key(self) -> tuple[str, list[int]]:
        return self.salt or "", self.token_ids.tolist()


class Mix(NamedTuple):
    """memory_tokens: what the arena holds if all its layers keep every token."""

    prompts: list[Prompt]  # sorted
    specs: list[KVCacheSpec]
    page_tokens: int
    memory_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_output_tokens: int

    def shuffled(self, seed: int) -> list[Prompt]:
        order = np.random.default_rng(seed).permutation(len(self.prompts))
        return [self.prompts[index] for index in order]

    def scheduler(self, policy: str) -> Scheduler:
        layout = build_layout(self.specs, page_tokens=self.page_tokens)
        pool = size_pool(
            layout, memory_bytes=self.memory_tokens * sum(spec.token_bytes for spec in self.specs),
            max_model_len=LONGEST, longest_model_len=LONGEST, chunk_tokens=self.max_num_batched_tokens,
            interval_tokens=self.page_tokens,
        )  # fmt: skip
        manager = BlockManager(
            layout, num_slabs=pool.num_slabs, num_rows=self.max_num_seqs, max_model_len=LONGEST,
            interval_tokens=self.page_tokens, step_pages_bytes=pool.step_pages_bytes,
        )  # fmt: skip
        return Scheduler(
            manager, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=LONGEST, chunk_tokens=pool.chunk_tokens, scheduling_policy=policy,
        )  # fmt: skip


def mix_of(seed: int) -> Mix:
    """Groups of prompts that share a prefix, of random number, sizes and lengths; some have groups within groups,
    prompts that are equal or prefixes of others, a common first token, or salts."""
    rng = np.random.default_rng(seed)
    num_groups, most_members = int(rng.integers(20, 90)), int(rng.integers(2, 13))
    prefix_tokens, suffix_tokens = int(rng.integers(64, 321)), int(rng.integers(1, 65))
    is_nested, has_bos, has_salts, has_equals = (bool(rng.integers(2)) for _ in range(4))
    system = rng.integers(1, 200_000, int(rng.integers(8, 200))) if is_nested else np.zeros(0, dtype=np.int64)
    prompts: list[Prompt] = []
    for group in range(num_groups):
        salt = f"salt {group % 3}" if has_salts else None
        prefix = rng.integers(1, 200_000, int(rng.integers(prefix_tokens // 2, prefix_tokens + 1)))
        parts = [system, prefix] if is_nested and group % 4 else [prefix]
        for _ in range(int(rng.integers(1, most_members + 1))):
            suffix = rng.integers(1, 200_000, int(rng.integers(1, suffix_tokens + 1)))
            prompts.append(_prompt([*parts, suffix], has_bos, salt))
        if has_equals:
            prompts += [prompts[-1], _prompt(parts, has_bos, salt)]
    prompts.sort(key=lambda prompt: prompt.sort_key)
    mean_tokens = sum(len(prompt.token_ids) for prompt in prompts) // len(prompts)
    specs = [[full()], [full(), sliding(33)], [full(), sliding(64), sliding(64)]][int(rng.integers(3))]
    return Mix(
        prompts, specs,
        page_tokens=int(rng.choice([4, 16])),
        memory_tokens=LONGEST + int(rng.choice([2, 6, 12])) * mean_tokens,
        max_num_seqs=int(rng.choice([1, 4, 16, 64])),
        max_num_batched_tokens=int(rng.choice([64, 256, 2048])),
        num_output_tokens=int(rng.integers(1, 9)),
    )  # fmt: skip


def _prompt(parts: list[np.ndarray], has_bos: bool, salt: str | None) -> Prompt:
    return Prompt(np.concatenate([[0] if has_bos else [], *parts]).astype(np.int32), salt)


def request_of(request_id: str, prompt: Prompt, num_output_tokens: int) -> Request:
    return Request(
        request_id=request_id,
        sample_index=0,
        params=GREEDY,
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        max_total_tokens=len(prompt.token_ids) + num_output_tokens,
        seed=0,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        arrival_time=0.0,
        salt=prompt.salt,
    )


def add_all(scheduler: Scheduler, prompts: list[Prompt], num_output_tokens: int) -> list[Request]:
    requests = [request_of(f"r{index}", prompt, num_output_tokens) for index, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    return requests


def one_step(scheduler: Scheduler) -> None:
    """Every sample is token 7."""
    plan = scheduler.schedule()
    if plan is not None:
        scheduler.update(StepResult(np.full(len(plan.sample_requests), 7, dtype=np.int64), {}))


def drain(scheduler: Scheduler) -> None:
    while scheduler.has_requests:
        one_step(scheduler)


def hit_share(mix: Mix, policy: str, prompts: list[Prompt]) -> float:
    """Prompt tokens that were found in the cache, of all."""
    scheduler = mix.scheduler(policy)
    add_all(scheduler, prompts, mix.num_output_tokens)
    drain(scheduler)
    counters = scheduler.counters()
    assert counters.num_prompt_tokens == sum(len(prompt.token_ids) for prompt in prompts)
    return counters.num_cached_tokens / counters.num_prompt_tokens
