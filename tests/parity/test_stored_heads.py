"""Heads, caps and rotary scalings that a file states: greedy tokens and log-probabilities equal transformers' own
loading of the same file, or of the same model where transformers does not read the format's key."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella import LLM, SamplingParams
from lamella.model_executor.weights.loading import load_config, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma, save_tiny_tokenizer
from tests.helpers.tiny_gguf import gguf_name, save_tiny_gguf

PROMPT = [2, *(6 + 7 * index % 300 for index in range(40))]
NUM_TOKENS = 8
SMALL = {"num_hidden_layers": 3, "sliding_window_pattern": 3}
AS_GGUF = {"num_hidden_layers": 6, "sliding_window_pattern": 6}  # files do not state the pattern


def ours(model):
    """(tokens, log-probability of each) of a greedy generation."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(model), max_model_len=128, kv_cache_memory_bytes=2**23) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    scores = [row[token].logprob for row, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    return tokens, scores


def theirs(model):
    tokens, scores = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            row = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            tokens.append(int(row.argmax()))
            scores.append(float(row.max()))
    return tokens[len(PROMPT) :], scores


def assert_equal(path, model):
    (our_tokens, our_scores), (their_tokens, their_scores) = ours(path), theirs(model)
    assert our_tokens == their_tokens
    assert our_scores == pytest.approx(their_scores, abs=2e-4)


def loaded(folder, kind="AutoModelForCausalLM", **arguments):
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, **arguments).eval()


def with_values_of(model, path):
    """The transformers model, holding what the gguf package reads from `path`."""
    import gguf

    values = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = torch.from_numpy(values[gguf_name(name)].copy())
            parameter.copy_(stored - 1.0 if name.endswith("norm.weight") else stored)
    return model


def head_like(folder, *, seed=5):
    """Another output matrix of the right shape."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = next(
        value for name, value in load_file(folder / "model.safetensors").items() if "embed_tokens" in name
    )
    return torch.randn(embeddings.shape, generator=generator) * 0.03


def store(folder, **tensors):
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


@pytest.mark.parametrize("flag", [True, False, "absent"])
def test_a_stored_head_that_differs_is_used_whatever_the_flag_says(tmp_path, flag):
    save_tiny_gemma(tmp_path, **SMALL)
    store(tmp_path, **{"lm_head.weight": head_like(tmp_path)})
    edit_config(tmp_path, tie_word_embeddings=flag)
    assert not load_config(resolve_model(str(tmp_path))).tie_word_embeddings
    assert_equal(tmp_path, loaded(tmp_path))


@pytest.mark.parametrize("flag", [True, False])
def test_a_stored_head_that_equals_the_embeddings_is_not_kept_twice(tmp_path, flag):
    model = save_tiny_gemma(tmp_path, **SMALL)
    store(tmp_path, **{"lm_head.weight": model.model.embed_tokens.weight.detach().clone()})
    edit_config(tmp_path, tie_word_embeddings=flag)
    assert load_config(resolve_model(str(tmp_path))).tie_word_embeddings
    assert_equal(tmp_path, loaded(tmp_path))


def test_heads_that_differ_in_the_last_number_are_different(tmp_path):
    model = save_tiny_gemma(tmp_path, **SMALL)
    head = model.model.embed_tokens.weight.detach().clone()
    head[-1, -1] += 1.0
    store(tmp_path, **{"lm_head.weight": head})
    assert not load_config(resolve_model(str(tmp_path))).tie_word_embeddings
    assert_equal(tmp_path, loaded(tmp_path))


def save_multimodal(folder):
    """A tiny Gemma 3 with a vision tower, as transformers saves one."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = save_tiny_gemma(folder / "text", **SMALL)
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(
        text_config=text.config, vision_config=vision, mm_tokens_per_image=4, image_token_index=319,
        boi_token_index=317, eoi_token_index=318,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("place", ["top", "text_config", "both", "neither"])
def test_the_head_of_a_multimodal_checkpoint(tmp_path, place, stored):
    """The flag stands at the top, in text_config, in both or in neither; a different head is stored, or none."""
    save_multimodal(tmp_path)
    if stored:
        store(tmp_path, **{"lm_head.weight": head_like(tmp_path)})
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text.pop("tie_word_embeddings", None)
    if place in ("text_config", "both"):
        text["tie_word_embeddings"] = True
    edit_config(tmp_path, text_config=text, tie_word_embeddings=True if place in ("top", "both") else "absent")
    assert load_config(resolve_model(str(tmp_path))).tie_word_embeddings is not stored
    assert_equal(tmp_path, loaded(tmp_path, "Gemma3ForConditionalGeneration"))


@pytest.mark.parametrize("quantise", ["F32", "Q8_0"])
@pytest.mark.parametrize("is_same", [False, True])
def test_the_head_of_a_gguf_file(tmp_path, quantise, is_same):
    """`output.weight` counts, and is not kept twice where it equals `token_embd.weight`. The oracle is the model with
    the values that the gguf package reads from the file."""
    model = save_tiny_gemma(tmp_path / "model", **AS_GGUF, tie_word_embeddings=False)
    if is_same:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    save_tiny_gguf(tmp_path / "m.gguf", model, quantise=quantise, with_head=True)
    assert load_config(resolve_model(str(tmp_path / "m.gguf"))).tie_word_embeddings is is_same
    assert_equal(tmp_path / "m.gguf", with_values_of(model, tmp_path / "m.gguf"))


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_a_cap_on_attention_is_not_applied_to_gemma_3(tmp_path, attn_implementation):
    save_tiny_gemma(tmp_path, **SMALL, attn_logit_softcapping=0.05)
    assert_equal(tmp_path, loaded(tmp_path, attn_implementation=attn_implementation))


def test_a_cap_on_attention_is_not_applied_to_gemma_3_in_gguf(tmp_path):
    model = save_tiny_gemma(tmp_path / "model", **AS_GGUF)
    save_tiny_gguf(tmp_path / "m.gguf", model, gemma3__attn_logit_softcapping=0.05)
    assert_equal(tmp_path / "m.gguf", model)


ROPES = {
    "a factor without a type is linear": ({"rope__scaling__factor": 4.0}, 4.0),
    "a factor with its type": ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 4.0),
    "the old key": ({"rope__scale_linear": 4.0}, 4.0),
    "the old key with a type": ({"rope__scaling__type": "linear", "rope__scale_linear": 4.0}, 4.0),
    "the new key wins": ({"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}, 4.0),
    "the type none": ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1.0),
    "the type none over the old key": ({"rope__scaling__type": "none", "rope__scale_linear": 4.0}, 1.0),
    "a factor of 0 is off": ({"rope__scaling__factor": 0.0}, 1.0),
    "a type without a factor": ({"rope__scaling__type": "linear"}, 1.0),
}


@pytest.mark.parametrize("case", ROPES)
def test_rotary_scaling_of_a_gguf_file(tmp_path, case):
    """llama.cpp's reading of the keys; the oracle is transformers with the factor that they mean, on full layers."""
    keys, factor = ROPES[case]
    scaling = {} if factor == 1.0 else {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    model = save_tiny_gemma(tmp_path / "model", **AS_GGUF, **scaling)
    save_tiny_gguf(tmp_path / "m.gguf", model, **{f"gemma3__{key}": value for key, value in keys.items()})
    assert_equal(tmp_path / "m.gguf", model)
