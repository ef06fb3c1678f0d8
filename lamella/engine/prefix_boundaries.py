"""Where an application says that prompts will part: at the end of a system prompt, of a document, of examples.

Given in tokens for prompts of token ids, in characters for texts, and as messages for chats; what comes out are numbers
of first tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lamella.argument_checks import WholeRange, shown
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer

_ONE = {"tokens": "a number of", "characters": "a number of", "messages": "an index of"}
MOST_BOUNDARIES = 64  # of one prompt: each costs a window's memory


def whole_numbers(given: Any, least: int, most: int, unit: str) -> list[int]:
    """`prefix_boundary` as ascending numbers. given: a number, or a sequence of them; None: none.

    Raises RequestError for what is no number from `least` to `most`, and for too many."""
    if given is None:
        return []
    if isinstance(given, np.ndarray):
        given = given.tolist()
    many = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    numbers = list(given) if many else [given]
    if len(numbers) > MOST_BOUNDARIES:
        raise RequestError(f"prefix_boundary has {len(numbers)} places: give at most {MOST_BOUNDARIES}")
    allowed = WholeRange(least, most, f"{_ONE[unit]} {unit} from {least} to {most}, or a list of them")
    return sorted({allowed.check("prefix_boundary", one, RequestError) for one in numbers})


def message_indices(given: Any, num_messages: int) -> list[int]:
    """`prefix_boundary` of a chat as ascending indices of its messages. Negative ones count from the end."""
    numbers = whole_numbers(given, -num_messages, num_messages - 1, "messages")
    return sorted({one % num_messages for one in numbers})


def joined(parts: Any) -> tuple[str, list[int]]:
    """The text of a prompt that was given in parts, and the characters before the end of each part but the last."""
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            raise RequestError(
                f'prompt["prompt"][{index}] is {type(part).__name__}: a prompt in parts is a list of strings; give '
                'token ids as prompt["prompt_token_ids"]'
            )
    if len(parts) > MOST_BOUNDARIES + 1:
        raise RequestError(f'prompt["prompt"] has {len(parts)} parts: give at most {MOST_BOUNDARIES + 1}')
    ends = np.cumsum([len(part) for part in parts])[:-1].tolist()
    return "".join(parts), sorted({end for end in ends if end})


def tokens_before(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], characters: Iterable[int], *, add_special_tokens: bool
) -> list[int]:
    """How many first tokens of `text` (its `token_ids`) lie before each of the places `characters` in it: those that it
    has in common with the text up to there alone. So a token that reaches over the place is not among them, and neither
    is one that another text after the place would not have."""
    places = set()
    for end in characters:
        alone = tokenizer.encode(text[:end], add_special_tokens=add_special_tokens) if end < len(text) else token_ids
        num_common = next(
            (index for index, pair in enumerate(zip(alone, token_ids, strict=False)) if pair[0] != pair[1]),
            min(len(alone), len(token_ids)),
        )
        if num_common:
            places.add(num_common)
    return sorted(places)


def require_text(given: Any) -> None:
    """Raise RequestError where `prefix_boundary` stands beside a prompt in parts."""
    if given is not None:
        raise RequestError(
            f"prefix_boundary={shown(given)} stands beside a prompt in parts, whose ends say it already: leave it out, "
            "or give the prompt as one string"
        )
