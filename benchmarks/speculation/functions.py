"""Python functions of 60 to 120 lines and what to change in them, made from a seed."""

from __future__ import annotations

import random
from typing import NamedTuple

LEAST_LINES, MOST_LINES = 60, 120
LEAST_CHANGED_LINES = 3

_SUBJECTS = ("order", "invoice", "sensor", "ticket", "parcel", "account", "lesson", "recipe", "player", "vehicle")
_FIELDS = ("price", "weight", "owner", "status", "region", "priority", "duration", "rating", "quantity", "deadline",
           "discount", "currency", "category", "distance", "capacity")  # fmt: skip
_RESULTS = ("results", "collected", "entries", "records")
_ERRORS = ("ValueError", "RuntimeError", "KeyError")


class Edit(NamedTuple):
    """source: a function. instruction: what to change in it; that concerns num_lines of its lines."""

    source: str
    instruction: str
    num_lines: int


def make_edits(num_edits: int, seed: int = 0) -> list[Edit]:
    draw = random.Random(seed)
    edits: list[Edit] = []
    while len(edits) < num_edits:
        edit = _edit(draw)
        if LEAST_LINES <= edit.source.count("\n") <= MOST_LINES and edit.num_lines >= LEAST_CHANGED_LINES:
            edits.append(edit)
    return edits


def _edit(draw: random.Random) -> Edit:
    subject, result, error = draw.choice(_SUBJECTS), draw.choice(_RESULTS), draw.choice(_ERRORS)
    fields = draw.sample(_FIELDS, draw.randint(7, 11))
    source = _function(draw, subject, result, error, fields)

    def num_lines(text: str) -> int:
        return sum(text in line for line in source.splitlines())

    other = draw.choice([one for one in _ERRORS if one != error])
    changes = [
        (f"Rename the variable `{result}` to `output_rows` everywhere.", num_lines(result)),
        (f"Raise {other} instead of {error} everywhere.", num_lines(f"raise {error}")),
        (f"Rename the variable `{subject}` to `item` everywhere.", num_lines(f"{subject}")),
        (f'Rename the field "{fields[1]}" to "{fields[1]}_value" everywhere.', num_lines(f'"{fields[1]}"')),
        ("Rename the variable `num_skipped` to `num_ignored` everywhere.", num_lines("num_skipped")),
    ]
    instruction, changed = draw.choice(changes)
    return Edit(source, instruction, changed)


def _function(draw: random.Random, subject: str, result: str, error: str, fields: list[str]) -> str:
    lines = [
        f"def clean_{subject}s({subject}s, limit=None, is_strict=True):",
        f'    """Check each {subject} and return those that can be used, with a summary."""',
        f"    {result} = []",
        "    num_skipped = 0",
        "    total = 0.0",
        f"    for index, {subject} in enumerate({subject}s):",
        "        if limit is not None and index >= limit:",
        "            break",
        f"        if not isinstance({subject}, dict):",
        f'            raise {error}(f"{subject} {{index}} is a {{type({subject}).__name__}}")',
    ]
    for field in fields:
        lines += _block(draw, subject, field, error)
    lines += [
        f"        {result}.append({subject})",
        f"    if is_strict and not {result}:",
        f'        raise {error}("no {subject} can be used")',
        "    summary = {",
        f'        "count": len({result}),',
        '        "skipped": num_skipped,',
        '        "total": round(total, 2),',
        "    }",
        f"    return {result}, summary",
    ]
    return "\n".join(lines) + "\n"


def _block(draw: random.Random, subject: str, field: str, error: str) -> list[str]:
    number = draw.choice([5, 10, 24, 100, 365, 1000])
    kind = draw.randrange(5)
    if kind == 0:
        return [
            f'        {field} = {subject}.get("{field}")',
            f"        if {field} is None:",
            "            num_skipped += 1",
            "            continue",
            f"        if {field} < 0 or {field} > {number}:",
            f'            raise {error}(f"{field} of {subject} {{index}} is {{{field}}}")',
            f"        total += {field} * {draw.choice([0.5, 1.2, 2, 7])}",
        ]
    if kind == 1:
        words = draw.sample(["open", "closed", "new", "late", "paid", "north", "south", "high", "low"], 3)
        return [
            f'        {field} = str({subject}.get("{field}", "{words[0]}")).strip().lower()',
            f'        if {field} not in ("{words[0]}", "{words[1]}", "{words[2]}"):',
            "            if is_strict:",
            f'                raise {error}(f"{field} of {subject} {{index}} is not known")',
            f'            {field} = "{words[0]}"',
            f'        {subject}["{field}"] = {field}',
        ]
    if kind == 2:
        return [
            f'        if "{field}" in {subject}:',
            "            try:",
            f'                {subject}["{field}"] = float({subject}["{field}"])',
            "            except (TypeError, ValueError):",
            f'                {subject}["{field}"] = {number}.0',
            "                num_skipped += 1",
        ]
    if kind == 3:
        return [
            f'        for name in {subject}.get("{field}", []):',
            f"            if len(name) > {number}:",
            "                num_skipped += 1",
            "                break",
            "            total += len(name)",
        ]
    return [
        f'        {field}_text = {subject}.pop("{field}", "")',
        f"        if {field}_text.isdigit():",
        f'            {subject}["{field}"] = int({field}_text) % {number}',
        f"        elif {field}_text and is_strict:",
        f'            raise {error}(f"{field} of {subject} {{index}} is no number")',
    ]
