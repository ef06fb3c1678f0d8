"""Metrics against what the outputs themselves say."""

import logging
import math
import re
from pathlib import Path

import prometheus_client.parser
import pytest

from lamella import LLM, Engine, SamplingParams
from lamella.errors import EngineClosedError, LamellaError
from lamella.metrics import Counter, Gauge, Histogram, Vector
from tests.helpers.tiny_gemma import save_tiny_gemma

ENGINE = {"max_model_len": 256, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 4}
SHARED = [5 + place % 50 for place in range(48)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


def by_name(metrics):
    """Name without prefix, and the labels but the model's -> metric."""
    found = {}
    for metric in metrics:
        labels = {name: value for name, value in metric.labels.items() if name != "model_name"}
        found[(metric.name.removeprefix("lamella:"), *labels.values())] = metric
    return found


def up_to(histogram, values):
    return {
        bound: sum(value <= (math.inf if bound == "+Inf" else float(bound)) for value in values)
        for bound in histogram.buckets
    }


def test_counts_are_those_of_the_outputs(folder):
    params = [
        SamplingParams(max_tokens=3 + 4 * index, n=1 + index % 2, temperature=1.0, seed=index, ignore_eos=True)
        for index in range(7)
    ]
    prompts = [[*SHARED, *[60 + index] * (3 * index + 1)] for index in range(7)]
    with LLM(folder, **ENGINE) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        engine = llm.engine
        engine.add_request("gone", SHARED, SamplingParams(max_tokens=20, ignore_eos=True))
        engine.step()
        engine.step()
        found = by_name(llm.get_metrics())
        assert found["num_requests_running",].value == 1
        assert 0 < found["kv_cache_usage_perc",].value < 1
        (aborted,) = engine.abort("gone")
        found, text = by_name(llm.get_metrics()), engine.metrics_text()
        stats = engine.stats()
    samples = [(output, sample) for output in outputs for sample in output.outputs] + [(aborted, aborted.outputs[0])]
    lengths = [len(sample.token_ids) for _, sample in samples]
    prompt_lengths = [len(output.prompt_token_ids) for output, _ in samples]
    assert found["generation_tokens",].value == sum(lengths)
    assert found["prompt_tokens",].value == found["prefix_cache_queries",].value == sum(prompt_lengths)
    assert found["prefix_cache_hits",].value == stats.num_cached_tokens > 0
    assert found["prefix_hit_tokens", "full"].value == stats.kv_cache.hits.num_full_tokens > 0
    assert found["num_steps",].value == stats.num_steps
    assert (found["num_requests_running",].value, found["num_requests_waiting",].value) == (0, 0)
    assert found["kv_cache_usage_perc",].value == 0
    reasons = [sample.finish_reason for _, sample in samples]
    for reason in ("stop", "length", "abort", "error"):
        assert found["request_success", reason].value == reasons.count(reason)
    assert reasons.count("abort") == 1

    generated, prompt = found["request_generation_tokens",], found["request_prompt_tokens",]
    assert (generated.count, generated.sum, generated.buckets) == (
        len(samples), sum(lengths), up_to(generated, lengths),
    )  # fmt: skip
    assert (prompt.sum, prompt.buckets) == (sum(prompt_lengths), up_to(prompt, prompt_lengths))
    assert found["request_params_n",].sum == sum(one.n for one in params) + 1
    # A first token is no interval; every other one is, since no step gives two.
    intervals = found["inter_token_latency_seconds",]
    assert intervals.count == sum(lengths) - len(samples)
    # From the first token to the end there is nothing but these, and of what follows the last one only its processing.
    assert intervals.sum <= found["request_decode_time_seconds",].sum
    assert found["time_to_first_token_seconds",].count == found["request_queue_time_seconds",].count == len(samples)
    steps = found["iteration_tokens_total",]
    assert steps.count == stats.num_steps
    computed = sum(prompt_lengths) - stats.num_cached_tokens + sum(lengths) - len(samples)
    assert steps.sum == computed

    for name, usage in stats.pages.items():
        assert found["kv_group_pages_cached", name].value == usage.cached > 0
        assert found["kv_group_pages_owned", name].value == 0
    families = {family.name: family for family in prometheus_client.parser.text_string_to_metric_families(text)}
    (total,) = families["lamella:generation_tokens"].samples
    assert (total.name, total.value) == ("lamella:generation_tokens_total", sum(lengths))
    assert {type(metric) for metric in found.values()} == {Counter, Gauge, Histogram}


def test_latencies_are_those_of_the_outputs_own_times(folder):
    with LLM(folder, **ENGINE) as llm:
        outputs = llm.generate(
            [[7, index + 8] for index in range(6)],
            SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
            use_tqdm=False,
        )
        found = by_name(llm.get_metrics())
    first = [output.metrics.first_token_time - output.metrics.arrival_time for output in outputs]
    queued = [output.metrics.first_scheduled_time - output.metrics.arrival_time for output in outputs]
    assert found["time_to_first_token_seconds",].sum == pytest.approx(sum(first))
    assert found["time_to_first_token_seconds",].buckets == up_to(found["time_to_first_token_seconds",], first)
    assert found["request_queue_time_seconds",].sum == pytest.approx(sum(queued))
    whole = found["e2e_request_latency_seconds",].sum
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert whole == pytest.approx(sum(found[name,].sum for name in parts))


def test_drafts_by_position(folder):
    with LLM(folder, **ENGINE, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        llm.generate(
            [[9, 10, 11, 12] * 12], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True), use_tqdm=False
        )
        found, drafts = by_name(llm.get_metrics()), llm.engine.stats().drafts
    assert found["spec_decode_num_draft_tokens",].value == drafts.num_proposed
    assert found["spec_decode_num_accepted_tokens",].value == drafts.num_accepted
    accepted = found["spec_decode_num_accepted_tokens_per_pos",]
    assert isinstance(accepted, Vector)
    assert accepted.values == list(drafts.num_accepted_at)
    assert len(accepted.values) == 3


def test_the_page_shows_what_runs(folder, capsys):
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace("demo:gemma-3-270m", folder), {})
    printed = capsys.readouterr().out
    assert f"lamella:generation_tokens {{'model_name': '{folder}'}} 8" in printed.splitlines()


