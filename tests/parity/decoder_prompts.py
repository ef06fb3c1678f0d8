"""The prompts of the fixtures of Llama and Qwen2: text of many kinds, chats through the model's own template, and some
that begin with the model's bos token, which neither model puts before a text by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.parity.prompts import SHORT_PROMPTS, long_prompts, medium_prompts

_PLAIN = (
    *("english_fact", "english_story", "english_letter", "arithmetic", "python", "c", "sql", "json"),
    *("whitespace_and_symbols", "german", "russian", "chinese", "english_medium"),
)
_CHATS: dict[str, list[dict[str, str]]] = {
    "chat_question": [{"role": "user", "content": "Why does ice float on water? Two sentences, please."}],
    "chat_system": [
        {"role": "system", "content": "You answer like a ship's captain."},
        {"role": "user", "content": "How do I boil an egg?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Teal."},
        {"role": "user", "content": "Write a Python function that returns its complement as (r, g, b)."},
    ],
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: what is tokenized. begins_with_bos: whether the bos token is put before its tokens. is_chat: whether it
    came through the chat template."""

    name: str
    text: str
    begins_with_bos: bool = False
    is_chat: bool = False


def full_prompts(tokenizer: Any) -> list[Prompt]:
    """24 prompts of 10 to some 3,000 tokens. tokenizer: of transformers; its chat template renders the chats."""
    medium, long = medium_prompts(), long_prompts()
    return [
        *(Prompt(name, SHORT_PROMPTS[name]) for name in _PLAIN),
        *(Prompt(name, _rendered(tokenizer, chat), is_chat=True) for name, chat in _CHATS.items()),
        *(Prompt(f"bos_{name}", SHORT_PROMPTS[name], begins_with_bos=True) for name in ("english_list", "html")),
        *(Prompt(name, medium[name]) for name in ("short_log", "short_code", "short_phrases")),
        *(Prompt(name, medium[name]) for name in ("diary_north", "diary_south")),
        Prompt("story", long["story"]),
    ]


def windowed_prompts(tokenizer: Any) -> list[Prompt]:
    """10 prompts of at least four windows of 64 tokens."""
    medium = medium_prompts()
    report = [{"role": "user", "content": "Who is the owner? Answer in one sentence.\n\n" + medium["short_story"]}]
    return [
        *(Prompt(name, text) for name, text in medium.items()),
        Prompt("chat_report", _rendered(tokenizer, report), is_chat=True),
        Prompt("bos_short_code", medium["short_code"], begins_with_bos=True),
        Prompt("story", long_prompts()["story"]),
    ]


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
