import json
import struct

import pytest
from transformers import AutoTokenizer

from lamella.errors import ModelLoadError, RequestError
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.tiny_gemma import CHAT_TEMPLATE, save_tiny_gemma, save_tiny_tokenizer
from tests.helpers.tiny_gguf import save_tiny_gguf

TEXTS = (
    "",
    "the quick brown fox",
    "  spaces \n\n and\ttabs ",
    "h\u00e9llo \u4f60\u597d \U0001f600",
    "<turn>a</turn><eos>",
    "<bos>x",
)
MESSAGES = [
    {"role": "user", "content": " Hi \n"},
    {"role": "model", "content": "Hello."},
    {"role": "user", "content": "?"},
]


def source_of(folder):
    """A folder with a configuration and a tokenizer, but no weights."""
    (folder / "config.json").write_text("{}")
    return resolve_model(str(folder), "dummy")


@pytest.fixture
def folder(tmp_path):
    save_tiny_tokenizer(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    "changes", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}, {"add_eos_token": True}]
)
def test_equals_transformers(folder, changes):
    edit_config(folder, **changes)
    ours, theirs = load_tokenizer(source_of(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (320, 2, 1)
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (320, 2, 1)
    assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


def test_special_token_given_with_its_flags(folder):
    edit_config(folder, bos_token={"content": "<bos>", "lstrip": False, "normalized": False, "rstrip": False})
    tokenizer = load_tokenizer(source_of(folder))
    assert tokenizer.bos_token_id == 2
    assert tokenizer.apply_chat_template(MESSAGES[:1]).startswith("<bos><turn>")


def test_stored_truncation_and_padding_are_not_applied(folder):
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    before = load_tokenizer(source_of(folder)).encode("the quick brown fox jumps")
    path.write_text(json.dumps(document))
    assert load_tokenizer(source_of(folder)).encode("the quick brown fox jumps") == before
    assert len(before) > 3


def test_text_goes_round(folder):
    tokenizer = load_tokenizer(source_of(folder))
    for text in TEXTS[:4]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("skip", [True, False])
def test_stream_gives_whole_characters_that_join_to_the_text(folder, skip):
    tokenizer = load_tokenizer(source_of(folder))
    text = "h\u00e9llo \U0001f600 \u4f60\u597d"
    ids = tokenizer.encode(text)
    stream = tokenizer.decode_stream(skip_special_tokens=skip)
    steps = [stream.step(token_id) for token_id in ids]
    assert "".join(steps) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert not any("\ufffd" in step for step in steps)


def test_stream_holds_back_an_unfinished_character(folder):
    tokenizer = load_tokenizer(source_of(folder))
    ids = tokenizer.encode("ab\U0001f600", add_special_tokens=False)[:-1]
    stream = tokenizer.decode_stream()
    steps = [stream.step(token_id) for token_id in ids]
    assert "".join(steps) == "ab"


def test_chat_prompt_is_this_text(folder):
    tokenizer = load_tokenizer(source_of(folder))
    assert tokenizer.apply_chat_template(MESSAGES) == (
        "<bos><turn>user\nHi</turn>\n<turn>model\nHello.</turn>\n<turn>user\n?</turn>\n<turn>model\n"
    )
    assert tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=False) == "<bos><turn>user\nHi</turn>\n"
    assert tokenizer.apply_chat_template(MESSAGES[:1], chat_template="{{ eos_token }}{{ x }}", x=5) == "<eos>5"


@pytest.mark.parametrize("place", ["jinja", "list"])
def test_other_places_for_the_template(folder, place):
    if place == "jinja":
        (folder / "chat_template.jinja").write_text("J{{ messages | length }}")
    else:
        edit_config(
            folder,
            chat_template=[
                {"name": "tool_use", "template": "T"},
                {"name": "default", "template": "J{{ messages | length }}"},
            ],
        )
    assert load_tokenizer(source_of(folder)).apply_chat_template(MESSAGES) == "J3"


def test_chat_refusals(folder):
    tokenizer = load_tokenizer(source_of(folder))
    with pytest.raises(RequestError, match="at least one message"):
        tokenizer.apply_chat_template([])
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="{% if %}")
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        tokenizer.apply_chat_template(MESSAGES, continue_final_message=True)
    edit_config(folder, chat_template=None)
    without = load_tokenizer(source_of(folder))
    assert without.chat_template is None
    with pytest.raises(RequestError, match="pass chat_template="):
        without.apply_chat_template(MESSAGES)


