"""Random models of transformers as llama.cpp's converter writes them: names by the gguf package's own tables."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.helpers.random_gguf_metadata import (
    NUM_EXTRA,
    WITH_EXTRA_LAYERS,
    metadata,
    rope_of,
)
from tests.helpers.tiny_gguf import tiny_vocabulary


class Conversion(NamedTuple):
    """arch: of GGUF. has_pairs: the converter puts the rows of a head's halves in turns. norm_offset: what is added to
    norms. experts: how transformers holds gate and up of all experts, which files hold apart: one after the other in
    rows ("halves") or columns ("columns"), in turns in columns ("interleaved"); "kept": as it is in files, too.
    table: whose names of tensors the gguf package has; None: arch's own."""

    arch: str
    has_pairs: bool = False
    norm_offset: float = 0.0
    experts: str = "halves"
    table: str | None = None


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
    "gpt_oss": Conversion("gpt-oss", experts="interleaved"),
    "gemma4": Conversion("gemma4", experts="kept"),
    "llama4": Conversion("llama4", experts="columns"),
    "mimo_v2_flash": Conversion("mimo2"),
    "step3p5": Conversion("step35", norm_offset=1.0),
    "afmoe": Conversion("afmoe"),
    "phimoe": Conversion("phimoe"),
    # Released versions of the package do not have it yet; its tensors are called as these.
    "laguna": Conversion("laguna", table="step35"),
    "granitemoe": Conversion("granitemoe", has_pairs=True),
}
# Of a layer, where transformers' modules have other names than the checkpoints that the tables are about.
_RENAMED = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.proj.weight": "ffn_gate_inp.weight",
}
_RENAMED_OF = {"gpt_oss": {"mlp.router.bias": "ffn_gate_inp.bias"}}


def save_random_gguf(
    path: Path,
    name: str,
    model: Any,
    changed: Mapping[str, Any] | None = None,
    *,
    experts_type: str | None = None,
) -> None:
    """changed: keys that differ from what the converter writes; None leaves one out. experts_type: the storage type of
    experts' matrices, rounded by the gguf package; None: float32."""
    conversion, config = CONVERSIONS[name], copy.deepcopy(model.config.get_text_config())
    config.allow_global_per_layer_attribute_access = True  # numbers that differ by layer kind
    writer = gguf.GGUFWriter(path, conversion.arch)
    for key, value in {**metadata(name, config), **(changed or {})}.items():
        _add(writer, f"{conversion.arch}.{key}", value)
    tokens, types = tiny_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    for spelled, values in _tensors(name, model, config):
        if experts_type is None or values.ndim < 3:
            writer.add_tensor(spelled, np.ascontiguousarray(values))
            continue
        storage = gguf.GGMLQuantizationType[experts_type]
        writer.add_tensor(spelled, gguf.quants.quantize(np.ascontiguousarray(values), storage), raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(name: str, model: Any, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    conversion = CONVERSIONS[name]
    for stored, parameter in _text_parameters(model):
        if stored.startswith("lm_head") and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if conversion.has_pairs:
            values = _paired(stored, values, config)
        if stored.endswith("norm.weight"):
            values = values + np.float32(conversion.norm_offset)
        for spelled, part in _spelled(name, stored, values, config):
            yield spelled, part
            if name in WITH_EXTRA_LAYERS and spelled.startswith("blk.0."):
                yield spelled.replace("blk.0.", f"blk.{config.num_hidden_layers}."), part
    if name in WITH_EXTRA_LAYERS:
        extra = np.zeros((config.hidden_size, 2 * config.hidden_size), dtype=np.float32)
        yield f"blk.{config.num_hidden_layers + NUM_EXTRA - 1}.nextn.eh_proj.weight", extra
    yield from _divisors(name, config).items()


def _text_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Those of a model with towers by the names that its text model alone has."""
    stored = model.state_dict()
    has_towers = any(name.startswith("model.language_model.") for name in stored)
    for name, parameter in stored.items():
        if not has_towers or name.startswith("lm_head."):
            yield name, parameter
        elif name.startswith("model.language_model."):
            yield name.replace("model.language_model.", "model."), parameter


def _paired(stored: str, values: np.ndarray, config: Any) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = stored.split(".")[-2]
    if part not in heads:
        return values
    halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _spelled(name: str, stored: str, values: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """transformers' name of a tensor -> the format's, of the tensors that its files have in its place."""
    conversion = CONVERSIONS[name]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stored)
    if layer and ".experts." in stored:
        for part, part_values in _expert_parts(layer[2].split(".")[-1], values, conversion.experts):
            yield f"blk.{layer[1]}.{part}", part_values
        return
    if layer and layer[2] == "shared_mlp.input_linear.weight":
        half = len(values) // 2
        yield f"blk.{layer[1]}.ffn_gate_shexp.weight", values[:half]
        yield f"blk.{layer[1]}.ffn_up_shexp.weight", values[half:]
        return
    arch = _arch(conversion.table or conversion.arch)
    renamed = {**_RENAMED, **_RENAMED_OF.get(name, {})}
    if layer and layer[2] in renamed:
        spelled = f"blk.{layer[1]}.{renamed[layer[2]]}"
    else:
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        found = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert found is not None, stored
        spelled = found
    place = re.sub(r"^blk\.\d+\.", "blk.{bid}.", spelled.rpartition(".")[0])
    assert place in [gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[arch]], spelled
    yield spelled, values


def _arch(text: str) -> gguf.MODEL_ARCH:
    return next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == text)


def _expert_parts(name: str, values: np.ndarray, layout: str) -> Iterator[tuple[str, np.ndarray]]:
    ending = "bias" if name.endswith("_bias") else "weight"
    if layout in ("columns", "interleaved") and ending == "weight":
        values = values.swapaxes(1, 2)
    if name.startswith("down_proj"):
        yield f"ffn_down_exps.{ending}", values
    elif layout == "kept":
        yield f"ffn_gate_up_exps.{ending}", values
    else:
        half = values.shape[1] // 2
        in_turns = layout == "interleaved"
        yield f"ffn_gate_exps.{ending}", values[:, ::2] if in_turns else values[:, :half]
        yield f"ffn_up_exps.{ending}", values[:, 1::2] if in_turns else values[:, half:]


def _divisors(name: str, config: Any) -> dict[str, np.ndarray]:
    """What scaling makes of frequencies, where the converter stores it."""
    rope = rope_of(config, "full_attention")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], dtype=np.float32)
            for which in ("short", "long")
        }
    if rope["rope_type"] == "proportional":
        full_dim = metadata(name, config)["attention.key_length"]
        num_pairs, num_turned = full_dim // 2, int(full_dim * rope["partial_rotary_factor"] / 2)
        divisors = [1.0] * num_turned + [1e30] * (num_pairs - num_turned)
        return {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
    if rope["rope_type"] != "llama3":
        return {}
    # Of whole heads, whatever part of them turns.
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    share = (turns - low) / (high - low)
    blended = 1 / ((1 - share) / rope["factor"] + share)
    divisors = np.where(turns < low, rope["factor"], np.where(turns > high, 1.0, blended))
    return {"rope_freqs.weight": divisors.astype(np.float32)}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
