"""A GGUF vocabulary: what is special where the file marks it wrongly or not at all, and keys of the wrong kind.

The oracle is transformers on a file that marks every token rightly.
"""

import numpy as np
import pytest
import tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.gguf_tokenizer import tokenizer_json
from lamella.model_executor.text.text_stream import StreamRules, TextStream
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.gguf_vocabulary import save
from tests.helpers.tiny_gguf import TOKEN_TYPES, tiny_vocabulary

TURNS = ("<start_of_turn>", "<end_of_turn>", "<|tool|>")
PLAIN = ("<table>", "[multimodal]", "\n\n", "\n")
TEXTS = (
    "<start_of_turn>abc<end_of_turn>\n\nab",
    "<table>abc</table> [multimodal] a\n\n\nb",
    "<bos>a<|tool|>b<custom>c<unused300>",
    " abc  <eos>",
    "",
    "<mask>",
    "<pad>a<unk>b",
)


def vocabulary():
    """Tokens and their right types."""
    tokens, types = tiny_vocabulary(320)
    kinds = {
        **dict.fromkeys(TURNS, "control"),
        **dict.fromkeys(PLAIN, "user_defined"),
        "<custom>": "control",
        "<mask>": "control",
    }
    for index, (token, kind) in enumerate(kinds.items(), start=len(tokens) - 20):
        if token in tokens:
            continue
        tokens[index], types[index] = token, TOKEN_TYPES[kind]
    return tokens, types


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    tokens, types = vocabulary()
    save(folder / "m.gguf", tokens, types)
    _, described, _ = get_gguf_tokenizer(str(folder / "m.gguf"))
    backend, _ = convert_gguf_tokenizer("gemma3", described)
    return backend


def assert_equal(ours, oracle):
    for text in TEXTS:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids, skip_special_tokens=False)


def load(path, cache):
    return load_tokenizer(resolve_model(str(path)), cache)


def test_right_types(oracle, tmp_path):
    path = save(tmp_path / "m.gguf", *vocabulary())
    for _ in range(2):  # made, then read back from the cache folder
        assert_equal(load(path, tmp_path), oracle)


def test_markers_typed_as_normal_tokens(oracle, tmp_path):
    tokens, types = vocabulary()
    for token in (*TURNS, "<custom>"):
        types[tokens.index(token)] = TOKEN_TYPES["normal"]
    tokenizer = load(save(tmp_path / "m.gguf", tokens, types), tmp_path)
    assert len(tokenizer.encode("<start_of_turn>", add_special_tokens=False)) == 1
    assert_equal(tokenizer, oracle)


@pytest.mark.parametrize("missing", ["bos", "eos", "unk", "pad"])
def test_types_make_tokens_special_that_no_key_names(oracle, tmp_path, missing):
    tokens, types = vocabulary()
    names = [name for name in ("bos", "eos", "unk", "pad") if name != missing]
    assert_equal(load(save(tmp_path / "m.gguf", tokens, types, names), tmp_path / "cache"), oracle)


def test_no_types_at_all(oracle, tmp_path):
    tokens, _ = vocabulary()
    for _ in range(2):
        assert_equal(load(save(tmp_path / "m.gguf", tokens, None), tmp_path), oracle)


def test_end_of_turn_named_by_its_key_is_special(tmp_path):
    tokens, types = vocabulary()
    types[tokens.index("<table>")] = TOKEN_TYPES["normal"]
    tokenizer = load(save(tmp_path / "m.gguf", tokens, types, eot_token_id=tokens.index("<table>")), tmp_path)
    assert tokenizer.decode(tokenizer.encode("a<table>b")) == "ab"


def test_all_special_ids_name_every_special_token(oracle, tmp_path):
    tokenizer = load(save(tmp_path / "m.gguf", *vocabulary()), tmp_path)
    wanted = {token_id for token_id, token in oracle.get_added_tokens_decoder().items() if token.special}
    assert set(tokenizer.all_special_ids) == wanted


def test_stated_merges_equal_transformers(tmp_path):
    """A file that lists its merges is read as transformers reads it."""
    import gguf

    tokens, types = tiny_vocabulary(320)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_token_merges(["b c", "a bc", "\u2581 abc"])
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    backend, _ = convert_gguf_tokenizer("gemma3", get_gguf_tokenizer(str(path))[1])
    ours = load(path, tmp_path)
    for text in ("abc", " abc ab", "abbc  a"):
        assert ours.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


# SentencePiece files of other families: a space before a text, and merges in the order of scores.

LLAMA_PIECES = ["\u2581", "a", "b", "c", "\u2581a", "ab", "bc", "abc", "\u2581ab", "\u2581b", "\u2581\u2581"]
LLAMA_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LLAMA_PIECES, "[INST]", "<tool>"]
LLAMA_TYPES = [2, 3, 3, *[6] * 256, *[1] * len(LLAMA_PIECES), 3, 4]
LLAMA_TEXTS = (
    *(
        "abc",
        " abc",
        "  abc",
        "a b  c",
        "",
        " ",
        "\n",
        "é\u2581a",
        "abcabc ab",
        "日本 a\t",
        "[INST]abc",
        "[INST] abc[INST]b",
    ),
    *("a[INST]", "<s>ab</s>", "<tool>b<tool> b", "ab <unk>", "a" * 30, "x", " x ", "🙂a"),
)


