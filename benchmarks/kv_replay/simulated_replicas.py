"""N replicas in virtual time: each a real scheduler and block manager, whose steps take what a cost model says.

    arrival ──▶ router ──▶ replica: add ──▶ schedule, update ──▶ its clock moves on by the step's cost
       ▲                                                                │
       └──────── closed sessions: the next turn when this one is answered

Nothing depends on how fast this machine is, so every run gives the same figures.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kv_replay.closed_loop import ClosedLoop
from kv_replay.drive import MAX_IDLE_STEPS, known_request, known_samples
from kv_replay.layouts import layer_specs
from kv_replay.replica_routing import (
    LEAST_LOADED,
    PREFIX,
    SUBTREES,
    Dealt,
    LeastLoaded,
    PrefixRouting,
    RoundRobin,
    Router,
)
from kv_replay.step_cost_model import StepCostModel, StepSize
from kv_replay.systems import Limits, System, build_scheduler
from kv_replay.traces import TraceRequest, token_ids
from lamella.engine.scheduling.scheduler import Scheduler
from lamella.errors import ConfigError, InvariantError

CLOSED, TIMED, QUEUED = "closed", "timed", "queued"
ARRIVALS = (CLOSED, TIMED, QUEUED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """arrivals: CLOSED, num_sessions sessions of the whole cluster, each of which sends its next turn when it has its
    answer; TIMED, as the trace says, `speed` times as fast; QUEUED, all at the beginning."""

    requests: Sequence[TraceRequest]
    arrivals: str = CLOSED
    num_sessions: int = 25
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.arrivals == TIMED and any(request.arrival_seconds is None for request in self.requests):
            raise ConfigError(
                f"arrivals={TIMED!r}: this trace does not say when its requests arrive; use {CLOSED!r} or {QUEUED!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """budget_bytes: of each replica's KV. key_blocks: prompts that begin with the same so many pages go together."""

    num_replicas: int
    layout: str
    budget_bytes: int
    limits: Limits
    costs: StepCostModel
    key_blocks: int = 4

    def as_one(self) -> Cluster:
        """One replica with all the memory, which may run as many requests as all of them; nothing is as good for the
        hit share."""
        limits = Limits(
            page_tokens=self.limits.page_tokens,
            max_num_seqs=self.limits.max_num_seqs * self.num_replicas,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            interval_tokens=self.limits.interval_tokens,
            policy=self.limits.policy,
        )
        return Cluster(
            num_replicas=1, layout=self.layout, budget_bytes=self.budget_bytes * self.num_replicas, limits=limits,
            costs=self.costs, key_blocks=self.key_blocks,
        )  # fmt: skip


class Percentiles(NamedTuple):
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        return cls(*map(float, np.quantile(values, (0.5, 0.9, 0.99))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult:
    """All times are virtual but wall_seconds.

    hit_share: prompt tokens that were in a replica's cache when the request first ran / all prompt tokens.
    tokens_per_second: prompt and output tokens of the requests / seconds until the last answer.
    first_token, answer: seconds from a request's arrival.
    most_over_mean_work: tokens computed by the replica that computed most / mean over replicas.
    busy_share: of the replicas' time until the last answer, in which a step ran.
    """

    policy: str
    num_replicas: int
    budget_bytes: int
    num_requests: int
    hit_share: float
    tokens_per_second: float
    output_tokens_per_second: float
    seconds: float
    first_token: Percentiles
    answer: Percentiles
    most_over_mean_work: float
    busy_share: float
    num_preemptions: int
    num_steps: int
    wall_seconds: float


class _Step(NamedTuple):
    seconds: float
    first: list[str]  # requests that get their first token
    ended: list[str]


class Replica:
    def __init__(self, scheduler: Scheduler, costs: StepCostModel) -> None:
        self.scheduler = scheduler
        self._costs = costs
        self._outputs: dict[str, np.ndarray] = {}
        self.is_busy = False
        self.load = 0.0
        self.num_computed_tokens = 0
        self.num_steps = 0
        self.busy_seconds = 0.0

    def add(self, request_id: str, prompt: np.ndarray, output: np.ndarray) -> None:
        self._outputs[request_id] = output
        self.scheduler.add(known_request(request_id, prompt, output))

    def step(self) -> _Step:
        """Plan a step and take in what it samples. Whoever calls sees to it that nothing is added before it ends."""
        plan = None
        for _ in range(MAX_IDLE_STEPS):
            plan = self.scheduler.schedule()
            if plan is not None:
                break
        if plan is None:
            raise InvariantError(f"the scheduler has requests and ran none of them in {MAX_IDLE_STEPS} attempts")
        rows = self.scheduler.rows
        sampled_rows = self.scheduler.scheduled_rows[plan.sample_requests]
        is_first = rows.num_tokens[sampled_rows] == rows.num_prompt_tokens[sampled_rows]
        first = [rows.request(row).request_id for row in sampled_rows[is_first].tolist()]
        seconds = self._costs.seconds(StepSize.of(plan))
        self.num_computed_tokens += len(plan.token_ids)
        self.num_steps += 1
        self.busy_seconds += seconds
        new_tokens = self.scheduler.update(known_samples(self.scheduler, plan, self._outputs))
        ended = [request.request_id for request in new_tokens.ended]
        for request_id in ended:
            del self._outputs[request_id]
        return _Step(seconds, first, ended)


class _Run:
    def __init__(self, cluster: Cluster, router: Router, max_model_len: int) -> None:
        specs = layer_specs(cluster.layout)
        self.replicas = [
            Replica(
                build_scheduler(
                    System("lamella"), specs, cluster.limits, budget_bytes=cluster.budget_bytes,
                    max_model_len=max_model_len,
                ),
                cluster.costs,
            )
            for _ in range(cluster.num_replicas)
        ]  # fmt: skip
        self._router = router
        self._events: list[tuple[float, int, TraceRequest | tuple[int, _Step]]] = []
        self._order = itertools.count()  # of events at the same time
        self._on_their_way: dict[str, tuple[TraceRequest, float, int]] = {}  # with arrival and replica
        self.first_token_seconds: list[float] = []
        self.answer_seconds: list[float] = []
        self.now = 0.0

    def arrive(self, request: TraceRequest, seconds: float) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), request))

    def run(self, loop: ClosedLoop[TraceRequest] | None) -> None:
        while self._events:
            self.now = self._events[0][0]
            touched: dict[int, None] = {}
            while self._events and self._events[0][0] == self.now:
                _, _, event = heapq.heappop(self._events)
                if isinstance(event, TraceRequest):
                    touched[self._route(event)] = None
                else:
                    index, step = event
                    self._end_step(index, step, loop)
                    touched[index] = None
            for index in touched:
                replica = self.replicas[index]
                if not replica.is_busy and replica.scheduler.has_requests:
                    step = replica.step()
                    replica.is_busy = True
                    heapq.heappush(self._events, (self.now + step.seconds, next(self._order), (index, step)))

    def _route(self, request: TraceRequest) -> int:
        prompt, output = token_ids(request)
        loads = [replica.load for replica in self.replicas]
        index = self._router.choose(request.request_id, prompt, loads, float(request.num_tokens))
        replica = self.replicas[index]
        replica.load += request.num_tokens
        replica.add(request.request_id, prompt, output)
        self._on_their_way[request.request_id] = (request, self.now, index)
        return index

    def _end_step(self, index: int, step: _Step, loop: ClosedLoop[TraceRequest] | None) -> None:
        replica = self.replicas[index]
        replica.is_busy = False
        for request_id in step.first:
            self.first_token_seconds.append(self.now - self._on_their_way[request_id][1])
        for request_id in step.ended:
            request, arrived, _ = self._on_their_way.pop(request_id)
            self.answer_seconds.append(self.now - arrived)
            replica.load -= request.num_tokens
            following = loop.answer(request) if loop is not None else None
            if following is not None:
                self.arrive(following, self.now)


