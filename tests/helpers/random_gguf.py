"""Random models of transformers as llama.cpp's converter writes them: names by the gguf package's own tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.helpers.tiny_gguf import tiny_vocabulary


class Conversion(NamedTuple):
    """arch: of GGUF. has_pairs: the converter puts the rows of a head's halves in turns. norm_offset: what is added to
    norms. keys: of the config, more than all have."""

    arch: str
    has_pairs: bool = False
    norm_offset: float = 0.0


CONVERSIONS = {
    "llama": Conversion("llama", has_pairs=True),
    "qwen2": Conversion("qwen2"),
    "gemma2": Conversion("gemma2", norm_offset=1.0),
    "qwen3": Conversion("qwen3"),
    "ministral3": Conversion("mistral3", has_pairs=True),
    "phi3": Conversion("phi3"),
    "olmo2": Conversion("olmo2"),
    "olmo3": Conversion("olmo2"),
    "cohere2": Conversion("cohere2"),
    "exaone4": Conversion("exaone4"),
    "smollm3": Conversion("smollm3", has_pairs=True),
    "granite": Conversion("granite", has_pairs=True),
    "starcoder2": Conversion("starcoder2"),
    "mixtral": Conversion("llama", has_pairs=True),
    "qwen2_moe": Conversion("qwen2moe"),
    "qwen3_moe": Conversion("qwen3moe"),
    "gpt_oss": Conversion("gpt-oss"),
}


def save_random_gguf(path: Path, name: str, model: Any, *, experts_type: str | None = None) -> None:
    """experts_type: the storage type of experts' matrices, rounded by the gguf package; None: float32."""
    conversion, config = CONVERSIONS[name], model.config
    writer = gguf.GGUFWriter(path, conversion.arch)
    for key, value in _metadata(name, config).items():
        _add(writer, f"{conversion.arch}.{key}", value)
    tokens, types = tiny_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    arch = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == conversion.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for stored, parameter in model.state_dict().items():
        if stored.startswith("lm_head") and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if ".experts." in stored or "sinks" in stored:
            for spelled, part_values in _experts_and_sinks(stored, values, name == "gpt_oss"):
                part_values = np.ascontiguousarray(part_values)
                if experts_type is None or part_values.ndim < 3:
                    writer.add_tensor(spelled, part_values)
                    continue
                storage = gguf.GGMLQuantizationType[experts_type]
                writer.add_tensor(spelled, gguf.quants.quantize(part_values, storage), raw_dtype=storage)
            continue
        part = stored.split(".")[-2]
        if conversion.has_pairs and part in heads:
            halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if stored.endswith("norm.weight"):
            values = values + np.float32(conversion.norm_offset)
        spelled = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert spelled is not None, stored
        writer.add_tensor(spelled, values)
    for spelled, values in _divisors(config).items():
        writer.add_tensor(spelled, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts_and_sinks(stored: str, values: np.ndarray, is_transposed: bool) -> list[tuple[str, np.ndarray]]:
    """transformers' names of a layer's experts, which hold gate and up in one, and of sinks -> the format's."""
    layer, name = stored.split(".")[2], stored.split(".")[-1]
    if name == "sinks":
        return [(f"blk.{layer}.attn_sinks.weight", values)]
    ending = "bias" if name.endswith("_bias") else "weight"
    if is_transposed and ending == "weight":
        values = values.swapaxes(1, 2)
    if name.startswith("down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.{ending}", values)]
    half = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if is_transposed else (values[:, :half], values[:, half:])
    return [(f"blk.{layer}.ffn_gate_exps.{ending}", gate), (f"blk.{layer}.ffn_up_exps.{ending}", up)]


def _metadata(name: str, config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    for theirs, key in (("norm_epsilon", "layer_norm_epsilon"), ("layer_norm_eps", "layer_norm_epsilon")):
        if hasattr(config, theirs):
            keys[f"attention.{key}"] = getattr(config, theirs)
    if hasattr(config, "rms_norm_eps"):
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "longrope":
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        factor = config.max_position_embeddings / config.original_max_position_embeddings
        magnitude = (1 + np.log(factor) / np.log(config.original_max_position_embeddings)) ** 0.5
        keys["rope.scaling.attn_factor"] = float(magnitude)
    if rope["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if name in ("gemma2", "cohere2", "olmo3", "exaone4", "phi3") and config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    if name in ("olmo3", "exaone4", "cohere2") and config.sliding_window:
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if name == "gemma2":
        keys["attn_logit_softcapping"] = config.attn_logit_softcapping
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if name == "cohere2":
        keys["logit_scale"] = config.logit_scale
    if name == "ministral3":
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if name in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        keys["expert_feed_forward_length"] = width
    if name == "qwen2_moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if name == "gpt_oss":
        keys["attention.sliding_window"] = config.sliding_window
    if name == "granite":
        keys |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        keys |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    return keys


def _divisors(config: Any) -> dict[str, np.ndarray]:
    """What scaling makes of frequencies, where the converter stores it."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], dtype=np.float32)
            for which in ("short", "long")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    share = (turns - low) / (high - low)
    blended = 1 / ((1 - share) / rope["factor"] + share)
    divisors = np.where(turns < low, rope["factor"], np.where(turns > high, 1.0, blended))
    return {"rope_freqs.weight": divisors.astype(np.float32)}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
