"""Conversations rendered with a chat template, as prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lamella.argument_checks import truth_value
from lamella.engine.chat_boundaries import characters_before
from lamella.engine.prefix_boundaries import message_indices, tokens_before
from lamella.engine.prompts import TokensPrompt
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


def chat_prompts(
    tokenizer: Tokenizer,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prefix_boundary: int | Sequence[int] | None = None,
) -> list[TokensPrompt]:
    """One prompt for each conversation; the arguments are `LLM.chat`'s. Raises RequestError."""
    truth_value("add_generation_prompt", add_generation_prompt, RequestError)
    conversations = split_conversations(messages)
    arguments: dict[str, Any] = {
        "tools": tools,
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    variables = dict(chat_template_kwargs or {})
    if clashing := sorted(set(variables) & {*arguments, "messages", "tokenize", "return_dict"}):
        raise RequestError(f"chat_template_kwargs has {', '.join(clashing)}: pass them to chat itself")
    prompts: list[TokensPrompt] = []
    for index, conversation in enumerate(conversations):

        def render(messages: Sequence[Message]) -> str:
            text: str = tokenizer.apply_chat_template(messages, **arguments, **variables)
            return text

        try:
            text = render(conversation)
            indices = message_indices(prefix_boundary, len(conversation))
            ends = characters_before(render, conversation, text, indices)
        except RequestError as error:
            if len(conversations) == 1:
                raise
            raise RequestError(f"conversation {index}: {error}") from error
        # Chat templates write the special tokens themselves.
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompt: TokensPrompt = {"prompt": text, "prompt_token_ids": ids}
        if ends:
            prompt["prefix_boundary"] = tokens_before(tokenizer, text, ids, ends, add_special_tokens=False)
        prompts.append(prompt)
    return prompts


def split_conversations(messages: Any, *, refuses_bad: bool = True) -> list[Sequence[Message]]:
    """One conversation or many -> a list of them. refuses_bad: RequestError for one that is no list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            'messages must be a non-empty list of {"role": ..., "content": ...}, or a list or an iterator of such lists'
        )
    # A conversation is a list; a message is a mapping or an object with fields, which the renderer checks.
    if not any(isinstance(one, (list, tuple)) for one in messages):
        return [messages]
    for index, conversation in enumerate(messages):
        if refuses_bad and (not isinstance(conversation, (list, tuple)) or not conversation):
            raise RequestError(f"messages[{index}] must be a non-empty list of messages")
    return list(messages)
