"""On the native path a request's log-probabilities are the same bits whatever runs beside it, however its prompt is
cut, and whatever of it was cached."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.native.library import load_library
from tests.helpers.step_page_watch import NAN_BYTE, watch_step_pages
from tests.helpers.tiny_decoders import save_tiny_decoder
from tests.helpers.tiny_gemma import save_tiny_gemma

NUM_TOKENS = 40
PARAMS = SamplingParams(temperature=0.9, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
PAGE_BYTES = 6 * 16 * 2 * 2 * 16 * 4  # 6 layers, 16 tokens, K and V, 2 heads of 16 float32

pytestmark = pytest.mark.skipif(load_library() is None, reason="the contract is the native kernels'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bits")
    save_tiny_gemma(path, seed=5)
    return str(path)


def make_prompts():
    """Prompts of up to ten windows; some are beginnings of others, some part from others inside a page."""
    generator = np.random.default_rng(8)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in (1, 15, 16, 17, 40, 75, 110, 160)]
    prompts.append(prompts[-1][:93])
    prompts.append([*prompts[-1][:57], *generator.integers(6, 320, size=30).tolist()])
    prompts.append([*prompts[7][:150], *generator.integers(6, 320, size=9).tolist()])
    return prompts


def answers(llm, prompts):
    """Token ids and every log-probability that was returned, float for float."""
    return [
        [
            (token_id, sorted((other, each.logprob) for other, each in logprobs.items()))
            for token_id, logprobs in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]


def engine(folder, **arguments):
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 8, "check_invariants": True}
    llm = LLM(folder, **{**settings, **arguments})
    assert llm.engine.attention_backend == "native"
    return llm


@pytest.fixture(scope="module")
def alone(folder):
    """Each request by itself, its prompt in one piece, nothing cached."""
    with engine(folder, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=512) as llm:
        return [answers(llm, [prompt])[0] for prompt in make_prompts()]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 23},
        {"max_num_batched_tokens": 64, "page_size": 32},
        {"page_size": 64, "max_num_batched_tokens": 50, "swa_eviction_interval": 5},
        {"page_size": 128},
        {"max_num_seqs": 3, "max_num_batched_tokens": 41},
        {"disable_hybrid_kv_cache": True},
        {"kv_split": "ratio", "swa_full_tokens_ratio": 0.5},
        {"retention": "none"},
        {"retention": "all", "max_num_batched_tokens": 33},
    ],
    ids=lambda arguments: "-".join(f"{key}={value}" for key, value in arguments.items()) or "default",
)
def test_neither_batch_nor_chunks_nor_pages_nor_the_cache_change_a_bit(folder, alone, arguments):
    prompts = make_prompts()
    order = np.random.default_rng(len(arguments)).permutation(len(prompts))
    with engine(folder, **arguments) as llm:
        shuffled = answers(llm, [prompts[index] for index in order])
        assert shuffled == [alone[index] for index in order]
        assert answers(llm, prompts) == alone, "the second time, from the cache"
        hits = llm.engine.stats().kv_cache.hits
        if arguments.get("retention") != "none":
            assert hits.num_full_tokens > 0
            assert hits.num_partial_tokens > 0


def test_preemption_does_not_change_a_bit(folder, alone):
    prompts = make_prompts()
    with engine(folder, kv_cache_memory_bytes=16 * PAGE_BYTES, max_num_batched_tokens=32, max_model_len=200) as llm:
        assert answers(llm, prompts) == alone
        assert answers(llm, prompts[::-1]) == alone[::-1]
        assert llm.engine.stats().num_preemptions > 0


OTHER_FAMILIES = ("llama", "mistral", "qwen2 as a hybrid")
FORMS = ("none", "int8", "w8a8")


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        pytest.param(
            family, form, marks=[] if OTHER_FAMILIES.index(family) == FORMS.index(form) else [pytest.mark.slow]
        )
        for each, family in enumerate(OTHER_FAMILIES)
        for other, form in enumerate(FORMS)
    ],
)
def test_bits_of_other_families(family, quantization, tmp_path):
    """As above: by themselves, together in chunks, from the cache, and preempted. These models have no head norms and
    two norms a layer; Qwen2's has biases on Q, K and V."""
    save_tiny_decoder(tmp_path, family, seed=5)
    other_family = str(tmp_path)
    prompts, settings = make_prompts(), {"quantization": quantization}
    with engine(
        other_family, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=512, **settings
    ) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in prompts]
    with engine(other_family, max_num_batched_tokens=23, **settings) as llm:
        assert answers(llm, prompts[::-1]) == alone[::-1]
        assert answers(llm, prompts) == alone, "the second time, from the cache"
        assert llm.engine.stats().kv_cache.hits.num_partial_tokens > 0
    num_layers, tight = 4, 16 * PAGE_BYTES
    with engine(
        other_family,
        kv_cache_memory_bytes=tight * num_layers // 6,
        max_num_batched_tokens=32,
        max_model_len=200,
        **settings,
    ) as llm:
        assert answers(llm, prompts) == alone
        # Requests of sliding layers alone are bounded, and never outgrow what they were admitted with.
        is_bounded = all(layer.attention.kind == "sliding_attention" for layer in llm.model_config.layers)
        assert (llm.engine.stats().num_preemptions > 0) != is_bounded