def llama_fields(scores, /, **changes):
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": LLAMA_TOKENS,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(LLAMA_TYPES, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return TypedFields({key: value for key, value in fields.items() if value is not None}, "m.gguf")


def piece_scores(order):
    """As SentencePiece has them: the piece that is to be merged first has the largest."""
    rank = {piece: index for index, piece in enumerate(order)}
    return [-float(rank.get(token, 0)) for token in LLAMA_TOKENS]


IN_ORDER = LLAMA_PIECES
REVERSED = LLAMA_PIECES[::-1]


@pytest.mark.parametrize("order", [IN_ORDER, REVERSED])
def test_a_llama_file_equals_transformers(order):
    scores = piece_scores(order)
    described = {
        "tokenizer_type": "llama",
        "tokens": LLAMA_TOKENS,
        "scores": scores,
        "token_type": LLAMA_TYPES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    theirs, _ = convert_gguf_tokenizer("llama", described)
    ours = tokenizers.Tokenizer.from_str(tokenizer_json(llama_fields(scores)))
    for text in LLAMA_TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.encode(text).ids == [1, *ids]  # SentencePiece files that do not say get a bos
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


def test_scores_order_the_merges_and_a_space_comes_first():
    def pieces(order, **changes):
        backend = tokenizers.Tokenizer.from_str(tokenizer_json(llama_fields(piece_scores(order), **changes)))
        return backend.encode("abc", add_special_tokens=False).tokens

    assert pieces(IN_ORDER) == ["\u2581a", "bc"]
    assert pieces(REVERSED) == ["\u2581", "abc"]
    assert pieces(IN_ORDER, add_space_prefix=False) == ["abc"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": np.zeros(3)}, f"scores has 3 entries for {len(LLAMA_TOKENS)} tokens"),
        ({"scores": "x"}, "scores='x'"),
        ({"scores": np.full(len(LLAMA_TOKENS), np.nan)}, "scores="),
        ({"add_space_prefix": 1}, "add_space_prefix=1"),
    ],
)
def test_keys_of_a_llama_file_of_the_wrong_kind_are_named(changes, reason):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: .*{reason}"):
        tokenizer_json(llama_fields(piece_scores(IN_ORDER), **changes))


def test_a_llama_file_streams_what_it_decodes(tmp_path):
    """The space before a text comes off its first token, or off the first character of its bytes."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_json(llama_fields(piece_scores(IN_ORDER))))
    rules = StreamRules.of(backend)
    assert (len(rules.byte_of), rules.num_stripped) == (256, 1)
    for text in LLAMA_TEXTS:
        for skip in (True, False):
            stream = TextStream(backend, rules, skip)
            ids = backend.encode(text).ids
            assert "".join(stream.step(token_id) for token_id in ids) == backend.decode(ids, skip_special_tokens=skip)


GOOD = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": np.array([3, 3, 3, 2, 1, 1, 1], np.int32),
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 3,
}


def test_good_metadata_are_taken():
    assert '"ab":6' in tokenizer_json(TypedFields(GOOD, "m.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model", 5, "model=5"),
        ("model", "bert", "'bert' cannot be built from GGUF; known: 'llama' .*'gpt2'"),
        ("tokens", "abc", "cannot be built"),
        ("tokens", ["a", "b", "c", "d", "a"], "token twice: 'a'"),
        ("bos_token_id", "2", "bos_token_id='2'"),
        ("bos_token_id", -1, "bos_token_id=-1"),
        ("bos_token_id", 2.0, r"bos_token_id=2\.0"),
        ("bos_token_id", True, "bos_token_id=True"),
        ("bos_token_id", 7, "bos_token is token 7, but there are 7 tokens"),
        ("eot_token_id", 7, "eot_token_id=7"),
        ("eot_token_id", "x", "eot_token_id='x'"),
        ("token_type", 3, "token_type=3"),
        ("token_type", np.array([1.5] * 7), "token_type="),
        ("token_type", np.array([1], np.int32), "1 entries for 7 tokens"),
        ("add_bos_token", "yes", "add_bos_token='yes'"),
        ("merges", 5, "merges=5"),
        ("merges", ["ab"], r"merges\[0\]='ab'"),
        ("merges", ["a b", "a b c"], r"merges\[1\]='a b c'"),
        ("merges", np.zeros(3), "merges="),
    ],
)
def test_keys_of_the_wrong_kind_are_named(key, value, reason):
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: .*{reason}"):
        tokenizer_json(TypedFields({**GOOD, f"tokenizer.ggml.{key}": value}, "m.gguf"))
