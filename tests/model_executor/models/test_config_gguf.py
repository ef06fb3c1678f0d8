"""GGUF metadata out of its range, or that changes what a model computes and is not built, is refused by its key."""

from __future__ import annotations

import logging

import gguf
import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.loading import load_config, resolve_model
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

NAN, INFINITY = float("nan"), float("inf")
GENERAL = ("general.architecture", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_gemma(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, sliding_window_pattern=2)


def write(path, model, key, value):
    """The model's file with `value` for `key` instead of what it has; None leaves the key out."""
    name = key if key in GENERAL or key.startswith(("general.", "tokenizer.")) else f"gemma3.{key}"
    metadata = {} if value is None else {name.replace(".", "__"): value}
    writer_class = gguf.GGUFWriter

    class Writer(writer_class):
        def add_key_value(self, written, val, *arguments, **keywords):
            if value is not None or written != name:
                self.kv_data[0].pop(written, None)
                super().add_key_value(written, val, *arguments, **keywords)

    gguf.GGUFWriter = Writer
    try:
        save_tiny_gguf(path, model, **metadata)
    finally:
        gguf.GGUFWriter = writer_class
    return str(path)


REFUSED = [
    *(("final_logit_softcapping", value) for value in (-30.0, NAN, INFINITY, "30", True, [30.0])),
    *(("attention.sliding_window", value) for value in (0, "16", 16.0, True, [16, 16], 2**31, None)),
    *(("attention.sliding_window_pattern", value) for value in (0, 2.0, "2", [True], [True, False, True], [2, 1])),
    *(("attention.layer_norm_rms_epsilon", value) for value in (-1e-6, 0.0, NAN, "x", None)),
    *(("rope.freq_base", value) for value in (0.0, -1.0, NAN, INFINITY, "x", None)),
    *(("rope.freq_base_swa", value) for value in (0.0, -1.0, NAN)),
    *(("rope.scaling.factor", value) for value in (-2.0, NAN, INFINITY, "2", True)),
    *(("rope.scale_linear", value) for value in (-2.0, NAN, "2")),
    *(("rope.scaling.type", value) for value in ("yarn", "longrope", 1, True)),
    *(("rope.dimension_count", value) for value in (8, 0, "16")),
    *(("rope.scaling.attn_factor", value) for value in (0.5,)),
    *(("attention.key_length", value) for value in (15, 0, 8, "16")),
    *(("attention.value_length", value) for value in (8, 0)),
    *(("attention.head_count", value) for value in (0, 3, [4, 4], 4.0, None)),
    *(("attention.head_count_kv", value) for value in (0, 3, [2, 2])),
    *(("embedding_length", value) for value in (0, 2**31, None)),
    *(("feed_forward_length", value) for value in (0, [96, 96], None)),
    *(("block_count", value) for value in (0, 2**31, 2.0, True, None)),
    *(("context_length", value) for value in (0, 2**31, None)),
    ("attention.causal", False),
    ("attention.scale", 0.5),
    ("logit_scale", 0.5),
    ("residual_scale", 0.5),
    ("expert_count", 4),
    *(("tokenizer.ggml.eos_token_id", value) for value in ("1", 1.0, True, [1], 320, 2**31)),
    *(("tokenizer.ggml.bos_token_id", value) for value in ("2", True, 320)),
    *(("tokenizer.ggml.eot_token_id", value) for value in (2.0, 320)),
    ("tokenizer.chat_template", 5),
    *(("general.architecture", value) for value in ("mamba", 3, True, ["gemma3"])),
]


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_key_out_of_its_range_is_refused(model, tmp_path, key, value):
    path = write(tmp_path / "m.gguf", model, key, value)
    # What two keys must share is told by one of them, and sizes by the tensors that do not have them.
    others = {"attention.key_length": "|head_dim|value_length", "tokenizer.ggml.eot_token_id": "|eos_token_id"}
    others |= dict.fromkeys(("attention.head_count", "attention.head_count_kv"), "|key-value heads")
    name = key.removeprefix("general.").removeprefix("tokenizer.ggml.")
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*({name}{others.get(key, '')})"):
        load_config(resolve_model(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", True),
        ("rope.scaling.attn_factor", 1.0),
        ("rope.scaling.original_context_length", 512),
        ("rope.scaling.finetuned", True),
        ("vocab_size", 320),
        ("rope.dimension_count", 16),
        ("final_logit_softcapping", 0.0),
        ("logit_scale", 1.0),
    ],
)
def test_keys_that_change_nothing_are_taken_without_a_word(model, tmp_path, caplog, key, value):
    plain = load_config(resolve_model(write(tmp_path / "plain.gguf", model, "general.note", "x")))
    with caplog.at_level(logging.WARNING, logger="lamella"):
        assert load_config(resolve_model(write(tmp_path / "m.gguf", model, key, value))) == plain
    assert caplog.records == []


def test_keys_that_are_not_known_are_told_once(model, tmp_path, caplog):
    path = write(tmp_path / "m.gguf", model, "attention.something_new", 5)
    with caplog.at_level(logging.WARNING, logger="lamella"):
        load_config(resolve_model(path))
    (record,) = caplog.records
    assert "left out: attention.something_new=5" in record.getMessage()
