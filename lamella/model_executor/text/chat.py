"""A conversation as a prompt, by a chat template.

The text is what transformers renders from the same template and messages. A template comes with a model and may hold
anything: it runs in a sandbox with a budget (`template_sandbox`), and whatever it raises is a RequestError.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamella.errors import RequestError
from lamella.model_executor.text.chat_messages import (
    REASONING_FIELDS,
    plain_data,
    template_documents,
    template_messages,
    template_tools,
)
from lamella.model_executor.text.template_budget import BASE_UNITS, UNITS_PER_INPUT_UNIT, TemplateBudget, size_units

if TYPE_CHECKING:
    import jinja2

    from lamella.model_executor.text.template_sandbox import TemplateSandbox

ChatTemplate = str | Mapping[str, str]
MAX_TEMPLATE_CHARS = 1 << 20  # the longest published ones have some 20,000
_MAX_COMPILED = 16  # templates given with requests are forgotten, the longest unused first
_MAX_ERROR_CHARS = 500
_END_MARK = "\ue000the message ends here\ue000"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """takes_parts: whether it goes through the parts of a message's content."""

    source: str
    template: jinja2.Template
    takes_parts: bool


class ChatRenderer:
    """Renders conversations; keeps the templates that it compiled. Safe to use from several threads.

    base_units: what a rendering may cost beside what its input allows it (see `template_budget`).
    """

    def __init__(self, base_units: int = BASE_UNITS) -> None:
        self._base_units = base_units
        self._sandbox: TemplateSandbox | None = None
        self._compiled: OrderedDict[str, CompiledTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def render(
        self,
        source: str,
        conversation: Any,
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        variables: Mapping[str, Any],
    ) -> str:
        """The text that the template `source` makes of `conversation`.

        variables: further names for the template. continue_final_message: end the text where the last message's content
        (or the field that is named) ends. Raises RequestError: unusable messages, and anything that goes wrong in the
        template, its budget included.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message needs add_generation_prompt=False: one of them must go")
        for name in _RESERVED:
            if name in variables:
                raise RequestError(f"{name!r} cannot be a variable of the template's own: pass it as an argument")
        compiled = self._compile(source)
        try:
            messages = template_messages(conversation, takes_parts=compiled.takes_parts)
            given = {
                **plain_data(variables),
                "messages": messages,
                "tools": template_tools(tools),
                "documents": template_documents(documents),
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise RequestError("messages, tools or template variables are nested too deep for a template") from error
        if not continue_final_message:
            return self._render(compiled, given)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        final_text = _mark_end(messages[-1], field, source)
        return _up_to_mark(self._render(compiled, given), final_text)

    def _render(self, compiled: CompiledTemplate, variables: Mapping[str, Any]) -> str:
        assert self._sandbox is not None
        input_units = size_units(variables, 1 << 40)
        budget = TemplateBudget(self._base_units + UNITS_PER_INPUT_UNIT * input_units)
        try:
            text = self._sandbox.render(compiled.template, budget, variables)
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the chat template's text is not valid Unicode: {error.reason}") from error
        except Exception as error:  # whatever is raised here comes from the template
            raise _refusal(error) from error
        return text

    def _compile(self, source: str) -> CompiledTemplate:
        with self._lock:
            compiled = self._compiled.get(source)
            if compiled is None:
                compiled = self._compile_new(source)
                self._compiled[source] = compiled
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(source)
            return compiled

    def _compile_new(self, source: str) -> CompiledTemplate:
        # Imports Jinja, which only chats need.
        from lamella.model_executor.text.content_format import takes_content_parts
        from lamella.model_executor.text.template_sandbox import TemplateSandbox

        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"the chat template is {len(source)} characters long; templates of up to {MAX_TEMPLATE_CHARS} are taken"
            )
        if self._sandbox is None:
            self._sandbox = TemplateSandbox()
        try:
            takes_parts = takes_content_parts(self._sandbox.parse(source))
            return CompiledTemplate(source, self._sandbox.from_string(source), takes_parts)
        except Exception as error:  # the template's syntax, or Python's compiler refuses the code made from it
            raise _refusal(error) from error


def select_template(given: ChatTemplate | None, asked: str | None, *, with_tools: bool) -> str:
    """The template to use. given: the model's own, one or several by name. asked: a name among them, or a template.

    Raises RequestError when there is none.
    """
    named = dict(given) if isinstance(given, Mapping) else {}
    if asked is not None:
        if not isinstance(asked, str):
            raise RequestError(f"chat_template is {type(asked).__name__}: must be a Jinja template or a name of one")
        return named.get(asked, asked)
    if isinstance(given, str):
        return given
    if with_tools and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise RequestError(
            f"this model has several chat templates and none is called default: pass chat_template= with one of "
            f"{', '.join(sorted(named))}"
        )
    raise RequestError(
        "this model comes without a chat template, so messages cannot be made a prompt; pass chat_template=, "
        "or use generate with a plain prompt"
    )


def _refusal(error: Exception) -> RequestError:
    text = str(error) or "it gives no reason"
    kind = type(error).__name__
    if isinstance(error, RecursionError):
        text = "it is nested too deep, or calls itself without end"
    return RequestError(f"the chat template refuses these messages: {text:.{_MAX_ERROR_CHARS}} ({kind})")


def _mark_end(message: dict[str, Any], field: str, source: str) -> str:
    """Put a mark behind the text that is to be continued; returns the text without it."""
    content = message.get(field)
    if content is None:
        raise RequestError(f"continue_final_message: the last message has no {field!r} to continue")
    # Reasoning stands under several names, and the template may read any of them.
    fields = (
        [name for name in REASONING_FIELDS if message.get(name) == content] if field in REASONING_FIELDS else [field]
    )
    if not any(name in source for name in fields):
        raise RequestError(f"continue_final_message: the chat template does not use {field!r} of a message")
    if isinstance(content, str):
        for name in fields:
            message[name] = content + _END_MARK + " "
        return content
    if isinstance(content, Sequence):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _END_MARK + " "
                return text
    raise RequestError(f"continue_final_message: the last message's {field!r} has no text to continue")


def _up_to_mark(rendered: str, final_text: str) -> str:
    end = rendered.rfind(_END_MARK)
    if end < 0 or final_text.strip() not in rendered:
        raise RequestError("continue_final_message: the chat template leaves out or changes the last message's text")
    keeps_spaces = rendered.startswith(_END_MARK + " ", end)
    # A template that strips texts would have stripped the end of this one.
    return rendered[:end] if keeps_spaces else rendered[:end].rstrip()
