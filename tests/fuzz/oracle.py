"""What readers that are not ours make of a model's files: transformers, safetensors and gguf.

Each function returns plain values, or raises whatever the reader raises.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf.quants import dequantize
from safetensors.numpy import load_file

from tests.helpers.tiny_gemma import native_name

TEXTS = (
    *("the quick brown fox", " the  cat   sat", "", "a", "  ", "\n\n\t", "0 1 2 10 100 1000", "for i in range(10):\n"),
    *(
        "<bos>",
        "<eos>the",
        "a <turn> b </turn>",
        "<pad><unk>",
        "<end_of_turn>x",
        "caf\u00e9 na\u00efve",
        "\u65e5\u672c\u8a9e",
    ),
    *("\U0001f600 ok \U0001f680", "\u2581 under", "abc ab  a", "x" * 200, "e\u0301\u200d\ufeff"),
)
MESSAGES = (
    [{"role": "user", "content": "the quick fox"}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
)
# What of a config.json and of a tokenizer_config.json bears on the answers; transformers checks more than that.
_CONFIG_KEYS = frozenset(
    [
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "query_pre_attn_scalar",
        "layer_types",
        "sliding_window",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "final_logit_softcapping",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "dtype",
        "torch_dtype",
        "hidden_activation",
        "attention_bias",
        "use_bidirectional_attention",
    ]
)


def _norm_offset(name: str, values: np.ndarray, offset: float) -> np.ndarray:
    return values + np.float32(offset) if name.endswith("norm.weight") else values


def _fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Separate projections (transformers' names) as the rows of one matrix each; norms by the native model's names."""
    fused = {}
    for name, values in tensors.items():
        if ".q_proj." in name:
            parts = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.replace("q_proj", "qkv_proj")] = np.concatenate([tensors[part] for part in parts])
        elif ".gate_proj." in name:
            fused[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(
                [values, tensors[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            fused[native_name(name)] = values
    return fused


# A folder as transformers reads it


def folder_weights(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    names = set(json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))["weight_map"].values())
    for name in names:
        tensors |= load_file(folder / name)
    plain = {name.removeprefix("model."): values.astype(np.float32) for name, values in tensors.items()}
    return _fused({name: _norm_offset(name, values, 1.0) for name, values in plain.items()})


def folder_config(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig, Gemma3TextConfig

    scalar = None
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception:
        # What it refuses may be a field that no answer depends on, or a number written the other way.
        given = json.loads((folder / "config.json").read_text("utf-8"))
        values = {key: value for key, value in given.items() if key in _CONFIG_KEYS}
        for key in ("final_logit_softcapping", "rms_norm_eps"):
            values[key] = float(values[key]) if type(values.get(key)) is int else values.get(key)
        if type(values.get("query_pre_attn_scalar")) is float:
            scalar = values.pop("query_pre_attn_scalar")
        config = Gemma3TextConfig(**values)
    config = config.get_text_config()
    scalar = config.query_pre_attn_scalar if scalar is None else scalar
    softcap = config.final_logit_softcapping
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "query_scale": scalar**-0.5,
        "final_logit_softcap": softcap,
        "layers": [
            (kind, config.sliding_window if kind == "sliding_attention" else None, *_rope(config, kind))
            for kind in config.layer_types
        ],
    }


def _rope(config: Any, kind: str) -> tuple[float, float]:
    rope = config.rope_parameters[kind]
    return rope["rope_theta"], rope["factor"] if rope["rope_type"] == "linear" else 1.0


def folder_end_tokens(folder: Path) -> set[int]:
    for name in ("generation_config.json", "config.json"):
        given = json.loads((folder / name).read_text("utf-8"))
        found = given.get("eos_token_id")
        if found is not None:
            return set(found) if isinstance(found, list) else {found}
    return {1}  # Gemma3TextConfig's own


def folder_sampling(folder: Path) -> dict[str, Any]:
    given = json.loads((folder / "generation_config.json").read_text("utf-8"))
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    values = {key: given[key] if given.get(key) is not None else default for key, default in defaults.items()}
    # Below this, dividing by the temperature leaves one token: no draw would differ, whatever it is made from.
    if given.get("do_sample") is False or values["temperature"] < 1e-5:
        return {**defaults, "temperature": 0.0, "repetition_penalty": values["repetition_penalty"]}
    return values


class FolderTokenizer:
    """transformers' tokenizer of a folder: what tokenizer.json says, not what a class of a model's name makes of it.

    Where it refuses what is beside tokenizer.json, or asks of it what its own library does not, that library reads it.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tokenizer: Any = None
        with contextlib.suppress(Exception), _with_added_tokens(folder) as whole:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(whole)

    def ids(self) -> list[list[int]]:
        if self._tokenizer is None:
            return [self._backend.encode(text).ids for text in TEXTS]
        return [list(self._tokenizer(text).input_ids) for text in TEXTS]

    def chat(self, messages: list[dict[str, str]]) -> str | None:
        """None: nobody else says."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@contextlib.contextmanager
def _with_added_tokens(folder: Path) -> Iterator[Path]:
    """`folder`, or a copy in which the list is written out: to the tokenizers library an absent one is an empty one,
    and transformers fails on it with a bare KeyError."""
    document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if "added_tokens" in document:
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        (Path(copy) / "tokenizer.json").write_text(json.dumps({**document, "added_tokens": []}), "utf-8")
        yield Path(copy)


def gguf_ids(path: Path) -> list[list[int]]:
    """Ids of TEXTS by the tokenizer that transformers makes of a GGUF file.

    Of a token's types it knows control tokens alone. llama.cpp, whose format this is, cuts tokens out of a text that
    are typed unknown as well.
    """
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    fields = GgufFile(path).tokenizer_fields()
    typed = zip(fields[gguf.Keys.Tokenizer.LIST], fields.get(gguf.Keys.Tokenizer.TOKEN_TYPE, []), strict=False)
    unknown = [token for token, kind in typed if kind == gguf.TokenType.UNKNOWN]
    added = [AddedToken(token, special=True, normalized=False) for token in unknown]
    tokenizer.add_tokens(added, special_tokens=True)
    return [list(tokenizer(text).input_ids) for text in TEXTS]


# A GGUF file as the gguf package reads it

_GGUF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}


class GgufFile:
    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._fields = {name: field.contents() for name, field in self._reader.fields.items()}

    def tokenizer_fields(self) -> dict[str, Any]:
        return {name: value for name, value in self._fields.items() if name.startswith("tokenizer.")}

    def weights(self) -> dict[str, np.ndarray]:
        tensors = {}
        for tensor in self._reader.tensors:
            stem, suffix = tensor.name.rsplit(".", 1)
            if stem.startswith("blk."):
                _, layer, part = stem.split(".")
                name = f"layers.{layer}.{_GGUF_LAYER[part]}.{suffix}"
            else:
                name = f"{_GGUF_TOP[stem]}.{suffix}"
            values = dequantize(tensor.data, tensor.tensor_type)
            tensors[name] = values.reshape([int(size) for size in tensor.shape[::-1]]).astype(np.float32)
        return _fused(tensors)

    def config(self) -> dict[str, Any]:
        fields = self._fields

        def get(key: str, default: Any = None) -> Any:
            return fields.get(f"gemma3.{key}", default)

        num_layers, head_dim = get("block_count"), get("attention.key_length")
        pattern = get("attention.sliding_window_pattern", 6)
        if isinstance(pattern, list):
            kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        else:
            kinds = [
                "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)
            ]
        # An absent type means linear, as in llama.cpp.
        scaled = get("rope.scaling.type", "linear") == "linear"
        factor = (get("rope.scaling.factor") or get("rope.scale_linear") or 1.0) if scaled else 1.0
        ropes = {
            "full_attention": (None, get("rope.freq_base", 1_000_000.0), factor),
            "sliding_attention": (get("attention.sliding_window"), get("rope.freq_base_swa", 10_000.0), 1.0),
        }
        (embeddings,) = (tensor for tensor in self._reader.tensors if tensor.name == "token_embd.weight")
        return {
            "vocab_size": int(embeddings.shape[1]),
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_heads": get("attention.head_count"),
            "num_kv_heads": get("attention.head_count_kv"),
            "head_dim": head_dim,
            "norm_eps": get("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": get("context_length"),
            "query_scale": head_dim**-0.5,
            "final_logit_softcap": get("final_logit_softcapping"),
            "layers": [(kind, *ropes[kind]) for kind in kinds],
        }

    def end_tokens(self) -> set[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        return {self._fields[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in self._fields}
