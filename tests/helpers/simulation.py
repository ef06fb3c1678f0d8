"""The real scheduler and block manager over a fake executor: everything but the arithmetic."""

from __future__ import annotations

import numpy as np

from lamella.engine.sampling_params import SamplingParams
from lamella.engine.scheduling.request import Request
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.engine.scheduling.speculation.drafter import Drafter
from lamella.kv_cache import invariants
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.layout import build_layout
from lamella.kv_cache.retention import RetentionPolicy
from lamella.kv_cache.sizing import request_slabs, size_pool
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.kv_cache.step_pages import region_bytes
from lamella.model_executor.step_plan import StepResult
from tests.helpers.fake_executor import VOCAB, FakeExecutor


def full(heads: int = 1, k_dim: int = 2, v_dim: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim, itemsize_bytes=1)


def sliding(window: int, heads: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(num_kv_heads=heads, k_dim=2, v_dim=2, itemsize_bytes=1, window_tokens=window)


def chunked(chunk: int, heads: int = 1) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        num_kv_heads=heads, k_dim=2, v_dim=2, itemsize_bytes=1, attention_chunk_tokens=chunk
    )


def kind_of(spec: KVCacheSpec) -> tuple[str, int]:
    if isinstance(spec, SlidingWindowSpec):
        return "sliding", spec.window_tokens
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked", spec.attention_chunk_tokens
    return "full", 0


def commit_row(manager: BlockManager, row: int, tokens: np.ndarray, num_computed: int, *, ends_prompt: bool = False):
    """`commit` of one row, whose tokens these are."""
    table = np.zeros((manager.settings.num_rows, len(tokens)), dtype=np.int32)
    table[row] = tokens
    manager.commit(np.array([row]), table, np.array([num_computed]), ends_prompt=np.array([ends_prompt]))


class Simulation:
    """Requests of made-up tokens through the scheduler; the invariants are checked after every step.

    extra_slabs: the arena's size beyond what one request of max_model_len needs at least (in slabs).
    step_tokens: prompt tokens of a step for which there are step pages, beyond that.
    never_idle: use step pages wherever there are any, however much memory is free.
    kv_sharing: see build_layout.
    drafter: None: there is no speculation.
    retention: None: "tails" without spare pages, for what idle memory still has would hide what is kept on purpose.
    """

    spoilt_sample: int | None = None  # of the next step that samples, the one whose logits are no numbers

    def __init__(
        self,
        specs: list[KVCacheSpec],
        *,
        page_tokens: int = 4,
        max_model_len: int = 64,
        extra_slabs: int = 100,
        chunk_tokens: int = 16,
        max_num_seqs: int = 4,
        interval_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        retention: RetentionPolicy | None = None,
        windowed_replay: bool = True,
        skips_prompts: bool = False,
        step_tokens: int = 0,
        never_idle: bool = False,
        kv_sharing: dict[int, int] | None = None,
        max_pinned_bytes: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        layout = build_layout(specs, page_tokens=page_tokens, kv_sharing=kv_sharing)
        interval = interval_tokens or page_tokens
        num_draft_tokens = 0 if drafter is None else drafter.settings.num_draft_tokens
        smallest = request_slabs(
            layout, max_model_len=max_model_len, chunk_tokens=min(page_tokens, chunk_tokens), interval_tokens=interval,
            num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        pool = size_pool(
            layout, memory_bytes=(1 + smallest + extra_slabs) * layout.slab_bytes, max_model_len=max_model_len,
            longest_model_len=max_model_len, chunk_tokens=chunk_tokens, interval_tokens=interval,
            with_step_pages=False, num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        self.manager = BlockManager(
            layout, num_slabs=pool.num_slabs, num_rows=max_num_seqs, max_model_len=max_model_len,
            interval_tokens=interval, enable_prefix_caching=enable_prefix_caching,
            windowed_replay=windowed_replay, skips_prompts=skips_prompts,
            step_pages_bytes=region_bytes(layout, step_tokens),
            retention=RetentionPolicy(spare=False) if retention is None else retention,
            max_pinned_bytes=max_pinned_bytes,
            num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        if never_idle:
            self.manager.inspect().supply.idle_bytes = lambda: 0
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(chunk_tokens, max_num_seqs),
            max_model_len=max_model_len, chunk_tokens=max(pool.chunk_tokens, min(chunk_tokens, step_tokens)),
            scheduling_policy=scheduling_policy, drafter=drafter,
        )  # fmt: skip
        self.executor = FakeExecutor(layout, [kind_of(group.spec) for group in layout.groups], pool.num_slabs)
        self.max_model_len = max_model_len
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(
        self, request_id: str, prompt, num_tokens: int, salt: str | None = None, stop_token_ids=(), boundaries=()
    ) -> Request:
        request = Request(
            request_id=request_id,
            sample_index=0,
            params=SamplingParams(temperature=0),
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            max_total_tokens=min(len(prompt) + num_tokens, self.max_model_len),
            seed=0,
            eos_token_ids=frozenset(),
            stop_token_ids=frozenset(stop_token_ids),
            arrival_time=0.0,
            salt=salt,
            prefix_boundaries=tuple(boundaries),
        )
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add(request)
        return request

    def step(self, *, fail: bool = False) -> bool:
        """One step; False when there was nothing to run. fail: the executor dies, the step is rolled back."""
        plan = self.scheduler.schedule()
        if plan is None:
            invariants.check(self.manager)
            return False
        invariants.check(self.manager)
        if fail:
            self.scheduler.roll_back()
        else:
            contexts = []
            rows = self.scheduler.rows
            for index, row in enumerate(self.scheduler.scheduled_rows.tolist()):
                request = rows.request(row)
                # Drafts stand behind the tokens that are known.
                num_tokens = max(int(rows.num_tokens[row]), int(plan.seq_lens[index]))
                tokens = rows.tokens[row, :num_tokens].tolist()
                contexts.append((request.salt, tokens))
            for new in self.scheduler.update(self.spoil(self.executor.execute(plan, contexts))).each():
                self.outputs[new.request.request_id].append(new.token_id)
        invariants.check(self.manager)
        return True

    def spoil(self, result: StepResult) -> StepResult:
        """The result as it is where the model fails for one request, if one is to be spoilt."""
        if self.spoilt_sample is None or not len(result.token_ids):
            return result
        index, self.spoilt_sample = self.spoilt_sample % len(result.token_ids), None
        token_ids = result.token_ids.copy()
        token_ids[index] = (token_ids[index] + 1) % VOCAB
        return StepResult(token_ids=token_ids, logprobs={}, unusable={index: "spoilt"})

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def finish(self, request_id: str) -> None:
        self.scheduler.finish(self.requests[request_id], "abort")
        invariants.check(self.manager)