def test_windowed_replay_does_not_change_a_bit(folder):
    """The windows of cached prompts are gone; what is computed again must be what was there."""
    generator = np.random.default_rng(9)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in (301, 352, 390)]
    settings = {"max_model_len": 512, "max_num_batched_tokens": 512}
    with engine(folder, max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in prompts]
    with engine(folder, **settings) as llm:
        tree = llm.engine.inspect().manager.inspect().tree
        assert answers(llm, prompts) == alone
        while tree.strip_one(lambda num_tokens: True):
            pass
        assert answers(llm, prompts) == alone
        assert llm.engine.stats().kv_cache.hits.num_replay_requests == len(prompts)


def test_skipping_what_no_later_token_depends_on_does_not_change_a_bit(tmp_path):
    """Six sliding layers of 16 tokens: a token depends on 90 before it, and no more of a prompt is computed."""
    save_tiny_gemma(tmp_path, seed=5, layer_types=["sliding_attention"] * 6)
    generator = np.random.default_rng(10)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in (90, 301, 352, 400)]
    settings = {"max_model_len": 512, "max_num_batched_tokens": 64}
    with engine(str(tmp_path), windowed_replay=False, enable_prefix_caching=False, **settings) as llm:
        alone = answers(llm, prompts)
        assert llm.engine.stats().kv_cache.hits.num_skipped_tokens == 0
    with engine(str(tmp_path), **settings) as llm:
        assert answers(llm, prompts) == alone
        # All must be exact from one block before the last on (272, 320, 368), and the windows there in whole blocks, 15
        # tokens more; 90 tokens before that, down to a block boundary: 160, 208 and 256.
        stats = llm.engine.stats()
        assert stats.kv_cache.hits.num_skipped_tokens == 160 + 208 + 256
        assert stats.num_cached_tokens == 0
        assert answers(llm, prompts) == alone


@pytest.mark.parametrize(
    ("kinds", "arguments"),
    [
        ("fssfss", {}),
        ("fssfss", {"max_num_batched_tokens": 70}),
        ("ssfsss", {"quantization": "w8a8"}),
        ("ssssss", {"page_size": 32}),
        ("ssssss", {"windowed_replay": False, "max_num_batched_tokens": 130}),
        ("fsssss", {"retention_grid_tokens": 64}),
        ("sfssss", {"enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_leaving_out_what_nothing_depends_on_does_not_change_a_bit(tmp_path, kinds, arguments):
    """Nor a byte of the pages that stay. The same steps give the same pages, in an arena of NaN."""
    layer_types = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
    save_tiny_gemma(tmp_path, seed=5, layer_types=layer_types)
    generator = np.random.default_rng(12)
    prompts = [generator.integers(6, 320, size=length).tolist() for length in (400, 90, 301)]
    prompts += [[*prompts[0][:150], *prompts[1]], [*prompts[2], *prompts[1]]]
    found, arenas, num_left_out = [], [], []
    for prunes in (True, False):
        with engine(str(tmp_path), max_model_len=512, **arguments) as llm:
            watch_step_pages(llm.engine)
            loaded = llm.engine.inspect()
            loaded.runner.prunes = prunes
            arena = loaded.runner.arena[: loaded.pool.num_slabs * loaded.layout.slab_bytes]
            arena[loaded.layout.slab_bytes :] = NAN_BYTE
            num_left_out.append(count_what_is_left_out(loaded.runner))
            found.append([answers(llm, prompts), answers(llm, prompts[::-1])])
            arenas.append(arena.clone())
    assert found[0] == found[1]
    assert torch.equal(arenas[0], arenas[1])
    assert sum(num_left_out[0]) > 300
    assert num_left_out[1] == []


def count_what_is_left_out(runner):
    """A list that gets, of each step from now on, how many tokens layers did not take in, over all layers."""
    counts = []
    needed_tokens = runner.receptive_field.needed_tokens

    def counted(plan):
        needed = needed_tokens(plan)
        num_layers = len(runner.places)
        counts.append(sum(len(plan.token_ids) - len(needed[layer]) for layer in needed if layer < num_layers))
        return needed

    runner.receptive_field.needed_tokens = counted
    return counts


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(folder, alone, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with engine(folder, max_num_batched_tokens=64) as llm:
            assert answers(llm, make_prompts()) == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_checkpoints_are_computed_in_float32(tmp_path, dtype):
    save_tiny_gemma(tmp_path, seed=5, dtype=dtype)
    prompts = make_prompts()[4:]
    with engine(str(tmp_path), max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=512) as llm:
        expected = [answers(llm, [prompt])[0] for prompt in prompts]
    with engine(str(tmp_path), max_num_batched_tokens=29) as llm:
        assert answers(llm, prompts) == expected
        assert answers(llm, prompts) == expected
