"""The calls of a transformers tokenizer that scripts use: same names, same answers."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from lamella.errors import RequestError
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.tiny_gemma import save_tiny_tokenizer

TEXTS = ["the quick brown fox", "", "<turn>h\u00e9llo</turn><eos>", "  spaces \n"]
MESSAGES = [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(resolve_model(str(folder), "dummy"))


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [*TEXTS, TEXTS, tuple(TEXTS), []])
@pytest.mark.parametrize("special", [True, False])
def test_call(ours, theirs, text, special):
    if text == []:
        assert ours(text) == {"input_ids": [], "attention_mask": []}
        return
    wanted = theirs(text, add_special_tokens=special)
    given = ours(text, add_special_tokens=special)
    assert dict(given) == dict(wanted)
    assert given.input_ids == wanted.input_ids
    with pytest.raises(AttributeError):
        _ = given.nothing


@pytest.mark.parametrize("skip", [True, False])
def test_batch_decode(ours, theirs, skip):
    ids = [theirs(text)["input_ids"] for text in TEXTS]
    wanted = theirs.batch_decode(ids, skip_special_tokens=skip)
    assert ours.batch_decode(ids, skip_special_tokens=skip) == wanted
    assert ours.decode(ids, skip_special_tokens=skip) == wanted
    assert ours.batch_decode([np.array(one) for one in ids], skip_special_tokens=skip) == wanted
    assert ours.batch_decode(ids) == theirs.batch_decode(ids)
    assert ours.batch_decode([]) == theirs.batch_decode([]) == []
    assert ours.batch_decode(ids[0]) == theirs.batch_decode(ids[0])


def test_decode_takes_arrays_and_single_ids(ours, theirs):
    ids = theirs(TEXTS[0])["input_ids"]
    assert ours.decode(np.array(ids), False) == theirs.decode(np.array(ids))
    assert ours.decode(ids[1], False) == theirs.decode(ids[1])
    assert ours.decode(tuple(ids), False) == theirs.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
def test_convert_ids_to_tokens(ours, theirs, skip):
    ids = theirs(TEXTS[2])["input_ids"]
    assert ours.convert_ids_to_tokens(ids, skip_special_tokens=skip) == theirs.convert_ids_to_tokens(ids, skip)
    assert ours.convert_ids_to_tokens(np.array(ids), skip) == theirs.convert_ids_to_tokens(np.array(ids), skip)
    assert ours.convert_ids_to_tokens(ids[3]) == theirs.convert_ids_to_tokens(ids[3])
    assert ours.convert_ids_to_tokens([10**6]) == theirs.convert_ids_to_tokens([10**6]) == [None]


def test_convert_tokens_to_ids(ours, theirs):
    tokens = [*theirs.convert_ids_to_tokens(theirs(TEXTS[0])["input_ids"]), "no such token"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_ids("<eos>") == theirs.convert_tokens_to_ids("<eos>")


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("conversation", [MESSAGES, [MESSAGES, MESSAGES[:1]]])
def test_apply_chat_template(ours, theirs, conversation, prompt):
    arguments = {"add_generation_prompt": prompt}
    for form in ({"tokenize": False}, {"tokenize": True, "return_dict": False}):
        wanted = theirs.apply_chat_template(conversation, **arguments, **form)
        assert ours.apply_chat_template(conversation, **arguments, **form) == wanted
    wanted = theirs.apply_chat_template(conversation, tokenize=True, **arguments)
    assert dict(ours.apply_chat_template(conversation, tokenize=True, **arguments)) == dict(wanted)


def test_names(ours, theirs):
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("ids", ["abc", None, [1.5], [True], {"a": 1}, [None], [[1], "a"], 2.5])
def test_what_are_no_ids_is_refused(ours, ids):
    with pytest.raises(RequestError, match="token id"):
        ours.decode(ids)
    with pytest.raises(RequestError, match="token id"):
        ours.batch_decode(ids)


def test_ids_out_of_range_are_refused(ours):
    for ids in ([-1], [2**40]):
        with pytest.raises(RequestError, match="cannot be decoded"):
            ours.decode(ids)


def test_what_is_no_text_is_refused(ours):
    for text in (None, 5, [5], [["a"]], {"a": 1}):
        with pytest.raises(RequestError, match=r"str|text"):
            ours(text)
