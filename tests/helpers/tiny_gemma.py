"""A Gemma 3 small enough to run in every test, saved as transformers saves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] | trim }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
VOCAB_SIZE = 320
# Of a layer: as transformers and as the native model names them.
LAYER_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "</turn>")
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat",
    "a window slides over the tokens while the full layers keep every key and value",
    "there is no cache like a warm cache; then the next request came and the other went",
    "0 1 2 3 10 11 12 100 1000 for i in range(10): print(i)\n",
)


def save_tiny_gemma(path: Path, *, seed: int = 0, max_shard_size: str = "1GB", **config_overrides: Any) -> Any:
    """Write a random Gemma 3 text model with tokenizer to the folder `path` and return the transformers model
    (eval mode, float32 unless `dtype` is overridden).

    Six layers of which every third is full, windows of 16 tokens, 320 tokens. `config_overrides` go to
    Gemma3TextConfig. Weights are large enough that greedy outputs vary, and norms differ from 1.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }
    config = Gemma3TextConfig(**{**settings, **config_overrides})
    model = Gemma3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Small embeddings: tied to the output, larger ones would only make the model repeat its input.
            spread = 0.3 if name.endswith("norm.weight") else 0.03 if "embed_tokens" in name else 0.15
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model = model.to(getattr(torch, str(config.dtype).removeprefix("torch.")))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    save_tiny_tokenizer(path)
    return model


def save_tiny_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer of 320 tokens that starts texts with <bos>, with a chat template."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", _SPECIAL_TOKENS.index("<bos>"))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def native_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the native model's parameters for a `Gemma3TextConfig` (tied embeddings)."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    for layer in range(config.num_hidden_layers):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.qkv_proj": (query_rows + 2 * kv_rows, hidden),
                "self_attn.o_proj": (hidden, query_rows),
                "self_attn.q_norm": (head_dim,),
                "self_attn.k_norm": (head_dim,),
                "mlp.gate_up_proj": (2 * config.intermediate_size, hidden),
                "mlp.down_proj": (hidden, config.intermediate_size),
                **dict.fromkeys(LAYER_NORMS.values(), (hidden,)),
            }.items()
        }
    return shapes


def native_name(name: str) -> str:
    """Of a parameter that transformers calls `name`, "layers.0.input_layernorm.weight"."""
    *place, norm, ending = name.rsplit(".", 2)
    return ".".join([*place, LAYER_NORMS.get(norm, norm), ending])


def native_weights(model: Any) -> dict[str, torch.Tensor]:
    """The transformers model's weights as the native model names, fuses and stores them (float32, 1 + w norms)."""
    state = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    fused = {}
    for name, value in state.items():
        if name.endswith("norm.weight"):
            fused[native_name(name)] = 1.0 + value.float()
        elif ".q_proj." in name:
            names = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat([state[part] for part in names])
        elif ".gate_proj." in name:
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [value, state[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            fused[name] = value
    if model.config.tie_word_embeddings:
        fused.pop("lm_head.weight", None)
    return fused
