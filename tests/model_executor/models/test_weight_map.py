"""What files call a tensor, and what the model calls it."""

from __future__ import annotations

import pytest

from lamella.model_executor.models.registry import FAMILIES

LLAMA_LIKE = ("llama", "mistral", "qwen2")
MAPS = {family.name: family.weights for family in FAMILIES}


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.norm.weight", "norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.12.self_attn.q_proj.weight", "layers.12.self_attn.q_proj.weight"),
        ("model.layers.0.self_attn.k_proj.bias", "layers.0.self_attn.k_proj.bias"),
        ("model.layers.3.mlp.down_proj.weight", "layers.3.mlp.down_proj.weight"),
        ("model.layers.3.input_layernorm.weight", "layers.3.input_norm.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "layers.3.mlp_norm.weight"),
        ("layers.3.input_layernorm.weight", "layers.3.input_norm.weight"),  # saved without its head
        ("model.layers.3.self_attn.k_scale", "layers.3.self_attn.k_scale"),
    ],
)
def test_names_in_safetensors(family: str, stored: str, name: str) -> None:
    assert MAPS[family].from_safetensors(stored) == name
    assert MAPS[family].left_out(stored) is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("token_embd.weight", "embed_tokens.weight"),
        ("output_norm.weight", "norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.7.attn_q.weight", "layers.7.self_attn.q_proj.weight"),
        ("blk.7.attn_v.bias", "layers.7.self_attn.v_proj.bias"),
        ("blk.7.attn_output.weight", "layers.7.self_attn.o_proj.weight"),
        ("blk.7.ffn_gate.weight", "layers.7.mlp.gate_proj.weight"),
        ("blk.7.attn_norm.weight", "layers.7.input_norm.weight"),
        ("blk.7.ffn_norm.weight", "layers.7.mlp_norm.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),  # nobody's, so that it is refused where it is not used
    ],
)
def test_names_in_gguf(family: str, stored: str, name: str) -> None:
    assert MAPS[family].from_gguf(stored) == name


def test_gemmas_four_norms() -> None:
    gemma = MAPS["gemma3"]
    spelled = {
        "input_norm": ("input_layernorm", "attn_norm"),
        "post_attention_norm": ("post_attention_layernorm", "post_attention_norm"),
        "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
        "post_mlp_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    }
    for name, (safetensors, gguf) in spelled.items():
        for prefix in ("model.", "language_model.model.", "model.language_model."):
            assert gemma.from_safetensors(f"{prefix}layers.2.{safetensors}.weight") == f"layers.2.{name}.weight"
        assert gemma.from_gguf(f"blk.2.{gguf}.weight") == f"layers.2.{name}.weight"
    assert gemma.left_out("vision_tower.x.weight") == "the vision tower"
    assert (gemma.safetensors_norm_offset, gemma.gguf_norm_offset) == (1.0, 0.0)


@pytest.mark.parametrize("family", MAPS)
def test_rotary_tables_are_left_out(family: str) -> None:
    for name in ("model.rotary_emb.inv_freq", "model.layers.4.self_attn.rotary_emb.inv_freq"):
        assert MAPS[family].left_out(name) == "rotary frequencies"


def test_whose_files_hold_pairs() -> None:
    """Neighbours are turned against each other by Cohere and Llama 4 everywhere, and by llama.cpp for some others."""
    assert {name for name, weights in MAPS.items() if weights.safetensors_pairs} == {"cohere2", "llama4"}
    ours = {name for name in MAPS if MAPS[name].gguf_pairs}
    assert ours == {"llama", "llama4", "cohere2", "granite", "granite_moe", "ministral3", "smollm3"}
