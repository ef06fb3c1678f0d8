"""Models on the native CPU kernels, in every form that weights can have there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.errors import ConfigError
from lamella.model_executor.weights.conversion import ParameterPlan, Piece
from lamella.model_executor.weights.forms import Int8Panels, Panels, RowMajor, collect, formed_pieces, stored_tensors
from lamella.native.library import load_library
from tests.helpers.tiny_gemma import save_tiny_gemma

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
needs_native = pytest.mark.skipif(load_library() is None, reason="the native kernels are not there")


def make_prompts(lengths=(1, 17, 40, 75, 110)):
    generator = np.random.default_rng(4)
    return [generator.integers(6, 320, size=length).tolist() for length in lengths]


def generate(folder, prompts, params=GREEDY, **arguments):
    with LLM(str(folder), **{"max_model_len": 256, "kv_cache_memory_bytes": 2**24, **arguments}) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def oracle_tokens(model, prompt):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def rounded_to_int8(weight):
    """Each row on 255 levels between minus and plus its largest magnitude, in NumPy."""
    rows = weight.numpy().astype(np.float32)
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(rows / scales).astype(np.float32) * scales)


@needs_native
def test_int8_weights_are_those_of_a_model_with_rounded_weights(tmp_path):
    model = save_tiny_gemma(tmp_path, seed=6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(rounded_to_int8(parameter))
    prompts = make_prompts()
    expected = [oracle_tokens(model, prompt) for prompt in prompts]
    assert generate(tmp_path, prompts, quantization="int8") == expected
    assert generate(tmp_path, prompts) != expected, "rounding changes some token, or the test could not fail"


@needs_native
def test_w8a8_stays_close_and_does_not_depend_on_the_batch(tmp_path):
    save_tiny_gemma(tmp_path, seed=6)
    prompts = make_prompts()
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)
    together = generate(tmp_path, prompts, quantization="w8a8")
    alone = [generate(tmp_path, [prompt], quantization="w8a8", max_num_batched_tokens=256)[0] for prompt in prompts]
    assert together == alone
    first = generate(tmp_path, prompts, one_token)
    assert sum(a[0] == b[0] for a, b in zip(together, first, strict=True)) >= len(prompts) - 1


@needs_native
def test_an_untied_head_and_capped_logits(tmp_path):
    model = save_tiny_gemma(tmp_path, seed=7, tie_word_embeddings=False, final_logit_softcapping=2.0)
    prompts = make_prompts()
    expected = [oracle_tokens(model, prompt) for prompt in prompts]
    assert generate(tmp_path, prompts) == expected
    assert generate(tmp_path, prompts, attention_backend="torch") == expected


@needs_native
@pytest.mark.parametrize("top_k", [1, 5, 64, 65])
def test_sampled_tokens_are_those_that_all_logits_give(tmp_path, top_k, monkeypatch):
    """Rows with a small top_k see their largest scores only, the others every one."""
    save_tiny_gemma(tmp_path, seed=8)
    prompts = make_prompts() * 3
    params = [
        SamplingParams(temperature=1.3, top_k=top_k, top_p=0.95, min_p=0.01, seed=index, max_tokens=NUM_TOKENS)
        for index in range(len(prompts))
    ]
    found = generate(tmp_path, prompts, params)
    from lamella.model_executor.sampling import head_sampling

    monkeypatch.setattr(head_sampling, "MAX_TOP", 0)
    assert generate(tmp_path, prompts, params) == found


@needs_native
def test_bans_and_logprobs_beside_greedy_rows(tmp_path):
    save_tiny_gemma(tmp_path, seed=8)
    prompts = make_prompts()
    plain = generate(tmp_path, prompts)
    mixed = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=3),
        GREEDY,
        SamplingParams(temperature=0.7, top_k=3, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True),
    ]
    found = generate(tmp_path, prompts, mixed)
    assert [found[index] for index in (0, 1, 3)] == [plain[index] for index in (0, 1, 3)]
    assert len(found[2]) >= 3
    assert found == generate(tmp_path, prompts, mixed, attention_backend="torch")


@needs_native
def test_pages_that_are_no_multiple_of_16_run_on_torch(tmp_path, caplog):
    caplog.set_level("INFO")
    save_tiny_gemma(tmp_path, seed=8)
    with LLM(str(tmp_path), page_size=24, max_model_len=128, kv_cache_memory_bytes=2**24) as llm:
        assert llm.engine.attention_backend == "torch"
    assert "page_size=24 is no multiple of 16" in caplog.text


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "gguf"])
def test_quantization_without_the_native_path_is_refused(tmp_path, quantization):
    save_tiny_gemma(tmp_path, seed=8)
    with pytest.raises(ConfigError, match=f"quantization='{quantization}' needs the native CPU path.*'torch' here"):
        LLM(str(tmp_path), quantization=quantization, attention_backend="torch")


@needs_native
def test_gguf_blocks_are_wanted_of_a_gguf_file(tmp_path):
    save_tiny_gemma(tmp_path, seed=8)
    with pytest.raises(ConfigError, match=r"'safetensors'; give a \.gguf file as the model"):
        LLM(str(tmp_path), quantization="gguf")


def test_an_unknown_quantization_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="quantization='fp4' is not known; choose one of None, none, int8"):
        LLM(str(tmp_path), quantization="fp4")


@pytest.mark.parametrize("num_out", [1, 16, 40, 61])
@pytest.mark.parametrize("piece_rows", [1, 7, 16, 100])
def test_forms_do_not_depend_on_how_rows_are_read(num_out, piece_rows):
    """Rows come in pieces of any size; panels of 16 are made of them, with zeros at the end."""
    generator = torch.Generator().manual_seed(num_out)
    rows = torch.randn(num_out, 10, generator=generator)
    plan = ParameterPlan("embed_tokens.weight", (num_out, 10), torch.float32, ())
    norm = ParameterPlan("norm.weight", (10,), torch.float32, ())
    for form in (RowMajor(), Panels(), Int8Panels(), Panels(head="embed_tokens.weight")):
        pieces = [Piece(plan, start, rows[start : start + piece_rows]) for start in range(0, num_out, piece_rows)]
        pieces.append(Piece(norm, 0, torch.ones(10)))
        stored = stored_tensors({plan.name: plan.shape, norm.name: norm.shape}, torch.float32, form)
        names = [name for name, _ in formed_pieces(pieces, form)]
        assert list(dict.fromkeys(names)) == list(stored), "tensor by tensor, in the order of the file"
        assert names == sorted(names, key=list(stored).index)
        found = collect(formed_pieces(pieces, form), stored)
        assert torch.equal(found["norm.weight"], torch.ones(10))
        weight = found["embed_tokens.weight"]
        for out in range(num_out):
            for column in range(10):
                if isinstance(form, RowMajor):
                    assert weight[out, column] == rows[out, column]
                elif isinstance(form, Panels):
                    assert weight[out // 16, column, out % 16] == rows[out, column]
                else:
                    level = weight[out // 16, column // 4, out % 16, column % 4]
                    scale = found["embed_tokens.scales"][out]
                    assert abs(float(level * scale - rows[out, column])) <= 0.501 * float(scale)
        if isinstance(form, Panels) and form.head:
            assert torch.equal(found["embed_tokens.head_scales"][:num_out], rows.abs().amax(1) / 127)
