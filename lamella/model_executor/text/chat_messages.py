"""Conversations as chat templates get them: plain data, checked no further than every template needs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lamella.errors import RequestError

# Messages have their reasoning under one of these; templates read the first, gpt-oss's the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")
_SHOWN_CHARS = 200


def plain_data(value: Any) -> Any:
    """`value` made of JSON's types anew, so that a template can call no method of the caller's objects. What has no
    such form is named by its type ("<Image>"): a template may ask whether it is there."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return getattr(base, f"__{base.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = (plain_data(item) for item in value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return plain_data(value.item())
    if (fields := _object_fields(value)) is not None:
        return plain_data(fields)
    return f"<{type(value).__name__}>"


def _object_fields(value: Any) -> Mapping[str, Any] | None:
    """The fields of a dataclass or a pydantic model (as OpenAI's client returns them); None for anything else."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else None


def template_messages(conversation: Any, *, takes_parts: bool) -> list[dict[str, Any]]:
    """The messages for a template, keys without a value left out.

    takes_parts: the template goes through the parts of a content; for others the texts of the parts become one, a line
    each. Raises RequestError for what is no conversation, a message without a role, or a part that is no text.
    """
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        raise RequestError(f"messages is {type(conversation).__name__}: must be a list of messages")
    if not conversation:
        raise RequestError("messages is empty; pass at least one message")
    messages = []
    for index, given in enumerate(conversation):
        fields = given if isinstance(given, Mapping) else _object_fields(given)
        if not isinstance(fields, Mapping) or fields.get("role") is None:
            raise RequestError(f'messages[{index}] is {given!r:.{_SHOWN_CHARS}}: must be a mapping with a "role"')
        if len(fields) == 1:
            raise RequestError(
                f'messages[{index}] is {given!r:.{_SHOWN_CHARS}}: a role alone says nothing; add "content", or '
                "what else the template knows"
            )
        message = {key: plain_data(value) for key, value in fields.items() if value is not None}
        if isinstance(message.get("content"), (list, tuple)):
            message["content"] = _content(message["content"], f'messages[{index}]["content"]', takes_parts)
        reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        messages.append(message)
    return messages


def _content(parts: Sequence[Any], place: str, takes_parts: bool) -> Any:
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and (kind in _TEXT_PARTS or kind is None):
            texts.append(text)
        elif kind is not None or not takes_parts:
            raise RequestError(
                f'{place}[{index}] is {part!r:.{_SHOWN_CHARS}}: this model takes text alone; must be {{"type": "text", '
                '"text": ...}'
            )
    # Parts without a type are passed on as they are: the template may know what to do with them.
    return parts if takes_parts else "\n".join(texts)


def template_tools(tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None) -> list[Any] | None:
    """Tools as JSON schemas; functions with type hints and a docstring become theirs."""
    if tools is None:
        return None
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is {type(tools).__name__}: must be a list of JSON schemas or functions")
    schemas = []
    for index, tool in enumerate(tools):
        if inspect.isfunction(tool) or inspect.ismethod(tool):
            # Seconds to import, and only tools given as functions need it.
            from transformers.utils import get_json_schema
            from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

            try:
                schemas.append(plain_data(get_json_schema(tool)))
            except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
                raise RequestError(f"tools[{index}] cannot be described as a JSON schema: {error}") from error
        elif isinstance(tool, Mapping):
            schemas.append(plain_data(tool))
        else:
            raise RequestError(f"tools[{index}] is {type(tool).__name__}: must be a JSON schema or a function")
    return schemas


def template_documents(documents: Any) -> Any:
    """Documents for templates that quote them."""
    if documents is None:
        return None
    if isinstance(documents, (str, Mapping)) or not isinstance(documents, Sequence):
        raise RequestError(f"documents is {type(documents).__name__}: must be a list of mappings")
    for index, document in enumerate(documents):
        if not isinstance(document, Mapping):
            raise RequestError(f"documents[{index}] is {type(document).__name__}: must be a mapping")
    return plain_data(documents)
