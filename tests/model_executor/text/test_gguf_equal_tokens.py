"""Tokens of every kind of GGUF vocabulary on 2,000 drawn texts, 200 by default: those of transformers' tokenizers.

Three vocabularies are real models'; the others are trained here, by the tokenizers library, on the samples.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import T5Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from lamella.model_executor.text.gguf_tokenizer import tokenizer_json
from lamella.model_executor.text.text_stream import StreamRules, TextStream
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.published_tokenizers import published_tokenizer, read_fields
from tests.helpers.text_samples import PLAIN_SAMPLES, drawn_samples

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
COUNTS = [200, pytest.param(2000, marks=pytest.mark.slow)]
MARKERS = ("<s>", "</s>", "<|turn|>", "<tool>")
GEMMA_MARKERS = ("<pad>", "<eos>", "<bos>", "<mask>")  # names that its tokenizer has, whatever a file says
MARKER_TYPES = {"<s>": CONTROL, "</s>": CONTROL, "<|turn|>": CONTROL, "<tool>": USER_DEFINED}


def assert_equal(ours: tokenizers.Tokenizer, oracle: tokenizers.Tokenizer, count: int, markers=MARKERS) -> None:
    texts = drawn_samples(count, seed=count, markers=markers)
    assert len(texts) == count
    for text in texts:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip), text


def markers_of(fields: dict[str, Any]) -> list[str]:
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind in (CONTROL, USER_DEFINED)]


# Real vocabularies.


@pytest.mark.parametrize("count", COUNTS)
def test_gemma_3(count, tmp_path):
    source = resolve_model("demo:gemma-3-270m")
    architecture, described, _ = get_gguf_tokenizer(str(source.paths[0]))
    oracle, _ = convert_gguf_tokenizer(architecture, described)
    markers = ["<start_of_turn>", "<end_of_turn>", "<bos>", "<unused7>", "<table>", "\n\n"]
    assert_equal(load_tokenizer(source, tmp_path)._backend, oracle, count, markers)


@pytest.mark.parametrize("count", COUNTS)
def test_smollm2(count, tmp_path):
    source = resolve_model("demo:smollm2-135m")
    fields = read_fields(source.paths[0])
    oracle = published_tokenizer(fields).backend_tokenizer
    assert_equal(load_tokenizer(source, tmp_path)._backend, oracle, count, markers_of(fields))


@pytest.mark.external
def test_qwen2(tmp_path):
    source = resolve_model(os.environ["LAMELLA_QWEN2_GGUF"])
    fields = read_fields(Path(source.paths[0]))
    oracle = published_tokenizer(fields).backend_tokenizer
    assert_equal(load_tokenizer(source, tmp_path)._backend, oracle, 2000, markers_of(fields))


# Trained ones.


def trained(model, pre_tokenizer, trainer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    texts = [text for text in (*PLAIN_SAMPLES, *drawn_samples(1000, seed=1)) if max(text, default="a") < "\u0400"]
    backend.train_from_iterator(texts * 2, trainer)
    return backend


def pieces_of(backend: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """(tokens in order, merges)"""
    merges = json.loads(backend.to_str())["model"]["merges"]
    vocab = backend.get_vocab()
    return sorted(vocab, key=vocab.__getitem__), [" ".join(merge) for merge in merges]


@pytest.fixture(scope="module")
def byte_level():
    """(tokens, merges) of byte-level BPE whose merges cross no words of GPT-2's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    return pieces_of(trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), trainer))


