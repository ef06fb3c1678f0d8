"""Where the files of a model keep chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import TypedFields
from lamella.model_executor.models.typed_json import read_json_object
from lamella.model_executor.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate
from lamella.model_executor.weights.regular_files import read_regular_file

MAX_TEMPLATE_BYTES = 4 * MAX_TEMPLATE_CHARS
_GGUF_KEY = "tokenizer.chat_template"


def read_chat_templates(folder: Path, config: TypedFields) -> ChatTemplate | None:
    """The templates of `folder`, one or several by name; None if there is none.

    Files of their own come before tokenizer_config.json (`config`), as in transformers, and chat_template.json, which
    processors wrote, comes last. Raises ModelLoadError naming file and field.
    """
    files = {}
    default = folder / "chat_template.jinja"
    if default.exists():
        files["default"] = _text(default)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.name.removesuffix(".jinja")] = _text(path)
    if files:
        return files["default"] if set(files) == {"default"} else files
    template = _template_field(config)
    older = folder / "chat_template.json"
    if template is None and older.exists():
        template = _template_field(read_json_object(older))
    return template


def gguf_chat_templates(fields: TypedFields) -> ChatTemplate | None:
    """The templates in a GGUF file's metadata: the default one, and named ones under keys that extend its key."""
    named = {key.removeprefix(f"{_GGUF_KEY}."): fields.string(key) for key in fields if key.startswith(f"{_GGUF_KEY}.")}
    default = fields.optional_string(_GGUF_KEY)
    if default is not None and named:
        named["default"] = default
    return named or default


def _template_field(fields: TypedFields) -> ChatTemplate | None:
    value: Any = fields.raw("chat_template")
    if value is None or isinstance(value, str):
        return fields.optional_string("chat_template")
    if isinstance(value, Mapping):
        given = fields.object("chat_template")
        return {name: given.string(name) for name in given}
    if not isinstance(value, list):
        raise fields.error("chat_template", "a template, an object of named templates, or a list of these")
    return {entry.string("name"): entry.string("template") for entry in fields.objects("chat_template")}


def _text(path: Path) -> str:
    try:
        # As text files are read: whatever ends a line is one character.
        text = read_regular_file(path, max_bytes=MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
