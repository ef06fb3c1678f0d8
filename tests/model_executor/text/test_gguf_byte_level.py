"""Byte-level vocabularies of GGUF files, against tokenizers put together by hand from what the models' authors
published, and against the one that transformers makes of a file."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from lamella.model_executor.text.gguf_tokenizer import tokenizer_json
from lamella.model_executor.text.text_stream import StreamRules, TextStream
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.published_tokenizers import published_tokenizer, read_fields
from tests.helpers.text_samples import PLAIN_SAMPLES, marker_samples

CONTROL, USER_DEFINED = 3, 4
CHATS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " é "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|>"},
    ],
)


@pytest.fixture(scope="module")
def smollm2_path():
    return resolve_model("demo:smollm2-135m").paths[0]


@pytest.fixture(scope="module")
def smollm2(smollm2_path, tmp_path_factory):
    """(ours, the published one)"""
    return load_tokenizer(resolve_model(str(smollm2_path)), tmp_path_factory.mktemp("cache")), published_tokenizer(
        read_fields(smollm2_path)
    )


def markers(fields):
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind in (CONTROL, USER_DEFINED)]


def assert_alike(ours, oracle, samples):
    assert len(samples) >= 200
    for text in samples:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


def assert_streams(ours, samples):
    """Token by token, the text of each sample and of random tokens is what decoding all of them gives."""
    chance = random.Random(0)
    backend, rules = ours._backend, StreamRules.of(ours._backend)
    assert not rules.byte_of
    cases = [ours.encode(text) for text in samples]
    cases += [[chance.randrange(ours.vocab_size) for _ in range(30)] for _ in range(100)]
    for ids in cases:
        for skip in (True, False):
            stream = TextStream(backend, rules, skip)
            text = "".join(stream.step(token_id) for token_id in ids)
            whole = ours.decode(ids, skip_special_tokens=skip)
            # At most one unfinished character, which shows as U+FFFD, is still held back.
            assert whole in (text, text + "\ufffd")


def test_smollm2_encodes_and_decodes_as_published(smollm2, smollm2_path):
    ours, oracle = smollm2
    assert_alike(ours, oracle, [*PLAIN_SAMPLES, *marker_samples(markers(read_fields(smollm2_path)))])


def test_smollm2_streams_what_it_decodes(smollm2):
    assert_streams(smollm2[0], PLAIN_SAMPLES)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("with_prompt", [True, False])
def test_smollm2_chats_as_transformers_renders_them(smollm2, chat, with_prompt):
    ours, oracle = smollm2
    expected = oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=with_prompt)
    assert ours.apply_chat_template(chat, add_generation_prompt=with_prompt) == expected
    ids = oracle(expected, add_special_tokens=False)["input_ids"]
    assert ours.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=with_prompt) == ids


def test_smollm2_names_its_special_tokens(smollm2):
    ours, _ = smollm2
    assert (ours.bos_token, ours.eos_token, ours.pad_token, ours.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert set(ours.all_special_ids) == set(range(17))
    assert ours.encode("a") == ours.encode("a", add_special_tokens=False)  # the file says: no bos


@pytest.mark.external
def test_qwen2_encodes_and_decodes_as_published(tmp_path):
    path = Path(os.environ["LAMELLA_QWEN2_GGUF"])
    ours, fields = load_tokenizer(resolve_model(str(path)), tmp_path), read_fields(path)
    oracle = published_tokenizer(fields)
    assert_alike(ours, oracle, [*PLAIN_SAMPLES, *marker_samples(markers(fields))])
    assert_streams(ours, PLAIN_SAMPLES)
    for chat in CHATS:
        assert ours.apply_chat_template(chat) == oracle.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
    assert ours.vocab_size == 151_665  # of 151,936, the rest fill up
    assert ours.decode([151_935], skip_special_tokens=False) == ""


# Every name in `tokenizer.ggml.pre`.


def made(fields):
    typed = {key: np.array(value) if key.endswith("token_type") else value for key, value in fields.items()}
    return tokenizers.Tokenizer.from_str(tokenizer_json(TypedFields(typed, "m.gguf")))


def test_qwen2s_rules_in_full(smollm2_path):
    fields = {**read_fields(smollm2_path), "tokenizer.ggml.pre": "qwen2"}
    ours, oracle = made(fields), published_tokenizer(fields)
    for text in PLAIN_SAMPLES:
        assert ours.encode(text).ids == oracle(text)["input_ids"], text


GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT2_NAMES = (
    *("gpt-2", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion"),
    "granite-docling",
)
DIGIT_NAMES = ("starcoder", "refact", "smollm", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
BY_HAND = {
    **dict.fromkeys(GPT2_NAMES, GPT2_WORDS),
    **dict.fromkeys(DIGIT_NAMES, pre_tokenizers.Sequence([DIGITS, GPT2_WORDS])),
}
# transformers knows the others' patterns, some by another name.
AS = {
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), "llama3"),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
}
# And some that it does not know: "|" is where a text is cut.
CUT = {
    "laguna": ("one| two|!|\n\n| |\n| b", "don|'t|\n| stop"),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        ("123|456|7| km", "ab|漢字かな|cd", ".word| .|word", "it|'s| x|:=\n\n|y", "(a|)| | b|!\n", "e\u0301| \u0301x"),
    ),
    "seed-coder": ("a|1|2| b", "x|);|\n|y", "don|'t| stop", "a| !!|\n\n|b"),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        ("a|1|2| b", "x|);\n|y", "DON|'T| stop", "a|\n\n|b", "we|'ve"),
    ),
}
# Neither gguf's nor transformers' rules know these: test_gguf_pre_tokenizers.py has them.
ELSEWHERE = {"afmoe", "bloom", "cohere2moe", "deepseek-coder", "exaone-moe", "gpt3-finnish", "jais-2", "kimi-k2"}
ELSEWHERE |= {"minicpm5", "poro-chat", "tiny_aya", "viking"}
CUT_BY_PATTERNS = [name for name in PRE_TOKENIZERS if name not in {*CUT, *ELSEWHERE}]


@pytest.mark.parametrize("name", CUT)
def test_words_are_cut_as_written_here(name):
    for marked in CUT[name]:
        ours = made(tiny(pre=name)).pre_tokenizer
        words = marked.split("|")
        text = "".join(words)
        assert [text[start:stop] for _, (start, stop) in ours.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("name", CUT_BY_PATTERNS)
def test_words_are_cut_as_the_name_says(name):
    ours = made(tiny(pre=name)).pre_tokenizer
    oracle = BY_HAND.get(name)
    if oracle is None:
        split = pre_tokenizers.Split(
            tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[AS.get(name, name)]), behavior="isolated"
        )
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        oracle = pre_tokenizers.Sequence([split, rest])
    for text in PLAIN_SAMPLES:
        assert [word for word, _ in ours.pre_tokenize_str(text)] == [
            word for word, _ in oracle.pre_tokenize_str(text)
        ], text


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TINY_TOKENS = [*ALPHABET, "<s>", "</s>", "<|turn|>", "<tool>", "[PAD0]", "ab", "abc", "\u0120ab", "bc", "<a b>"]
BOS, EOS, TURN, TOOL, PAD, AB, ABC, SPACE_AB, BC, SPACED = range(256, 266)
TINY_TYPES = [1] * 256 + [3, 3, 3, 4, 5, 1, 1, 1, 1, 3]


def tiny(**changes):
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.token_type": TINY_TYPES,
        "tokenizer.ggml.merges": ["b c", "a b"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in fields.items() if value is not None}


def letters(text):
    return [ALPHABET.index(letter) for letter in text]


def test_merges_are_in_the_order_of_the_file():
    assert made(tiny()).encode("abc").ids == [*letters("a"), BC]
    assert made(tiny(merges=["a b", "b c"])).encode("abc").ids == [AB, *letters("c")]
    assert made(tiny(merges=["a b", "b c", "ab c"])).encode("abc").ids == [ABC]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_which_names_take_a_whole_word_before_merging_and_put_a_bos(name):
    """As in llama.cpp: Llama 3's names and tekken; GLM's and MiniCPM 5's have no bos."""
    llama3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
    has_bos = name in {*llama3, "tekken"}
    is_whole = has_bos or name in {"glm4", "glm5", "minicpm5"}
    ids = made(tiny(pre=name)).encode("abc ab").ids
    words = [ABC, SPACE_AB] if is_whole else [*letters("a"), BC, *letters("\u0120"), AB]
    assert ids == ([BOS] if has_bos else []) + words


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_the_files_own_word_on_bos_and_eos_counts(name, bos, eos):
    ids = made(tiny(pre=name, add_bos_token=bos, add_eos_token=eos)).encode("a").ids
    assert ids == [BOS] * bos + letters("a") + [EOS] * eos


