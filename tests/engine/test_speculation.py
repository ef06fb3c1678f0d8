"""Whole engines with and without speculation: every output is the same, whatever a request asks for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lamella import LLM, Engine, EngineConfig, SamplingParams
from lamella.engine.sampling_params import RequestOutputKind
from lamella.engine.scheduling.speculation.step_costs import StepCosts
from lamella.errors import ConfigError
from tests.helpers.oracle_drafts import let_an_oracle_draft
from tests.helpers.preempting import preempt_often
from tests.helpers.tiny_gemma import save_tiny_gemma

PAGE_BYTES = 6 * 16 * 2 * 2 * 16 * 4  # 6 layers, 16 tokens, K and V, 2 heads of 16 float32
SETTINGS = {
    "max_model_len": 200, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 6, "max_num_batched_tokens": 48,
    "check_invariants": True,
}  # fmt: skip
FREE = StepCosts([1], [1.0])
SUFFIX = {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_min_token_prob": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speculation")
    save_tiny_gemma(path, seed=5)  # a hybrid with a window of 16 tokens
    return str(path)


def workload():
    """Prompts that repeat themselves and each other, each with other settings."""
    draw = np.random.default_rng(3)
    words = draw.integers(6, 320, size=25).tolist()
    prompts = [[*words[: 5 + 2 * index], *words, *words[: index % 20]] for index in range(10)]
    prompts += [draw.integers(6, 320, size=length).tolist() for length in (1, 17, 90)]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0.2, "top_p": 0.9, "seed": 3},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.4, "seed": 4},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.6, "logprobs": 0, "seed": 8, "n": 3},
        {"temperature": 1.0, "top_k": 5, "seed": 2, "min_tokens": 9, "stop_token_ids": list(range(6, 60))},
        {"temperature": 0.8, "min_p": 0.05, "seed": 9, "ignore_eos": True},
        {"temperature": 0.3, "stop": ["a", "e", "is"], "seed": 1, "include_stop_str_in_output": True},
        {"temperature": 0.9, "stop": [*"tnsrio"], "seed": 6, "logprobs": 2},
        {"temperature": 0, "stop_token_ids": list(range(100, 130))},
    ]
    params = [
        SamplingParams(max_tokens=(1, 24, 13, 36)[index % 4], **kinds[index % len(kinds)])
        for index in range(len(prompts))
    ]
    return prompts, params


def parts_of(outputs):
    """All that a caller sees of outputs, floats bit for bit, but for when things happened."""
    return [
        [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob, one.logprobs)
            for one in output.outputs
        ]
        for output in outputs
    ]


def run(folder, *, oracle=None, share_right=0.8, costs=FREE, speculative_config=None, preempts=False, **arguments):
    """oracle: outputs of another run to draft from; without it, drafts come from texts, and all that can be made are.
    preempts: every third step the youngest request leaves.

    Returns outputs and statistics."""
    prompts, params = workload()
    with LLM(folder, speculative_config=speculative_config, **{**SETTINGS, **arguments}) as llm:
        scheduler = llm.engine.inspect().scheduler
        if oracle is not None:
            tokens = {
                (tuple(prompt), sample): one.token_ids
                for prompt, output in zip(prompts, oracle, strict=True)
                for sample, one in enumerate(output.outputs)
            }
            let_an_oracle_draft(
                llm.engine,
                lambda request: tokens[
                    tuple(request.token_ids[: request.num_prompt_tokens].tolist()), request.sample_index
                ],
                share_right,
            )
        elif scheduler.drafter is not None:
            scheduler.drafter.costs = costs
        if preempts:
            preempt_often(llm.engine)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats()
        assert all(usage.owned == 0 for usage in stats.pages.values())
        assert stats.num_generated_tokens == sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return outputs, stats


@pytest.fixture(scope="module")
def without(folder):
    outputs, stats = run(folder)
    assert stats.drafts.num_proposed == 0
    reasons = {one.finish_reason for output in outputs for one in output.outputs}
    stops = {type(one.stop_reason) for output in outputs for one in output.outputs}
    assert reasons == {"length", "stop"}
    assert stops == {int, str, type(None)}, "the workload ends in every way"
    return outputs


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"kv_cache_memory_bytes": 11 * PAGE_BYTES, "max_model_len": 128, "preempts": True},
        pytest.param({"share_right": 0.4, "enable_prefix_caching": False, "max_num_seqs": 2}, marks=pytest.mark.slow),
        pytest.param({"share_right": 1.0, "page_size": 32, "max_num_batched_tokens": 8}, marks=pytest.mark.slow),
        pytest.param({"kv_split": "ratio", "swa_full_tokens_ratio": 0.5}, marks=pytest.mark.slow),
        pytest.param({"disable_hybrid_kv_cache": True, "retention": "all"}, marks=pytest.mark.slow),
    ],
    ids=lambda arguments: "-".join(f"{key}={value}" for key, value in arguments.items()) or "default",
)
def test_right_and_wrong_drafts_change_nothing(folder, without, arguments):
    outputs, stats = run(folder, oracle=without, speculative_config=SUFFIX, **arguments)
    assert parts_of(outputs) == parts_of(without)
    drafts = stats.drafts
    assert drafts.num_accepted > 0
    assert (drafts.num_accepted < drafts.num_proposed) or arguments.get("share_right") == 1.0
    assert len(drafts.num_proposed_at) == 7
    assert sorted(drafts.num_accepted_at, reverse=True) == list(drafts.num_accepted_at)
    metrics = [output.metrics for output in outputs]
    assert sum(one.num_draft_tokens for one in metrics) == drafts.num_proposed
    assert sum(one.num_accepted_tokens for one in metrics) == drafts.num_accepted
    assert (stats.num_preemptions > 0) == ("preempts" in arguments)


@pytest.mark.parametrize(
    "speculative_config",
    [
        SUFFIX,
        {**SUFFIX, "suffix_decoding_max_cached_requests": 10, "suffix_decoding_max_spec_factor": 4.0},
        pytest.param({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_from_texts_change_nothing(folder, without, speculative_config):
    outputs, stats = run(folder, speculative_config=speculative_config)
    assert parts_of(outputs) == parts_of(without)
    assert 0 < stats.drafts.num_accepted < stats.drafts.num_proposed


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_forms_of_weights_verify_to_the_same_bits(folder, quantization):
    outputs, _ = run(folder, quantization=quantization)
    others, stats = run(folder, oracle=outputs, speculative_config=SUFFIX, quantization=quantization)
    assert parts_of(others) == parts_of(outputs)
    assert stats.drafts.num_accepted > 0


@pytest.mark.parametrize("num_more", [10, 1])
def test_several_tokens_of_a_step_come_in_one_delta(folder, without, num_more):
    """Streams join to the same text and tokens, and a stop string in the middle of a step ends them there. num_more:
    how many tokens the request might still have; with 1 the scheduler ends it for its length in the same step."""
    prompts, params = workload()
    index = next(
        place for place, output in enumerate(without) if isinstance(output.outputs[0].stop_reason, str)
        and len(output.outputs) == 1
    )  # fmt: skip
    expected = without[index].outputs[0]
    with Engine(model=folder, speculative_config=SUFFIX, **SETTINGS) as engine:
        let_an_oracle_draft(engine, lambda request: [*expected.token_ids, *range(10, 20)], 1.0)
        streamed = dataclasses.replace(
            params[index], output_kind=RequestOutputKind.DELTA, max_tokens=len(expected.token_ids) + num_more
        )
        engine.add_request("r", prompts[index], streamed)
        deltas = []
        while engine.has_unfinished_requests():
            deltas += [output.outputs[0] for output in engine.step()]
        assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
        assert "".join(delta.text for delta in deltas) == expected.text
        assert deltas[-1].stop_reason == expected.stop_reason
        assert engine.stats().num_steps < len(expected.token_ids)
        assert engine.stats().num_generated_tokens == len(expected.token_ids)


def test_what_was_rejected_is_not_cached(folder, without):
    """A next turn finds its whole conversation and nothing else, whatever was drafted."""
    prompts, params = workload()
    index = next(place for place, output in enumerate(without) if len(output.outputs[0].token_ids) == 36)
    answer = without[index].outputs[0].token_ids
    following = [*prompts[index], *answer, 7]
    found = []
    for config in (None, SUFFIX):
        with Engine(model=folder, speculative_config=config, **SETTINGS) as engine:
            if config:
                let_an_oracle_draft(engine, lambda request: answer, 0.5)
            for name, prompt, each in (
                ("first", prompts[index], params[index]),
                ("next", following, SamplingParams(temperature=0)),
            ):
                engine.add_request(name, prompt, each)
                while engine.has_unfinished_requests():
                    outputs = engine.step()
            found.append((outputs[0].num_cached_tokens, parts_of(outputs)))
            tree = engine.inspect().manager.inspect().tree
            known = [*following, *outputs[0].outputs[0].token_ids]
            for node in tree.nodes():
                block = np.frombuffer(tree._index.tokens(node), dtype=np.int32).tolist()
                end = tree.end_of(node)
                assert block == known[end - len(block) : end], "the tree has tokens that nobody was given"
    assert found[0] == found[1]
    assert found[0][0] == len(following) - 2


@pytest.mark.parametrize(
    ("page", "interval", "share_right"),
    [
        (16, None, 0.7),
        *(
            pytest.param(*case, share_right, marks=pytest.mark.slow)
            for case in ((16, None), (16, 100), (32, 1))
            for share_right in (0.0, 1.0)
        ),
    ],
)
def test_live_pages_stay_within_the_window_and_the_drafts(folder, page, interval, share_right):
    """At most ceil((W - 1 + max(I, P) + k) / P) pages of a windowed group and one more, which is attained."""
    num_drafts, window = 7, 16
    bound = 1 + -(-(window - 1 + max(interval or page, page) + num_drafts) // page)
    assert bound <= -(-(window + max(interval or page, page) + num_drafts) // page) + 1
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    arguments = {**SETTINGS, "page_size": page, "swa_eviction_interval": interval}
    with Engine(model=folder, **arguments) as engine:
        expected = engine_output(engine, params)
    with Engine(model=folder, speculative_config=SUFFIX, **arguments) as engine:
        let_an_oracle_draft(engine, lambda request: expected, share_right)
        inspection, held = engine.inspect(), []
        group = [group.name for group in inspection.layout.groups].index("sliding_16")
        supply = inspection.manager.inspect().supply
        schedule = inspection.scheduler.schedule

        def watched():
            plan = schedule()
            held.append(supply.num_owned[group])
            return plan

        inspection.scheduler.schedule = watched
        assert engine_output(engine, params) == expected
        assert max(held[3:]) <= bound


def engine_output(engine, params):
    engine.add_request("r", [5, 6, 7], params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[0].outputs[0].token_ids


def test_drafts_that_do_not_pay_are_not_made(folder, without):
    outputs, stats = run(folder, speculative_config=SUFFIX, costs=StepCosts([1, 64], [1.0, 64.0]))
    assert parts_of(outputs) == parts_of(without)
    assert stats.drafts.num_proposed == 0


def test_steps_are_measured_when_the_engine_starts(folder):
    with Engine(model=folder, speculative_config=SUFFIX, **SETTINGS) as engine:
        inspection = engine.inspect()
        costs = inspection.scheduler.drafter.costs
        assert costs.largest_size >= 4
        seconds = costs.seconds(np.arange(1, costs.largest_size + 1))
        assert (seconds > 0).all()
        assert (np.diff(seconds) >= 0).all()
        assert engine.stats().num_steps == 0, "the measurement is none of the engine's steps"
        assert all(usage == (0, 0, 0) for usage in engine.stats().pages.values())


class TestConfig:
    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"method": "eagle"}, r'\["method"\]=\'eagle\' is not known; give "suffix" or "ngram"'),
            ({"num_speculative_tokens": 3}, r'\["method"\]=None is not known'),
            ({"method": "suffix", "num_speculativ_tokens": 3}, "did you mean 'num_speculative_tokens'"),
            ({"method": "suffix", "prompt_lookup_max": 3}, 'belongs to method "ngram"'),
            ({"method": "suffix", "num_speculative_tokens": 0}, "out of range"),
            ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "out of range"),
            ({"method": "suffix", "suffix_decoding_max_spec_factor": "2"}, "give a number"),
            ({"method": "ngram"}, 'has no "num_speculative_tokens"'),
            (
                {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
                "at most",
            ),
            ("suffix", "give a dict"),
        ],
    )
    def test_what_is_wrong_is_named(self, given, says):
        with pytest.raises(ConfigError, match=says) as refusal:
            EngineConfig("m", speculative_config=given)
        assert str(refusal.value).startswith("speculative_config")

    def test_what_is_right_is_taken(self):
        settings = EngineConfig("m", speculative_config={"method": "suffix"}).speculation
        assert (settings.num_draft_tokens, settings.drafts_per_match_token, settings.num_shared_outputs) == (24, 1.0, 0)
        given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        settings = EngineConfig("m", speculative_config=given).speculation
        assert (settings.num_draft_tokens, settings.least_match_tokens) == (5, 2)
        assert EngineConfig("m", speculative_config={}).speculation is None
        assert EngineConfig("m").num_draft_tokens == 0

    def test_a_step_ahead_and_drafts_exclude_each_other(self, folder):
        with pytest.raises(ConfigError, match="leave one of them out"):
            EngineConfig("m", speculative_config=SUFFIX, async_scheduling=True)
        with Engine(model=folder, speculative_config=SUFFIX, **SETTINGS) as engine:
            assert not engine.is_async

    def test_drafts_count_in_what_a_request_needs(self, folder):
        """Start-up, pools, admission and tables go by the same sum."""
        with Engine(model=folder, speculative_config={**SUFFIX, "num_speculative_tokens": 20}, **SETTINGS) as engine:
            assert engine.inspect().manager.settings.num_draft_tokens == 20
            line = next(line for line in engine.kv_cache_report().splitlines() if line.startswith("200 "))
        # 1 + ceil((15 + 16 + 20) / 16) pages of the window; without drafts there are 3.
        assert line.split()[-2:] == ["5", "13"]
