"""Named templates and the places that hold them: what transformers finds and takes in the same folder."""

import json

import pytest
from transformers import AutoTokenizer

from lamella.errors import ModelLoadError, RequestError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.text.chat_templates import gguf_chat_templates
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.tiny_gemma import save_tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"default": "D{{ messages | length }}", "tool_use": "T{{ tools[0].function.name }}", "rag": "R"}


@pytest.fixture
def folder(tmp_path):
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    set_config(tmp_path, None)
    return tmp_path


def set_config(folder, template):
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "chat_template": template}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def as_list(folder):
    set_config(folder, [{"name": name, "template": template} for name, template in NAMED.items()])


def as_object(folder):
    set_config(folder, NAMED)


def as_files(folder):
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])


def as_files_beside_config(folder):
    set_config(folder, "from the config")
    as_files(folder)


def as_one_file(folder):
    set_config(folder, "from the config")
    (folder / "chat_template.jinja").write_bytes(b"J{{ messages | length }}\r\nx")


def load(folder):
    return load_tokenizer(resolve_model(str(folder), "dummy"))


@pytest.mark.parametrize("place", [as_list, as_object, as_files, as_files_beside_config, as_one_file])
@pytest.mark.parametrize("asked", [None, "rag", "tool_use", "default", "own {{ messages[0].role }}"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_template_equals_transformers(folder, place, asked, tools):
    place(folder)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    if asked == "tool_use" and tools is None:
        tools = TOOLS
    arguments = {"chat_template": asked, "tools": tools, "tokenize": False}
    assert ours.apply_chat_template(MESSAGES, **arguments) == theirs.apply_chat_template(MESSAGES, **arguments)


def test_without_a_default_one_must_be_named(folder):
    set_config(folder, {"a": "A", "b": "B"})
    with pytest.raises(RequestError, match="one of a, b"):
        load(folder).apply_chat_template(MESSAGES)
    assert load(folder).apply_chat_template(MESSAGES, chat_template="b") == "B"


@pytest.mark.parametrize("value", ["P{{ messages | length }}", {"default": "P{{ messages | length }}", "x": "X"}])
def test_processors_file_counts_where_there_is_nothing_else(folder, value):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": value}))
    assert load(folder).apply_chat_template(MESSAGES) == "P1"
    set_config(folder, "C")
    assert load(folder).apply_chat_template(MESSAGES) == "C"


def test_what_is_no_template_is_refused(folder):
    with pytest.raises(RequestError, match="chat_template is int"):
        load(folder).apply_chat_template(MESSAGES, chat_template=5)


def test_templates_in_gguf_metadata():
    both = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    assert gguf_chat_templates(TypedFields(both, "m.gguf")) == {"default": "D", "tool_use": "T"}
    assert gguf_chat_templates(TypedFields({"tokenizer.chat_template": "D"}, "m.gguf")) == "D"
    assert gguf_chat_templates(TypedFields({}, "m.gguf")) is None
    for key in both:
        with pytest.raises(ModelLoadError, match=f"m.gguf: {key}=5"):
            gguf_chat_templates(TypedFields({key: 5}, "m.gguf"))
