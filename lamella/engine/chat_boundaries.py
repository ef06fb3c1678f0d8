"""Where chats part: the part of a rendered conversation that does not depend on what comes after a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lamella.errors import RequestError

_OTHER_TEXTS = ("\ue001", "\ue002")  # of no message, and without anything in common


def characters_before(
    render: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Any], rendered: str, indices: Iterable[int]
) -> list[int]:
    """How many first characters of `rendered` come from the messages up to and with each of `indices`: those that stay
    when all later messages say something else. After the last message all of them do.

    Raises RequestError where the template refuses the conversation with other texts."""
    ends = []
    for index in indices:
        if index == len(messages) - 1:
            ends.append(len(rendered))
            continue
        texts = [rendered]
        for other in _OTHER_TEXTS:
            changed = [{"role": _role(one), "content": other} for one in messages[index + 1 :]]
            try:
                texts.append(render([*messages[: index + 1], *changed]))
            except RequestError as error:
                raise RequestError(
                    f"prefix_boundary={index}: where chats part after this message is found by rendering other texts "
                    f"after it, which fails ({error}); give token ids with a prefix_boundary in tokens"
                ) from error
        ends.append(_num_common(texts))
    return ends


def _num_common(texts: Sequence[str]) -> int:
    """How many first characters all texts have in common."""
    shortest = min(map(len, texts))
    differing = (index for index in range(shortest) if len({text[index] for text in texts}) > 1)
    return next(differing, shortest)


def _role(message: Any) -> Any:
    return message["role"] if isinstance(message, Mapping) else getattr(message, "role", "user")