def test_normal_forms_are_those_of_the_models_own_files():
    """Command R and Qwen compose characters, the others take them as they come."""
    qwen = {"qwen2", "qwen35", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"}
    composed = letters("\u00c3\u00a9")  # the two bytes of é
    for name in PRE_TOKENIZERS:
        ids = [token_id for token_id in made(tiny(pre=name)).encode("e\u0301").ids if token_id != BOS]
        assert (ids == composed) == (name in {"command-r", *qwen}), name


def test_types_say_what_is_cut_out_and_what_is_special():
    backend = made(tiny())
    assert backend.encode("a<|turn|>b<tool><a b></s>").ids == [*letters("a"), TURN, *letters("b"), TOOL, SPACED, EOS]
    added = backend.get_added_tokens_decoder()
    assert {token_id: token.special for token_id, token in added.items()} == {
        BOS: True,
        EOS: True,
        TURN: True,
        TOOL: False,
        SPACED: True,
    }
    assert backend.decode([TURN, TOOL, *letters("a"), SPACED]) == "<tool>a"
    assert backend.decode([TOOL, *letters("a"), SPACED], skip_special_tokens=False) == "<tool>a<a b>"


def test_unused_tokens_are_none_of_the_tokenizers():
    backend = made(tiny())
    assert backend.id_to_token(PAD) is None
    assert backend.encode("[PAD0]").ids == letters("[PAD0]")
    assert backend.get_vocab_size() == len(TINY_TOKENS) - 1
    assert backend.id_to_token(BC) == "bc"  # ids after it stay as they are
    assert made(tiny(padding_token_id=PAD)).id_to_token(PAD) == "[PAD0]"  # but for one that a key names


@pytest.mark.parametrize("types", [None, [1] * len(TINY_TOKENS)])
def test_markers_without_a_type_of_their_own(types):
    """Converters that mark nothing, or mark turn markers as normal: `<|...|>` and what a key names are special."""
    backend = made(tiny(token_type=types, eot_token_id=TOOL))
    assert backend.encode("<s><|turn|><tool>").ids == [BOS, TURN, TOOL]
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    assert special == {BOS, EOS, TURN, TOOL}


def test_a_marker_that_merges_make_is_a_word_like_others():
    tokens = [*ALPHABET, "<|", "|>", "<||>"]
    merges = ["< |", "| >", "<| |>"]
    backend = made(tiny(tokens=tokens, token_type=None, merges=merges, bos_token_id=None, eos_token_id=None))
    assert backend.get_added_tokens_decoder() == {}
    assert backend.encode("<||>").ids == [258]


def test_transformers_makes_the_same_of_a_file(smollm2_path):
    """Where it knows the rule: Llama 3's words on SmolLM2's vocabulary, which has no loose words."""
    fields = {**read_fields(smollm2_path), "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    theirs, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": "llama-bpe",
            "tokens": fields["tokenizer.ggml.tokens"],
            "token_type": fields["tokenizer.ggml.token_type"],
            "merges": fields["tokenizer.ggml.merges"],
        },
    )
    ours = made(fields)
    for text in [*PLAIN_SAMPLES, *marker_samples(markers(fields))]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"pre": "deepseek-llm"},
            r"tokenizer\.ggml\.pre='deepseek-llm': must be one of 'gpt-2', .*'smollm', .*'qwen2'",
        ),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre='default': must be one of"),
        ({"pre": 5}, r"tokenizer\.ggml\.pre=5: must be one of"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing; must be one of"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing; must be a list of merges"),
        ({"merges": ["ab"]}, r"merges\[0\]='ab'"),
        ({"merges": 5}, "merges=5"),
        ({"tokens": ["a", "b", "a"], "token_type": None, "bos_token_id": 1, "eos_token_id": 1}, "token twice: 'a'"),
        ({"tokens": ["a", 5]}, "tokens="),
        ({"token_type": [1]}, "1 entries for 266 tokens"),
        ({"bos_token_id": 266}, "bos_token is token 266, but there are 266 tokens"),
        ({"eot_token_id": 266}, "eot_token_id=266"),
        ({"add_bos_token": 1}, "add_bos_token=1"),
        ({"add_eos_token": "no"}, "add_eos_token='no'"),
    ],
)
def test_keys_of_the_wrong_kind_are_named(changes, reason):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: .*{reason}"):
        tokenizer_json(TypedFields(tiny(**changes), "m.gguf"))


def test_merges_of_what_is_no_token_are_refused_when_a_file_is_loaded(tmp_path):
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TINY_TOKENS)
    writer.add_token_merges(["a x1"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"m\.gguf: its vocabulary makes no tokenizer"):
        load_tokenizer(resolve_model(str(path)), tmp_path / "cache")
