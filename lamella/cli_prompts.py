"""The prompts of `lamella generate`, each with the place that it came from, for errors to name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lamella.argument_checks import shown
from lamella.errors import ConfigError, LamellaError
from lamella.text_lines import numbered_lines, parsed_json, place


class PlacedPrompt(NamedTuple):
    prompt: Any
    place: str


def placed_prompts(texts: Sequence[str], path: Path | None) -> list[PlacedPrompt]:
    """Of `--prompt` (texts), then of `--prompts-file`: one a line; in a .jsonl file as JSON. ConfigError with file and
    line for what is no prompt."""
    prompts = [PlacedPrompt(text, f"--prompt number {number}") for number, text in enumerate(texts, start=1)]
    for number, text in numbered_lines(path) if path is not None else ():
        assert path is not None
        prompt = _json_prompt(path, number, text) if path.suffix == ".jsonl" else text
        prompts.append(PlacedPrompt(prompt, place(path, number)))
    return prompts


def with_place(error: LamellaError, prompts: Sequence[PlacedPrompt]) -> str:
    """The error's text, with the place of the prompt where it names one by its index."""
    found = re.match(r"prompts\[(\d+)\]: ", str(error))
    if found is None or int(found[1]) >= len(prompts):
        return str(error)
    return f"{prompts[int(found[1])].place}: {str(error)[found.end() :]}"


def _json_prompt(path: Path, number: int, text: str) -> Any:
    value = parsed_json(path, number, text)
    if not isinstance(value, (str, list, dict)):
        raise ConfigError(
            f"{place(path, number)}: {shown(value)} is no prompt; give a string, a list of token ids, "
            '{"prompt": ...} or {"prompt_token_ids": ...}'
        )
    return value
