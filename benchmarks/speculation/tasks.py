"""Prompts of four kinds, from those that repeat their text to those that do not."""

from __future__ import annotations

import random
from typing import NamedTuple

from speculation.functions import make_edits

_QUESTIONS = (
    "Why is the sky blue at noon and red in the evening?",
    "Write a short story about a lighthouse keeper who finds a map.",
    "How does a bicycle stay upright while it moves?",
    "Give advice to somebody who moves to a new city alone.",
    "What would a world without money look like?",
    "Explain how bread rises, for a child of eight.",
    "Describe a walk through a forest in November.",
    "What should one look for when buying a used car?",
    "Tell me about the history of the compass.",
    "How do whales find each other across an ocean?",
    "Write a letter to a friend whom you have not seen for ten years.",
    "What makes a good teacher?",
    "Why do some metals rust and others do not?",
    "Invent a board game and explain its rules.",
    "How can a small town get more visitors?",
    "Describe the taste of three fruits without naming them.",
)
_PLACES = ("the harbour", "the old mill", "the market square", "the northern bridge", "the library", "the railway yard")
_EVENTS = (
    "The council of {town} has decided to rebuild {place}, which was damaged when the river rose in {month}.",
    "Engineers found that the foundations of {place} had moved by {number} centimetres, more than was expected.",
    "The work is to begin in {month} and will cost about {number} million, half of which the region pays.",
    "Shop owners near {place} fear that customers will stay away while the road is closed.",
    "A group of residents asked that {place} keep its stone front, which is more than {number} years old.",
    "The mayor said that nobody would have to move, and that buses would run every {number} minutes.",
    "In {month} a first plan had been refused because it left no room for cyclists.",
    "An archive in {town} holds drawings of {place} that were believed to be lost.",
    "Tests of the soil will last {number} weeks, and until then only a footpath remains open.",
    "If the weather permits, {place} can be used again before the next {month}.",
)
_TOWNS = ("Halden", "Brenwick", "Ostmark", "Vellin")
_MONTHS = ("March", "June", "September", "November")
_NAMES = ("Ada", "Boris", "Chen", "Dana", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun")


class Task(NamedTuple):
    """prompts: what a user says. sources: the text that each answer is compared with; "" where there is none."""

    name: str
    prompts: list[str]
    sources: list[str]
    max_tokens: int


def make_tasks(num_prompts: int, seed: int = 0) -> dict[str, Task]:
    tasks = (_edits(num_prompts, seed), _summaries(num_prompts, seed), _chats(num_prompts), _tables(num_prompts, seed))
    return {task.name: task for task in tasks}


def _edits(num_prompts: int, seed: int) -> Task:
    edits = make_edits(num_prompts, seed)
    prompts = [
        f"```python\n{edit.source}```\n\n{edit.instruction} Answer with the whole changed function." for edit in edits
    ]
    return Task("code edit", prompts, [edit.source for edit in edits], 1400)


def _summaries(num_prompts: int, seed: int) -> Task:
    draw, prompts = random.Random(seed + 1), []
    for _ in range(num_prompts):
        town, place = draw.choice(_TOWNS), draw.choice(_PLACES)
        sentences = [
            sentence.format(town=town, place=place, month=draw.choice(_MONTHS), number=draw.randint(3, 90))
            for sentence in draw.sample(_EVENTS, len(_EVENTS)) + draw.sample(_EVENTS, len(_EVENTS))
        ]
        prompts.append(f"Summarise this report in five sentences.\n\n{' '.join(sentences)}")
    return Task("summary", prompts, [""] * num_prompts, 160)


def _chats(num_prompts: int) -> Task:
    prompts = [_QUESTIONS[index % len(_QUESTIONS)] for index in range(num_prompts)]
    return Task("chat", prompts, [""] * num_prompts, 160)


def _tables(num_prompts: int, seed: int) -> Task:
    draw, prompts = random.Random(seed + 2), []
    for _ in range(num_prompts):
        rows = "\n".join(
            f"{name}: {draw.randint(18, 80)} years, {draw.choice(_TOWNS)}, since {draw.choice(_MONTHS)}"
            for name in draw.sample(_NAMES, 8)
        )
        prompts.append(
            "Write these people as a JSON list of objects with the keys name, age, town and since.\n\n" + rows
        )
    return Task("JSON", prompts, [""] * num_prompts, 320)
