"""Models of further families for the fuzz, and what transformers computes from a mutant of one.

Such a mutant is compared by what it does: the log-probabilities of a few tokens, which configuration, names, shapes,
storage and numbers all go into.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from tests.fuzz.mutations import FAMILY_FORMATS
from tests.helpers.random_gguf import save_random_gguf
from tests.helpers.tiny_experts import save_tiny_experts
from tests.helpers.transformers_models import save_random_model

PROMPT = [(37 * place) % 300 + 6 for place in range(20)]


def write_family_bases(base: Path) -> None:
    """Folders "mxfp4", GPT-OSS with blocks; "rope", a Llama with llama3 scaling; "backend", experts and windows that
    transformers' code runs; and "expert_gguf", a GGUF file with experts."""
    for name in FAMILY_FORMATS:
        (base / name).mkdir(parents=True)
    save_tiny_experts(base / "mxfp4", "gpt-oss", num_hidden_layers=2, num_local_experts=4)
    _pack_experts(base / "mxfp4")
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    save_random_model(base / "rope", "llama", num_hidden_layers=2, rope_parameters=rope)
    save_random_model(base / "backend", "granitemoe_swa", num_hidden_layers=4)
    settings = {"num_hidden_layers": 2, "decoder_sparse_step": 1, "attention_bias": False}
    model = save_tiny_experts(base / "expert_gguf", "qwen3 with experts", **settings)
    for path in (base / "expert_gguf").iterdir():
        path.unlink()
    save_random_gguf(base / "expert_gguf" / "model.gguf", "qwen3_moe", model)
    for name in FAMILY_FORMATS:
        (base / name / "generation_config.json").unlink(missing_ok=True)


def _pack_experts(folder: Path) -> None:
    """Replace the experts' weights with random blocks of 32 values of 4 bits and a scale."""
    path, config_path = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    config_path.write_text(json.dumps(config))


def expected_scores(kind: str, folder: Path, tokens: list[int], num_scored: int) -> torch.Tensor:
    """transformers' log-probabilities before each of the last `num_scored` of `tokens`, float32 [num_scored,
    vocab_size]. Raises whatever transformers raises."""
    model = _qwen3_experts(folder / "model.gguf") if kind == "expert_gguf" else _folder_model(kind, folder)
    with torch.inference_mode():
        logits = model.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[-num_scored - 1 : -1], dim=-1)


# Fields that no answer depends on, whose types transformers checks, too.
_ASIDE = (
    *("initializer_range", "pretraining_tp", "use_cache", "attention_dropout", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise", "transformers_version", "architectures", "pad_token_id"),
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"),
)


# What transformers goes by, for files that lack it: `architectures` alone says it, too.
_MODEL_TYPES = {"mxfp4": "gpt_oss", "rope": "llama"}


def _folder_model(kind: str, folder: Path) -> Any:
    """transformers' model of a folder; MXFP4 blocks as floats, by its own function."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{stem}_scales")
        tensors[stem] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    given = json.loads((folder / "config.json").read_text("utf-8"))
    config = {key: value for key, value in given.items() if key not in _ASIDE}
    if config.get("model_type") is None and kind in _MODEL_TYPES:
        config["model_type"] = _MODEL_TYPES[kind]
    with tempfile.TemporaryDirectory() as copy:
        save_file(tensors, Path(copy) / "model.safetensors", metadata={"format": "pt"})
        (Path(copy) / "config.json").write_text(json.dumps(config), "utf-8")
        return AutoModelForCausalLM.from_pretrained(
            copy, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )


_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def _qwen3_experts(path: Path) -> Any:
    """transformers' model of what the gguf package reads."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    reader = gguf.GGUFReader(path)
    fields = {name.removeprefix("qwen3moe."): field.contents() for name, field in reader.fields.items()}
    stored = {
        tensor.name: torch.from_numpy(
            dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in tensor.shape[::-1]]).copy()
        ).float()
        for tensor in reader.tensors
    }
    config = Qwen3MoeConfig(
        vocab_size=stored["token_embd.weight"].shape[0],
        hidden_size=fields["embedding_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=fields["attention.head_count"],
        num_key_value_heads=fields.get("attention.head_count_kv", fields["attention.head_count"]),
        head_dim=fields["attention.key_length"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        max_position_embeddings=fields["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 10000.0)},
        num_experts=fields["expert_count"],
        num_experts_per_tok=fields["expert_used_count"],
        moe_intermediate_size=stored["blk.0.ffn_gate_exps.weight"].shape[1],
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings="output.weight" not in stored,
        attn_implementation="eager",
        dtype="float32",
    )
    state = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"],
    }
    state["lm_head.weight"] = stored.get("output.weight", stored["token_embd.weight"])
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        state |= {f"{theirs}{name}.weight": stored[f"{ours}{part}.weight"] for part, name in _GGUF_NAMES.items()}
        gate_up = [stored[f"{ours}ffn_{part}_exps.weight"] for part in ("gate", "up")]
        state[f"{theirs}mlp.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
        state[f"{theirs}mlp.experts.down_proj"] = stored[f"{ours}ffn_down_exps.weight"]
    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(state)
    return model