def simulate(cluster: Cluster, traffic: Traffic, policy: str, *, name: str | None = None) -> ClusterResult:
    """name: what the result calls the policy; None: by its name.

    Raises CapacityError where a request does not fit a replica, ConfigError for a policy that
    needs a known queue.
    """
    started = time.perf_counter()
    requests = list(traffic.requests)
    router, requests = _router(cluster, traffic, policy, requests)
    max_model_len = cluster.limits.whole_pages(max(request.num_tokens for request in requests))
    run = _Run(cluster, router, max_model_len)
    loop = ClosedLoop(requests, traffic.num_sessions) if traffic.arrivals == CLOSED else None
    for request in loop.start() if loop is not None else requests:
        seconds = (request.arrival_seconds or 0.0) / traffic.speed if traffic.arrivals == TIMED else 0.0
        run.arrive(request, seconds)
    run.run(loop)
    counters = [replica.scheduler.counters() for replica in run.replicas]
    work = [replica.num_computed_tokens for replica in run.replicas]
    return ClusterResult(
        policy=name or policy,
        num_replicas=cluster.num_replicas,
        budget_bytes=cluster.budget_bytes,
        num_requests=len(run.answer_seconds),
        hit_share=sum(one.num_cached_tokens for one in counters) / sum(one.num_prompt_tokens for one in counters),
        tokens_per_second=sum(request.num_tokens for request in requests) / run.now,
        output_tokens_per_second=sum(request.num_output_tokens for request in requests) / run.now,
        seconds=run.now,
        first_token=Percentiles.of(run.first_token_seconds),
        answer=Percentiles.of(run.answer_seconds),
        most_over_mean_work=max(work) * len(work) / sum(work),
        busy_share=sum(replica.busy_seconds for replica in run.replicas) / (run.now * len(run.replicas)),
        num_preemptions=sum(one.num_preemptions for one in counters),
        num_steps=sum(replica.num_steps for replica in run.replicas),
        wall_seconds=time.perf_counter() - started,
    )


def _router(
    cluster: Cluster, traffic: Traffic, policy: str, requests: list[TraceRequest]
) -> tuple[Router, list[TraceRequest]]:
    """The router and the order in which requests are sent."""
    if policy == SUBTREES:
        if traffic.arrivals != QUEUED:
            raise ConfigError(f"policy={policy!r} deals out requests that are all known; use arrivals={QUEUED!r}")
        dealt = Dealt(
            cluster.num_replicas,
            [request.request_id for request in requests],
            [token_ids(request)[0] for request in requests],
            [request.num_output_tokens for request in requests],
        )
        by_id = {request.request_id: request for request in requests}
        return dealt, [by_id[request_id] for request_id in dealt.order]
    if policy == PREFIX:
        return PrefixRouting(cluster.num_replicas, cluster.key_blocks * cluster.limits.page_tokens), requests
    return (LeastLoaded() if policy == LEAST_LOADED else RoundRobin()), requests