def test_the_page_names_every_metric_and_no_other(folder):
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    with LLM(folder, **ENGINE, speculative_config={"method": "suffix"}) as llm:
        names = {metric.name.removeprefix("lamella:") for metric in llm.get_metrics()}
    table = page.split("| kind | names |")[1].split("\n\n")[0]
    told = set(re.findall(r"`(\w+)`", table)) - {"finished_reason", "Vector"}
    assert told == names


def test_engines_do_not_share_metrics(folder):
    with LLM(folder, **ENGINE) as one, LLM(folder, **ENGINE) as other:
        one.generate([[7, 8]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert by_name(one.get_metrics())["generation_tokens",].value == 3
        assert by_name(other.get_metrics())["generation_tokens",].value == 0


def test_without_stats_there_are_none_and_closed_engines_say_so(folder):
    engine = Engine(model=folder, disable_log_stats=True, **ENGINE)
    with engine, pytest.raises(LamellaError, match="disable_log_stats=True"):
        engine.get_metrics()
    with pytest.raises(EngineClosedError):
        engine.get_metrics()


def test_the_log_has_a_report_and_a_line_and_is_silent_by_default(folder, caplog, monkeypatch):
    from lamella.observability import log_line

    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with LLM(folder, **ENGINE) as llm:
        llm.generate([[7, 8]], params, use_tqdm=False)
    assert not [record for record in caplog.records if record.name.startswith("lamella.stats")]
    caplog.set_level(logging.INFO, logger="lamella")

    monkeypatch.setattr(log_line.LogLine.__init__, "__defaults__", (0.0,))  # a line for every step
    with LLM(folder, **ENGINE) as llm:
        report = llm.engine.kv_cache_report()
        llm.generate([[7, 8]], params, use_tqdm=False)
    assert any(report in record.getMessage() for record in caplog.records)