def described(kind: str, tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    return {"tokenizer_type": kind, "tokens": tokens, "token_type": types, **more}


def ours_of(said: dict[str, Any], architecture: str = "llama", **keys: Any) -> tokenizers.Tokenizer:
    names = {"tokenizer_type": "model", "pre_tokenizer_type": "pre"}
    fields: dict[str, Any] = {f"tokenizer.ggml.{names.get(key, key)}": value for key, value in said.items()}
    fields |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    fields["tokenizer.ggml.token_type"] = np.array(said["token_type"], np.int32)
    if "scores" in said:
        fields["tokenizer.ggml.scores"] = np.array(said["scores"], np.float32)
    fields["general.architecture"] = architecture
    return tokenizers.Tokenizer.from_str(tokenizer_json(TypedFields(fields, "m.gguf")))


def test_all_of_transformers_names_are_known():
    assert set(GGUF_PRE_TOKENIZER_SPLITS) <= set(PRE_TOKENIZERS)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", GGUF_PRE_TOKENIZER_SPLITS)
def test_byte_level(name, count, byte_level):
    tokens, merges = byte_level
    types = [NORMAL] * len(tokens) + [MARKER_TYPES[each] for each in MARKERS]
    said = described("gpt2", [*tokens, *MARKERS], types, merges=merges, pre_tokenizer_type=name)
    oracle, _ = convert_gguf_tokenizer("llama", said)
    if PRE_TOKENIZERS[name].normal_form:  # the models' own files say so, GGUF does not
        oracle.normalizer = normalizers.NFC()
    assert_equal(ours_of(said), oracle, count)


@pytest.fixture(scope="module")
def sentencepiece():
    """(tokens, types, scores, merges) of BPE on texts whose spaces are U+2581."""
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    spaces = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=True)
    pieces, merges = pieces_of(trained(models.BPE(), spaces, trainer))
    head = ["<unk>", *MARKERS, *GEMMA_MARKERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    assert len(merges) > 300
    types = [
        UNKNOWN,
        *(MARKER_TYPES[each] for each in MARKERS),
        *[CONTROL] * len(GEMMA_MARKERS),
        *[BYTE] * 256,
        *[NORMAL] * len(pieces),
    ]
    rank = {merge.replace(" ", ""): index for index, merge in reversed(list(enumerate(merges)))}
    tokens = [*head, *pieces]
    return tokens, types, [-float(rank.get(token, 0)) for token in tokens], merges


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_sentencepiece(architecture, count, sentencepiece):
    tokens, types, scores, _ = sentencepiece
    said = described("llama", tokens, types, scores=scores)
    oracle, _ = convert_gguf_tokenizer(architecture, said)
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ours = ours_of(said, architecture, **ids)
    assert_equal(ours, oracle, count)
    assert ours.encode("a").ids[0] == 1


@pytest.mark.parametrize("count", COUNTS)
def test_gemma_4(count, sentencepiece):
    tokens, types, scores, merges = sentencepiece
    said = described("gemma4", tokens, types, scores=scores, merges=merges)
    oracle, _ = convert_gguf_tokenizer("gemma4", said)
    ours = ours_of(said, "gemma4", unknown_token_id=0, bos_token_id=1, eos_token_id=2, add_bos_token=True)
    assert_equal(ours, oracle, count)
    assert ours.encode("<s>a").ids[:1] == [1]
    assert 1 not in ours.encode("a").ids  # the chat template writes it
    del said["merges"]
    with pytest.raises(ModelLoadError, match="merges is missing"):
        ours_of(said, "gemma4", unknown_token_id=0)


@pytest.fixture(scope="module")
def unigram():
    """(token, log probability) of T5's shape: pad, end and unknown tokens come first."""
    trainer = trainers.UnigramTrainer(vocab_size=700, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    spaces = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    backend = trained(models.Unigram(), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces]), trainer)
    pieces = [tuple(each) for each in json.loads(backend.to_str())["model"]["vocab"] if each[0] != "<unk>"]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces]


def unigram_said(vocab, **more):
    tokens, scores = map(list, zip(*vocab, strict=True))
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(tokens) - 3)]
    return described("t5", tokens, types, scores=scores, **more)


UNIGRAM_IDS = {"padding_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}


@pytest.mark.parametrize("count", COUNTS)
def test_unigram(count, unigram):
    # Scores are stored in 32 bits.
    vocab = [(token, float(np.float32(score))) for token, score in unigram]
    oracle = T5Tokenizer(vocab=vocab, extra_ids=0).backend_tokenizer
    ours = ours_of(unigram_said(vocab), "t5", **UNIGRAM_IDS)
    assert_equal(ours, oracle, count, ("</s>", "<pad>"))
    assert ours.encode("a b").ids == oracle.encode("a b").ids
    assert ours.encode("a").ids[-1] == 1  # as llama.cpp and T5 have it
    rules = StreamRules.of(ours)
    for text in drawn_samples(100, seed=5):
        ids, stream = ours.encode(text).ids, TextStream(ours, rules, True)
        assert "".join(stream.step(token_id) for token_id in ids) == ours.decode(ids)


def test_unigram_without_a_space_before_a_text(unigram):
    said = unigram_said(unigram)
    ours = ours_of(said, **UNIGRAM_IDS, add_space_prefix=False, add_eos_token=False, remove_extra_whitespaces=False)
    oracle = tokenizers.Tokenizer(models.Unigram([(t, float(np.float32(s))) for t, s in unigram], unk_id=2))
    oracle.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    for text in drawn_samples(200, seed=3):
        assert ours.encode(text).ids == oracle.encode(text).ids, text
    assert ours.encode("a  b").ids != ours.encode("a b").ids


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"unknown_token_id": None}, "unknown_token_id is missing"),
        ({"precompiled_charsmap": "x"}, "precompiled_charsmap must be an array of bytes"),
        ({"precompiled_charsmap": np.zeros(3)}, "precompiled_charsmap must be an array of bytes"),
        ({"add_space_prefix": 1}, "add_space_prefix=1"),
    ],
)
def test_keys_of_a_unigram_file_of_the_wrong_kind_are_named(changes, reason, unigram):
    said = unigram_said(unigram)
    fields = {f"tokenizer.ggml.{key}": value for key, value in {**said, **UNIGRAM_IDS, "model": "t5"}.items()}
    fields["tokenizer.ggml.token_type"] = np.array(said["token_type"], np.int32)
    fields["tokenizer.ggml.scores"] = np.array(said["scores"], np.float32)
    for key, value in changes.items():
        fields[f"tokenizer.ggml.{key}"] = np.array(value, np.float32) if isinstance(value, list) else value
        if value is None:
            del fields[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: .*{reason}"):
        tokenizer_json(TypedFields(fields, "m.gguf"))
