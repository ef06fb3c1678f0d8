"""Random models in GGUF files as llama.cpp's converter writes them: scores equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.random_gguf import CONVERSIONS, save_random_gguf
from tests.helpers.random_models import Draw, draw_config, random_model
from tests.helpers.tiny_gemma import VOCAB_SIZE

NUM_NEW = 4
# What the format has, or llama.cpp assumes, in the place of what a config may say.
FIXED: dict[str, dict[str, Any]] = {
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "cohere2": {"tie_word_embeddings": True, "attention_bias": False},
    "qwen2": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "qwen3": {"use_sliding_window": False, "layer_types": None, "sliding_window": None},
    "smollm3": {"use_sliding_window": False, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4},
    "ministral3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {
        "use_sliding_window": False,
        "layer_types": None,
        "sliding_window": None,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "use_sliding_window": False,
        "sliding_window": None,
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "gpt_oss": {"layer_types": None, "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True},
}
ROPES = {
    "llama": ("default", "linear", "llama3"),
    "ministral3": ("yarn",),
    "phi3": ("default", "longrope"),
    "olmo3": ("default",),
    "cohere2": ("default",),
    "mixtral": ("default", "linear", "llama3"),
}


def config_of(name: str, seed: int) -> Any:
    settings = draw_config(name, seed).to_dict()
    settings |= FIXED.get(name, {})
    draw = Draw(name, seed)
    if name == "gemma2":
        settings["query_pre_attn_scalar"] = settings["head_dim"]
    if name == "olmo3":
        rope = draw.rope("default")
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": dict(rope)}
    elif name == "ministral3":
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
        settings["rope_parameters"] = {**rope, "llama_4_scaling_beta": 0.3}
    elif name == "gpt_oss":
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
        settings["rope_parameters"] = {**rope, "truncate": False}
    elif name not in ("phi3",):
        settings["rope_parameters"] = draw.rope(*ROPES.get(name, ("default", "linear")))
    kind = type(draw_config(name, seed))
    return kind(**{key: value for key, value in settings.items() if key not in ("transformers_version", "model_type")})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_scores_are_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model = random_model(config_of(name, seed), seed=seed)
    path = tmp_path / "model.gguf"
    save_random_gguf(path, name, model)
    prompt = np.random.default_rng(seed).integers(6, VOCAB_SIZE, size=70).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=VOCAB_SIZE)
    settings = {"max_model_len": 96, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 2, "page_size": 16}
    with LLM(str(path), max_num_batched_tokens=32, **settings) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    chosen = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + chosen]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    for entry, scores in zip(output.outputs[0].logprobs, logits.log_softmax(-1), strict=True):
        ours = torch.tensor([entry[token].logprob for token in range(VOCAB_SIZE)])
        assert (ours - scores).abs().max() < 1e-4