def test_template_runs_in_a_sandbox(folder):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestError, match="unsafe"):
        load_tokenizer(source_of(folder)).apply_chat_template(MESSAGES, chat_template=escape)


def test_what_is_not_text_is_refused(folder):
    tokenizer = load_tokenizer(source_of(folder))
    for bad in (None, 5, "\ud800"):
        with pytest.raises(RequestError, match="cannot be tokenized"):
            tokenizer.encode(bad)


def test_missing_and_damaged_tokenizer_files(folder):
    source = source_of(folder)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(source)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        load_tokenizer(source)


# A GGUF vocabulary.


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = save_tiny_gemma(folder / "hf", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    save_tiny_gguf(folder / "m.gguf", model, tokenizer__chat_template=CHAT_TEMPLATE)
    return folder / "m.gguf"


def test_gguf_vocabulary_equals_transformers(gguf_path, tmp_path):
    theirs = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file="m.gguf")
    for _ in range(2):  # made, then read back from the cache folder
        ours = load_tokenizer(resolve_model(str(gguf_path)), tmp_path)
        for text in (
            "abc abc  ab a b c",
            " a  b",
            "xyz \u00e9",
            "<bos>abc<eos>",
            "<end_of_turn>abcabc <unused300>",
            "",
            "  ",
        ):
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids
            assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (2, 1, 320)
    assert ours.apply_chat_template(MESSAGES[:1]) == "<bos><turn>user\nHi</turn>\n<turn>model\n"


def test_merges_follow_the_vocabulary_order(gguf_path, tmp_path):
    tokenizer = load_tokenizer(resolve_model(str(gguf_path)), tmp_path)
    # "ab" comes before "bc": "abc" is made of it, and of "a" "b" the pair "ab" wins over "bc".
    pieces = {text: tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "bc", "abc", "abbc", "  ")}
    vocabulary = {"  ": 261, "a": 263, "b": 264, "c": 265, "ab": 266, "bc": 267, "abc": 268}
    assert pieces == {
        "ab": [vocabulary["ab"]],
        "bc": [vocabulary["bc"]],
        "abc": [vocabulary["abc"]],
        "abbc": [vocabulary["ab"], vocabulary["bc"]],
        "  ": [vocabulary["  "]],
    }


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_damaged_converted_tokenizer_is_made_anew(gguf_path, tmp_path, damage):
    source = resolve_model(str(gguf_path))
    wanted = load_tokenizer(source, tmp_path).encode("abc \u00e9")
    (entry,) = tmp_path.rglob("*.json")
    good = entry.read_bytes()
    entry.write_bytes(good[:200] if damage == "cut" else b"")
    assert load_tokenizer(source, tmp_path).encode("abc \u00e9") == wanted
    assert entry.read_bytes() == good


def test_unwritable_cache_folder_is_no_obstacle(gguf_path, tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    tokenizer = load_tokenizer(resolve_model(str(gguf_path)), tmp_path / "file" / "cache")
    assert tokenizer.encode("abc") == [2, 268]
    assert "cannot be kept" in caplog.text


def test_other_kinds_of_gguf_tokenizer_are_refused(gguf_path, tmp_path):
    copy = tmp_path / "m.gguf"
    copy.write_bytes(gguf_path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gpt-2", 1))
    with pytest.raises(ModelLoadError, match="'gpt-2' cannot be built"):
        load_tokenizer(resolve_model(str(copy)), tmp_path)


def test_special_token_beyond_the_vocabulary_is_refused(gguf_path, tmp_path):
    copy = tmp_path / "m.gguf"
    key = b"tokenizer.ggml.bos_token_id" + struct.pack("<I", 4)
    data = gguf_path.read_bytes()
    assert data.count(key + struct.pack("<I", 2)) == 1
    copy.write_bytes(data.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 320)))
    with pytest.raises(ModelLoadError, match="bos_token is token 320, but there are 320 tokens"):
        load_tokenizer(resolve_model(str(copy)), tmp_path)
