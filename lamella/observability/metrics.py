"""Metrics of one engine, in a Prometheus registry of its own, under vLLM's names with the prefix `lamella:`.

Gauges and counters are the engine's own counters, read when somebody asks. Histograms are filled once a step and once
for each request that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from lamella.observability.bucket_counts import BucketCounts, one_two_five
from lamella.observability.engine_snapshot import EngineSnapshot, ObservedRequest, SamplingLimits
from lamella.observability.metric_values import PER_POSITION, Metric, read_metrics
from lamella.observability.token_intervals import TokenIntervals

PREFIX = "lamella:"
FINISH_REASONS = ("stop", "length", "abort", "error")
MOST_STEP_TOKENS = 2**14
_MOST_NOTED_STEPS = 1024

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

_HELP = {
    "time_to_first_token_seconds": "From arrival to the first token",
    "inter_token_latency_seconds": "Between the steps that give a request tokens",
    "request_time_per_output_token_seconds": "Of a request that ended, the mean per token after its first",
    "e2e_request_latency_seconds": "From arrival to the end",
    "request_queue_time_seconds": "From arrival to the first step that computes something of it",
    "request_inference_time_seconds": "From the first step to the end",
    "request_prefill_time_seconds": "From the first step to the first token",
    "request_decode_time_seconds": "From the first token to the end",
    "request_prompt_tokens": "Tokens of a prompt",
    "request_generation_tokens": "Tokens that a request got",
    "request_params_max_tokens": "max_tokens of requests that give one",
    "request_params_n": "n of requests",
    "iteration_tokens_total": "Tokens that a step computes",
}


class EngineMetrics:
    """snapshot: the engine's counters now. registry: to be exposed as it is, beside others or alone."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], *, model_name: str, max_model_len: int) -> None:
        self._snapshot = snapshot
        self._label_names, self._label_values = ["model_name"], [model_name]
        self.num_ended = dict.fromkeys(FINISH_REASONS, 0)
        tokens = one_two_five(max_model_len)
        bounds = dict.fromkeys(_HELP, _REQUEST_SECONDS) | {
            "time_to_first_token_seconds": _FIRST_TOKEN_SECONDS,
            "inter_token_latency_seconds": _TOKEN_SECONDS,
            "request_time_per_output_token_seconds": _TOKEN_SECONDS,
            "request_prompt_tokens": tuple(tokens),
            "request_generation_tokens": tuple(tokens),
            "request_params_max_tokens": tuple(tokens),
            "request_params_n": (1, 2, 5, 10, 20),
            "iteration_tokens_total": tuple(float(2**power) for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)),
        }
        self._histograms = {name: BucketCounts(bounds[name]) for name in _HELP}
        self._intervals = TokenIntervals(self._histograms["inter_token_latency_seconds"])
        self._step_tokens: list[int] = []
        self.registry = CollectorRegistry()
        self.registry.register(_Asked(self))

    # What the engine tells

    def step_launched(self, num_tokens: int) -> None:
        """A step is given to the device that computes so many tokens."""
        self._step_tokens.append(num_tokens)
        if len(self._step_tokens) == _MOST_NOTED_STEPS:
            self._count_steps()

    def step_processed(self, requests: list[ObservedRequest], now: float) -> None:
        """Requests got tokens: see `TokenIntervals.step`."""
        self._intervals.step(requests, now)

    def arrived(self, params: SamplingLimits) -> None:
        """A request was queued."""
        self._histograms["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(params.max_tokens)

    def ended(self, request: ObservedRequest, num_output_tokens: int, now: float) -> None:
        """One sample of a request has got its last token, or was aborted, or failed."""
        observe = self._observe
        self._intervals.end(request)
        reason = str(request.finish_reason)
        self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
        started, first = request.first_scheduled_time, request.first_token_time
        observe("e2e_request_latency_seconds", now - request.arrival_time)
        observe("request_prompt_tokens", request.num_prompt_tokens)
        observe("request_generation_tokens", num_output_tokens)
        if started is not None:
            observe("request_queue_time_seconds", started - request.arrival_time)
            observe("request_inference_time_seconds", now - started)
        if started is not None and first is not None:
            observe("request_prefill_time_seconds", first - started)
        if first is not None:
            observe("time_to_first_token_seconds", first - request.arrival_time)
            observe("request_decode_time_seconds", now - first)
            if num_output_tokens > 1:
                observe("request_time_per_output_token_seconds", (now - first) / (num_output_tokens - 1))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _count_steps(self) -> None:
        self._histograms["iteration_tokens_total"].observe_all(self._step_tokens)
        self._step_tokens.clear()

    # What others read

    def values(self) -> list[Metric]:
        """All metrics, as plain values."""
        return read_metrics(self.registry)

    def text(self) -> str:
        """All metrics in Prometheus' text form, for a server to answer /metrics with."""
        return generate_latest(self.registry).decode()

    def families(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        now = self._snapshot()
        self._count_steps()
        self._intervals.count()
        kv, hits = now.kv_cache, now.kv_cache.hits
        yield self._gauge("num_requests_running", "Requests that run", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait", now.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV memory that requests hold, 0 to 1", now.kv_cache_usage
        )
        yield self._counter("prompt_tokens", "Tokens of prompts that have begun to run", now.num_prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Of these, those found in the cache", now.num_cached_tokens)
        yield self._counter("generation_tokens", "Tokens generated", now.num_generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked for in the cache", now.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache", now.num_cached_tokens)
        yield self._counter("num_preemptions", "Times that a request was sent back to wait", now.num_preemptions)
        yield self._counter("num_steps", "Steps", now.num_steps)
        yield self._each(
            CounterMetricFamily, "request_success", "Requests that ended", "finished_reason", self.num_ended
        )
        if now.num_proposed_at:
            yield self._counter("spec_decode_num_drafts", "Times that drafts were verified", now.num_proposed_at[0])
            yield self._counter("spec_decode_num_draft_tokens", "Drafts verified", sum(now.num_proposed_at))
            yield self._counter("spec_decode_num_accepted_tokens", "Drafts that requests got", sum(now.num_accepted_at))
            accepted = {str(position): count for position, count in enumerate(now.num_accepted_at)}
            name = PER_POSITION.removeprefix(PREFIX)
            yield self._each(CounterMetricFamily, name, "Drafts that requests got", "position", accepted)
        # What vLLM has no names for.
        for state, text in (
            ("owned", "Pages that requests hold"),
            ("cached", "Pages that only the cache holds"),
            ("free", "Free pages in slabs lent to the group"),
        ):
            pages = {name: getattr(usage, state) for name, usage in kv.pages.items()}
            yield self._each(GaugeMetricFamily, f"kv_group_pages_{state}", text, "group", pages)
        requests = {
            "full": hits.num_full_requests,
            "partial": hits.num_partial_requests,
            "replay": hits.num_replay_requests,
        }
        tokens = {
            "full": hits.num_full_tokens,
            "partial": hits.num_partial_tokens,
            "replay": hits.num_replay_tokens,
            "skipped": hits.num_skipped_tokens,
        }
        yield self._each(CounterMetricFamily, "prefix_hit_requests", "Requests with a hit", "kind", requests)
        yield self._each(CounterMetricFamily, "prefix_hit_tokens", "Prompt tokens of hits", "kind", tokens)
        evicted = {
            "resume_points": kv.num_evicted_resume_points,
            "spare_pages": kv.num_evicted_spare_pages,
            "dead_full_pages": kv.num_dead_full_pages,
        }
        yield self._each(CounterMetricFamily, "kv_evictions", "What went for memory", "kind", evicted)
        yield self._counter("kv_slab_moves", "Slabs that were emptied for another group", kv.num_slab_moves)
        yield self._counter("kv_moved_pages", "Pages moved for that", kv.num_moved_pages)
        for name, counts in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, _HELP[name], labels=self._label_names)
            family.add_metric(self._label_values, counts.cumulative(), counts.sum)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=self._label_names)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, text: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=self._label_names)
        family.add_metric(self._label_values, value)
        return family

    def _each(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: dict[str, int],
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family = kind(PREFIX + name, text, labels=[*self._label_names, label])
        for key, value in values.items():
            family.add_metric([*self._label_values, key], value)
        return family


class _Asked(Collector):
    """Makes the metrics each time that the registry is asked for them."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        return self._metrics.families()

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the registry would otherwise collect while the engine is still being made."""
        return []
