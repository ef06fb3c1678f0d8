"""Random models of many architectures by transformers' code on lamella's attention: tokens and logits are those of
transformers, at the edges of windows, cold, cached, in chunks, preempted and in mixed batches."""

from __future__ import annotations

import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.random_models import ARCHITECTURES, window_tokens
from tests.helpers.random_models import save_random_model as save_drawn_model
from tests.helpers.transformers_models import RANDOM_MODELS, WINDOW, logits_of, save_random_model

NUM_TOKENS = 8
MAX_DIFFERENCE = 1e-4
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)
# One of each mechanism: chunks, sinks and V narrower than K, soft-caps, shared KV, experts, a multimodal wrapper.
BY_DEFAULT = (
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "llama4_text",
    "mimo_v2_flash",
    "phi3",
    "step3p7",
)
MODELS = [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in RANDOM_MODELS]


def made_prompts():
    """At the window's edges, and one that begins like the longest."""
    prompts = [[(7 * place + length) % 300 + 6 for place in range(length)] for length in LENGTHS]
    return [*prompts, [*prompts[-1], 50, 60, 70]]


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_random_model(folder, request.param)


def run(folder, prompts, *, num_tokens=NUM_TOKENS, **arguments):
    """Outputs of two rounds, the second with what the first left in the cache, and the engine's counters."""
    settings = {"max_model_len": 160, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4, "check_invariants": True}
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    with LLM(str(folder), model_impl="transformers", **{**settings, **arguments}) as llm:
        rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        return rounds, llm.engine.stats()


def assert_equal_transformers(model, prompts, outputs):
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        expected = torch.log_softmax(logits_of(model, prompt + tokens[:-1])[len(prompt) - 1 :], dim=-1)
        assert tokens == expected.argmax(dim=-1).tolist()
        given = torch.tensor([row[token].logprob for row, token in zip(completion.logprobs, tokens, strict=True)])
        assert (given - expected[range(len(tokens)), tokens]).abs().max() < MAX_DIFFERENCE


def test_tokens_and_logits_are_those_of_transformers(saved):
    folder, model = saved
    prompts = made_prompts()
    (cold, cached), _ = run(folder, prompts, max_num_batched_tokens=16)
    assert_equal_transformers(model, prompts, cold)
    assert_equal_transformers(model, prompts, cached)
    assert sum(output.num_cached_tokens or 0 for output in cached) > 0


DRAWN_BY_DEFAULT = ("gemma4", "ministral3", "smollm3")
DRAWN = [name if name in DRAWN_BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_configs_of_native_families_run_by_transformers_as_well(name, seed, tmp_path):
    """The configs by which native families are tested, window lengths and all."""
    model = save_drawn_model(tmp_path, name, seed)
    config = model.config.get_text_config()
    window, rope = window_tokens(config), config.rope_parameters
    # Beyond this length longrope is not served (docs/models.md).
    longest = min(160, rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else 160)
    lengths = [min(length, longest - NUM_TOKENS) for length in (window, 3 * window + 5)]
    prompts = [[(7 * at + length) % 300 + 6 for at in range(length)] for length in lengths]
    (cold, cached), _ = run(tmp_path, prompts, max_num_batched_tokens=24, max_model_len=longest)
    assert_equal_transformers(model, prompts, cold)
    assert_equal_transformers(model, prompts, cached)


@pytest.mark.parametrize(("saved", "num_kv_tokens"), [("gemma2", 90), ("llama4_text", 50)], indirect=["saved"])
def test_preempted_requests_end_alike(saved, num_kv_tokens):
    folder, model = saved
    prompts = [[(11 * place + each) % 300 + 6 for place in range(6)] for each in range(4)]
    (cold, _), stats = run(
        folder,
        prompts,
        num_tokens=30,
        kv_cache_memory_bytes=kv_bytes(folder, num_tokens=num_kv_tokens),
        max_model_len=40,
        max_num_batched_tokens=8,
        page_size=4,
        enable_prefix_caching=False,
    )
    assert stats.num_preemptions > 0
    assert_equal_transformers(model, prompts, cold)


def test_shared_layers_without_a_token_to_compute_are_passed(tmp_path):
    """Chunks that sample nothing need only the KV of the layers that own some."""
    model = save_random_model(tmp_path, "gemma3n_text")
    prompts = made_prompts()[3:4]
    (cold, _), _ = run(tmp_path, prompts, num_tokens=2, max_num_seqs=1, max_num_batched_tokens=4, page_size=4)
    assert_equal_transformers(model, prompts, cold)


def kv_bytes(folder, *, num_tokens: int) -> int:
    """KV memory for so many tokens, were all layers full."""
    from lamella.planner.model_specs import model_specs

    return num_tokens * sum(spec.token_bytes for spec in model_specs(str(folder), 4).specs)
