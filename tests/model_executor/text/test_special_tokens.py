"""What is special and what templates may name, wherever a folder states it: as transformers reads the same folder."""

import json

import pytest
from transformers import AutoTokenizer

from lamella.errors import ModelLoadError
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.tiny_gemma import save_tiny_tokenizer
from tests.helpers.tiny_tokenizers import OBJECT

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
TEMPLATE = "{{ bos_token }}|{{ eos_token }}|{{ boi_token }}|{{ image_token }}|{{ turn }}|{{ messages[0].content }}"
MESSAGES = [{"role": "user", "content": "hi"}]
TEXTS = (
    "",
    "the quick <bos> fox<eos>",
    "<turn>a</turn>",
    "a <image> b<image>c",
    "x<|im_end|>y <|im_end|>",
    " the fox ",
    "<extra> fox<extra>",
    "<pad><unk>z",
)


@pytest.fixture
def folder(tmp_path):
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    return tmp_path


def edit(folder, file="tokenizer_config.json", remove=(), **changes):
    path = folder / file
    value = json.loads(path.read_text()) if path.exists() else {}
    value = {key: item for key, item in {**value, **changes}.items() if key not in remove}
    path.write_text(json.dumps(value))


def make_plain(folder, *texts):
    """Make tokenizer.json's added tokens `texts` plain ones."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    for token in document["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in texts
    path.write_text(json.dumps(document))


def drop_added(folder, *texts):
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in texts]
    path.write_text(json.dumps(document))


def in_special_tokens_map_only(folder):
    edit(folder, remove=NAMES)
    edit(folder, "special_tokens_map.json", bos_token="<bos>", eos_token={"content": "<eos>"}, unk_token="<unk>")


def map_overrides_config(folder):
    edit(folder, "special_tokens_map.json", bos_token="<eos>", pad_token=None)


def map_ignored_beside_added_tokens_decoder(folder):
    edit(folder, remove=("bos_token",), added_tokens_decoder={"2": {**OBJECT, "content": "<bos>", "special": True}})
    edit(folder, "special_tokens_map.json", bos_token="<bos>")


def map_with_extra_tokens(folder):
    edit(folder, "special_tokens_map.json", additional_special_tokens=["<image>", "</turn>"])


def additional_special_tokens(folder):
    drop_added(folder, "<turn>", "</turn>")
    edit(folder, additional_special_tokens=["<image>", "<turn>", "</turn>"])


def extra_special_tokens(folder):
    edit(folder, extra_special_tokens=["<image>", "<extra>"], additional_special_tokens=["<|im_end|>"])


def named_extra_special_tokens(folder):
    edit(folder, extra_special_tokens={"image_token": "<image>", "boi_token": "<extra>", "turn": "<turn>"})


def named_extra_tokens_in_map(folder):
    edit(folder, "special_tokens_map.json", extra_special_tokens={"image_token": "<image>"})


def listed_extra_tokens_in_map(folder):
    edit(folder, extra_special_tokens=["<image>"])
    edit(folder, "special_tokens_map.json", extra_special_tokens=["<extra>", {"content": "<|im_end|>"}])


def names_of_the_models_own(folder):
    edit(folder, boi_token="<image>", image_token={"__type": "AddedToken", **OBJECT, "content": "<extra>"})


def added_tokens_decoder(folder):
    drop_added(folder, "<turn>", "</turn>")
    decoder = {
        "4": {**OBJECT, "content": "<turn>", "special": True},
        "5": {**OBJECT, "content": "</turn>", "special": False},
        "320": {**OBJECT, "special": True},
        "321": {"content": "<extra>", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False},
    }
    edit(folder, added_tokens_decoder=decoder)


def decoder_changes_flags(folder):
    make_plain(folder, "<turn>", "</turn>", "<bos>")
    decoder = {"4": {**OBJECT, "content": "<turn>", "special": True}, "2": {**OBJECT, "content": "<bos>"}}
    edit(folder, added_tokens_decoder=decoder)


def plain_in_tokenizer_json(folder):
    make_plain(folder, "<bos>", "<turn>")


def older_added_tokens_file(folder):
    drop_added(folder, "<turn>", "</turn>")
    edit(folder, "added_tokens.json", **{"<image>": 320, "<|im_end|>": 321, "<turn>": 4, "<pad>": 0})
    edit(folder, "special_tokens_map.json", additional_special_tokens=["<|im_end|>"])


def name_that_is_no_token_yet(folder):
    edit(folder, eos_token="<|im_end|>", sep_token="<extra>", mask_token="<image>")


def split_special_tokens(folder):
    edit(folder, split_special_tokens=True)


def input_names(folder):
    edit(folder, model_input_names=["input_ids", "token_type_ids"])


CASES = [
    in_special_tokens_map_only,
    map_overrides_config,
    map_ignored_beside_added_tokens_decoder,
    map_with_extra_tokens,
    additional_special_tokens,
    extra_special_tokens,
    named_extra_special_tokens,
    named_extra_tokens_in_map,
    listed_extra_tokens_in_map,
    names_of_the_models_own,
    added_tokens_decoder,
    decoder_changes_flags,
    plain_in_tokenizer_json,
    older_added_tokens_file,
    name_that_is_no_token_yet,
    split_special_tokens,
    input_names,
]


def assert_equal(ours, theirs):
    for text in TEXTS:
        wanted = theirs(text)
        assert dict(ours(text)) == dict(wanted), text
        ids = wanted["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert len(ours) == len(theirs)
    rendered = theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATE, tokenize=False)
    assert ours.apply_chat_template(MESSAGES, chat_template=TEMPLATE) == rendered


@pytest.mark.parametrize("state", CASES)
def test_equals_transformers(folder, state):
    state(folder)
    ours, theirs = load_tokenizer(resolve_model(str(folder), "dummy")), AutoTokenizer.from_pretrained(folder)
    assert_equal(ours, theirs)


def test_token_object_without_its_type_is_a_token(folder):
    """transformers 5 refuses these, which older versions wrote."""
    edit(folder, additional_special_tokens=[OBJECT], boi_token=OBJECT)
    tokenizer = load_tokenizer(resolve_model(str(folder), "dummy"))
    assert tokenizer.encode("<image>", add_special_tokens=False) == [320]
    assert tokenizer.special_tokens_map["boi_token"] == "<image>"


def test_folder_without_tokenizer_config_goes_by_the_models_class(folder):
    """Without the file, transformers takes Gemma's own tokenizer, with Gemma's names for its tokens."""
    (folder / "tokenizer_config.json").unlink()
    ours, theirs = load_tokenizer(resolve_model(str(folder), "dummy")), AutoTokenizer.from_pretrained(folder)
    template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ messages[0].content }}"
    wanted = theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)
    assert ours.apply_chat_template(MESSAGES, chat_template=template) == wanted == "<bos>|<eos>|<unk>|<pad>|hi"
    assert ours.bos_token_id == theirs.bos_token_id == 2


@pytest.mark.parametrize(
    ("file", "content", "place"),
    [
        ("tokenizer_config.json", {"bos_token": 5}, r"tokenizer_config\.json: bos_token=5"),
        ("tokenizer_config.json", {"bos_token": {"content": 5}}, r"bos_token\.content=5"),
        ("tokenizer_config.json", {"bos_token": {}}, r"bos_token\.content is missing"),
        ("tokenizer_config.json", {"bos_token": {"content": "<bos>", "lstrip": "no"}}, r"bos_token\.lstrip='no'"),
        ("tokenizer_config.json", {"boi_token": {"content": ""}}, r"boi_token\.content=''"),
        ("tokenizer_config.json", {"extra_special_tokens": 7}, "extra_special_tokens=7"),
        ("tokenizer_config.json", {"extra_special_tokens": ["a", 7]}, r"extra_special_tokens\[1\]=7"),
        ("tokenizer_config.json", {"extra_special_tokens": {"a": 7}}, r"extra_special_tokens\.a=7"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, r"added_tokens_decoder=\[\]"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder\.x"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1" * 5000: {}}}, "added_tokens_decoder.1"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": "a"}}, r"added_tokens_decoder\.3='a'"),
        ("tokenizer_config.json", {"split_special_tokens": "yes"}, "split_special_tokens='yes'"),
        ("tokenizer_config.json", {"model_input_names": "input_ids"}, "model_input_names='input_ids'"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "tokenizer_class=5"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template=5"),
        ("tokenizer_config.json", {"chat_template": ["a"]}, "chat_template="),
        ("tokenizer_config.json", {"chat_template": [{"name": "a"}]}, r"chat_template\[0\]\.template is missing"),
        ("tokenizer_config.json", {"chat_template": [{"template": "a"}]}, r"chat_template\[0\]\.name is missing"),
        ("tokenizer_config.json", {"chat_template": {"a": 5}}, r"chat_template\.a=5"),
        ("special_tokens_map.json", {"bos_token": 5}, r"special_tokens_map\.json: bos_token=5"),
        ("special_tokens_map.json", [], r"special_tokens_map\.json holds a list"),
        ("added_tokens.json", {"<a>": "b"}, r"added_tokens\.json: <a>='b'"),
        ("added_tokens.json", {"<a>": -1}, r"added_tokens\.json: <a>=-1"),
        ("chat_template.json", {"chat_template": 5}, r"chat_template\.json: chat_template=5"),
    ],
)
def test_fields_of_the_wrong_kind_are_named(folder, file, content, place):
    if file == "chat_template.json":
        edit(folder, remove=("chat_template",))
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=place):
        load_tokenizer(resolve_model(str(folder), "dummy"))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100000, b'{"a": 1, "a": 2}', b"5"])
def test_files_that_are_no_json_objects_are_named(folder, file, data):
    (folder / file).write_bytes(data)
    with pytest.raises(ModelLoadError, match=file.replace(".", r"\.")):
        load_tokenizer(resolve_model(str(folder), "dummy"))


def test_template_file_that_is_not_utf8_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(resolve_model(str(folder), "dummy"))


def panicking(document):
    """tokenizers panics while it reads this: a panic is no Exception."""
    document["model"]["merges"] = [["a", "b"]]
    document["model"]["vocab"] = {"a": 0}


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("model"),
        lambda document: document["model"].update(vocab=5),
        lambda document: document["model"]["merges"].append(["nope", "nothing"]),
        lambda document: document["added_tokens"].append({"id": -1, "content": "a"}),
        lambda document: document.update(normalizer={"type": "Nope"}),
        lambda document: document.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
        ),
        panicking,
    ],
)
def test_damaged_tokenizer_json_is_named(folder, change):
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(resolve_model(str(folder), "dummy"))
