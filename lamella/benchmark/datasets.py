"""Data sets with synthetic prompts, recorded chats and recorded traces."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella.argument_checks import MOST_TOKENS, RealRange, WholeRange, shown
from lamella.benchmark.requests import NUM_PROMPTS, BenchmarkRequest, DrawContext, check_lengths
from lamella.errors import ConfigError
from lamella.text_lines import numbered_lines, parsed_json, place

NUM_TOKENS = WholeRange(1, MOST_TOKENS)
NUM_TOKENS_OR_NONE = WholeRange(0, MOST_TOKENS)
RANGE_RATIO = RealRange(0.0, math.nextafter(1.0, 0.0), "a number in [0, 1); 0 gives equal lengths")
TRACE_SCALE = RealRange(1e-6, 1e6, "a positive number from 1e-6 to 1e6; 1 keeps the recorded lengths")
_HASH_ID = WholeRange(0, 2**63 - 1)

# One hash id of a Mooncake trace stands for this many prompt tokens.
MOONCAKE_BLOCK_TOKENS = 512

SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT_TOKENS = 1024
SHAREGPT_MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class RandomDataset:
    """Uniformly random tokens: one shared prefix of prefix_len, then a random part of about input_len.

    The random part and the output have lengths drawn uniformly from [floor(len * (1 - range_ratio)),
    ceil(len * (1 + range_ratio))], at least 1: with range_ratio 0, exactly input_len and output_len.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self) -> None:
        _check(NUM_TOKENS, input_len=self.input_len, output_len=self.output_len)
        _check(NUM_TOKENS_OR_NONE, prefix_len=self.prefix_len)
        _check(RANGE_RATIO, range_ratio=self.range_ratio)

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest]:
        check_lengths(self.prefix_len, 1, context)
        rng = np.random.default_rng(context.seed)
        prefix = _random_tokens(rng, context.vocab_size, self.prefix_len)
        for _ in range(context.num_prompts):
            input_len = self._draw_length(rng, self.input_len)
            output_len = self._draw_length(rng, self.output_len)
            check_lengths(self.prefix_len + input_len, output_len, context)
            yield BenchmarkRequest(prefix + _random_tokens(rng, context.vocab_size, input_len), output_len)

    def _draw_length(self, rng: np.random.Generator, length: int) -> int:
        shortest = max(1, math.floor(length * (1 - self.range_ratio)))
        longest = math.ceil(length * (1 + self.range_ratio))
        return int(rng.integers(shortest, longest, endpoint=True))


@dataclass(frozen=True, slots=True)
class PrefixRepetitionDataset:
    """num_prefixes distinct prefixes, each used by an equal share of the prompts (give or take one),
    every prompt with a random suffix of its own, in random order."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def __post_init__(self) -> None:
        _check(NUM_TOKENS, prefix_len=self.prefix_len, output_len=self.output_len)
        _check(NUM_TOKENS_OR_NONE, suffix_len=self.suffix_len)
        _check(NUM_PROMPTS, num_prefixes=self.num_prefixes)

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest]:
        if context.num_prompts < self.num_prefixes:
            raise ConfigError(
                f"num_prompts={context.num_prompts} cannot use {self.num_prefixes} prefixes; "
                "raise --num-prompts or lower --prefix-repetition-num-prefixes"
            )
        check_lengths(self.prefix_len + self.suffix_len, self.output_len, context)
        if (
            context.vocab_size ** min(self.prefix_len, 64) < self.num_prefixes
        ):  # 64 to that power is more than any number of prompts
            raise ConfigError(
                f"there are no {self.num_prefixes} distinct prefixes of {self.prefix_len} tokens from a vocabulary "
                f"of {context.vocab_size}; raise --prefix-repetition-prefix-len"
            )
        rng = np.random.default_rng(context.seed)
        prefixes: dict[tuple[int, ...], None] = {}  # a set that keeps its order
        while len(prefixes) < self.num_prefixes:
            prefixes[tuple(_random_tokens(rng, context.vocab_size, self.prefix_len))] = None
        ordered = [list(prefix) for prefix in prefixes]
        for index in rng.permutation(context.num_prompts) % self.num_prefixes:
            suffix = _random_tokens(rng, context.vocab_size, self.suffix_len)
            yield BenchmarkRequest(ordered[index] + suffix, self.output_len)


@dataclass(frozen=True, slots=True)
class ShareGPTDataset:
    """The first exchange of recorded chats, in random order: its question, and as many tokens as its answer.

    path: a JSON list of {"conversations": [{"value": question}, {"value": answer}, ...]}.
    Kept are prompts of 4 to 1,024 tokens whose prompt and output make at most 2,048; an answer under 4
    tokens is dropped unless output_len replaces the answer's length.
    """

    path: Path
    output_len: int | None = None

    def __post_init__(self) -> None:
        _require_file(self.path)
        if self.output_len is not None:
            _check(NUM_TOKENS, output_len=self.output_len)

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest | None]:
        exchanges = self._exchanges()
        for index in np.random.default_rng(context.seed).permutation(len(exchanges)):
            question, answer = exchanges[index]
            prompt = context.encode(question)
            output_len = len(context.encode(answer)) if self.output_len is None else self.output_len
            if self._is_kept(len(prompt), output_len):
                fits = len(prompt) + output_len <= context.max_model_len
                yield BenchmarkRequest(prompt, output_len) if fits else None

    def _is_kept(self, prompt_len: int, output_len: int) -> bool:
        long_enough = self.output_len is not None or output_len >= SHAREGPT_MIN_TOKENS
        return (
            long_enough
            and SHAREGPT_MIN_TOKENS <= prompt_len <= SHAREGPT_MAX_PROMPT_TOKENS
            and prompt_len + output_len <= SHAREGPT_MAX_TOTAL_TOKENS
        )

    def _exchanges(self) -> list[tuple[str, str]]:
        chats, lines = numbered_items(self.path)
        exchanges = []
        for chat, line in zip(chats, lines, strict=True):
            turns = chat.get("conversations", []) if isinstance(chat, dict) else None
            if not isinstance(turns, list):
                raise self._refusal(line, f"{shown(chat)} has no list of turns")
            values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
            if len(values) == 2:
                question, answer = values
                if not (isinstance(question, str) and isinstance(answer, str)):
                    raise self._refusal(line, f"{shown(turns[:2])} are no two turns with text")
                exchanges.append((question, answer))
        return exchanges

    def _refusal(self, line: int, problem: str) -> ConfigError:
        return ConfigError(
            f"{place(self.path, line)} is no ShareGPT chat ({problem}); "
            'needed is a JSON list of {"conversations": [{"value": "..."}, ...]}'
        )


@dataclass(frozen=True, slots=True)
class SonnetDataset:
    """Prompts made of a text's lines: the same first lines for all, prefix_len tokens of them, then lines at random up
    to about input_len tokens.

    path: a text file; lines are taken whole, so a prompt is at most input_len tokens and falls short by less than a
    line. Raises ConfigError where the text is too short.
    """

    path: Path
    input_len: int = 550
    output_len: int = 150
    prefix_len: int = 200

    def __post_init__(self) -> None:
        _require_file(self.path)
        _check(NUM_TOKENS, input_len=self.input_len, output_len=self.output_len)
        _check(NUM_TOKENS_OR_NONE, sonnet_prefix_len=self.prefix_len)
        if self.prefix_len > self.input_len:
            raise ConfigError(
                f"sonnet_prefix_len={self.prefix_len} is more than the {self.input_len} tokens of a prompt; lower it"
            )

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest]:
        check_lengths(self.input_len, self.output_len, context)
        lines = [context.encode(text + "\n") for _, text in numbered_lines(self.path) if text.strip()]
        lines = [line for line in lines if line]
        if not lines or min(map(len, lines)) > self.input_len:
            raise ConfigError(f"{self.path} has no line of at most {self.input_len} tokens; raise the input length")
        prefix: list[int] = []
        for line in lines:
            if len(prefix) + len(line) > self.prefix_len:
                break
            prefix += line
        shortest = min(map(len, lines))
        rng = np.random.default_rng(context.seed)
        for _ in range(context.num_prompts):
            prompt = list(prefix)
            while self.input_len - len(prompt) >= shortest:
                line = lines[int(rng.integers(len(lines)))]
                if len(prompt) + len(line) <= self.input_len:
                    prompt += line
                elif self.input_len - len(prompt) < 2 * shortest:
                    break
            if not prompt:
                raise ConfigError(f"{self.path}: no line fits into {self.input_len} tokens; raise the input length")
            yield BenchmarkRequest(prompt, self.output_len)


@dataclass(frozen=True, slots=True)
class CustomDataset:
    """Prompts from a JSONL file, in its order: {"prompt": "..."} a line, with an optional "output_tokens".

    output_len: for lines without a length of their own; -1 is not taken, since outputs do not end by themselves here.
    """

    path: Path
    output_len: int = 256

    def __post_init__(self) -> None:
        _require_file(self.path)
        _check(NUM_TOKENS, output_len=self.output_len)

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest | None]:
        for number, text in numbered_lines(self.path):
            row, where = parsed_json(self.path, number, text), place(self.path, number)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ConfigError(
                    f'{where}: {shown(row)} is no row of a custom data set; needed is {{"prompt": "..."}}'
                )
            length = row.get("output_tokens")
            output_len = self.output_len
            if length is not None:
                output_len = NUM_TOKENS.check(f"{where}: output_tokens", length, ConfigError)
            prompt = context.encode(row["prompt"])
            fits = prompt and len(prompt) + output_len <= context.max_model_len
            yield BenchmarkRequest(prompt, output_len) if fits else None


@dataclass(frozen=True, slots=True)
class TraceDataset:
    """Recorded traffic without its text: lengths, and where the trace has them, which prompts share a prefix.

    path: Mooncake's format, .jsonl or .jsonl.gz, with input_length, output_length and one hash id per
    512 prompt tokens, where equal ids mean equal blocks; or Azure's .csv with ContextTokens and
    GeneratedTokens. scale multiplies every length (and the 512), rounding down to at least 1.
    output_len replaces the recorded output lengths. Arrival times are not used: all is sent at once.
    """

    path: Path
    scale: float = 1.0
    output_len: int | None = None

    def __post_init__(self) -> None:
        _require_file(self.path)
        if not self.path.name.endswith((".jsonl", ".jsonl.gz", ".csv")):
            raise ConfigError(
                f"{self.path.name}: the name does not tell a trace format; use .jsonl or .jsonl.gz for "
                "Mooncake traces, .csv for Azure's"
            )
        _check(TRACE_SCALE, trace_scale=self.scale)
        if self.output_len is not None:
            _check(NUM_TOKENS, output_len=self.output_len)

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest | None]:
        block_len = self._scaled(MOONCAKE_BLOCK_TOKENS)
        for row, (recorded_input_len, recorded_output_len, hash_ids) in enumerate(self._rows()):
            input_len = self._scaled(recorded_input_len)
            output_len = self._scaled(recorded_output_len) if self.output_len is None else self.output_len
            if input_len + output_len > context.max_model_len:
                yield None
                continue
            prompt: list[int] = []
            for hash_id in hash_ids[: -(-input_len // block_len)]:
                prompt += _block_tokens(context, hash_id, block_len)
            # The rest has no id, so no other request shares it. The row number in the key makes it the request's own.
            rng = np.random.default_rng((context.seed, 1, row))
            prompt += _random_tokens(rng, context.vocab_size, max(0, input_len - len(prompt)))
            yield BenchmarkRequest(prompt[:input_len], output_len)

    def _scaled(self, length: int) -> int:
        return max(1, int(length * self.scale))

    def _rows(self) -> Iterator[tuple[int, int, list[int]]]:
        """(input length, output length, hash ids) of each line of the trace."""
        if self.path.suffix == ".csv":
            yield from self._azure_rows()
            return
        for number, text in numbered_lines(self.path):
            row = parsed_json(self.path, number, text)
            where = place(self.path, number)
            if not isinstance(row, dict) or not isinstance(row.get("hash_ids"), list):
                raise ConfigError(
                    f"{where} cannot be read: {shown(row)}; needed are input_length, output_length and hash_ids, a list"
                )
            hash_ids = [_HASH_ID.check(f"{where}: hash_ids", hash_id, ConfigError) for hash_id in row["hash_ids"]]
            yield _length(where, row, "input_length"), _length(where, row, "output_length"), hash_ids

    def _azure_rows(self) -> Iterator[tuple[int, int, list[int]]]:
        numbers = [0]  # number of the line that was read last

        def texts() -> Iterator[str]:
            for number, text in numbered_lines(self.path):
                numbers[0] = number
                yield text

        reader = csv.DictReader(texts())
        try:
            for row in reader:
                where = place(self.path, numbers[0])
                lengths = [_length(where, row, name) for name in ("ContextTokens", "GeneratedTokens")]
                yield lengths[0], lengths[1], []
        except csv.Error as error:
            raise ConfigError(f"{place(self.path, numbers[0])} is no CSV ({error}); see the file") from error


def numbered_items(path: Path) -> tuple[list[Any], list[int]]:
    """The items of a JSON list and the line on which each begins. ConfigError, with the line, for other files."""
    needed = 'needed is a JSON list of {"conversations": [{"value": "..."}, ...]}'
    try:
        text = path.read_text(encoding="utf-8-sig")
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place(path, error.lineno)} is no ShareGPT file ({error.msg}); {needed}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no ShareGPT file ({error}); {needed}") from error
    if not isinstance(items, list):
        raise ConfigError(f"{place(path, 1)} is no ShareGPT file (a {type(items).__name__}); {needed}")
    decoder, lines, line, seen = json.JSONDecoder(), [], 1, 0
    end = text.index("[") + 1
    for _ in items:
        start = next(place for place in range(end, len(text)) if text[place] not in " \t\r\n,")
        line, seen = line + text.count("\n", seen, start), start
        lines.append(line)
        end = decoder.raw_decode(text, start)[1]
    return items, lines


def _length(where: str, row: dict[str, Any], name: str) -> int:
    """A recorded length: in a CSV it is text."""
    value = row.get(name)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if value is None:
        raise ConfigError(f"{where} has no {name}; needed are {_needed(name)}")
    return NUM_TOKENS_OR_NONE.check(f"{where}: {name}", value, ConfigError)


def _needed(name: str) -> str:
    is_csv = name in ("ContextTokens", "GeneratedTokens")
    return "the columns ContextTokens and GeneratedTokens" if is_csv else "input_length, output_length and hash_ids"


def _block_tokens(context: DrawContext, hash_id: int, block_len: int) -> list[int]:
    """The tokens that a trace's hash id stands for: the same wherever the id occurs."""
    tokens = _random_tokens(np.random.default_rng((context.seed, 0, hash_id)), context.vocab_size, block_len)
    # Trace ids count up from 0, so this makes blocks of different ids (up to a vocabulary apart) differ
    # from the first token on: a recorded prefix never grows by chance.
    tokens[0] = hash_id % context.vocab_size
    return tokens


def _random_tokens(rng: np.random.Generator, vocab_size: int, num_tokens: int) -> list[int]:
    tokens: list[int] = rng.integers(0, vocab_size, size=num_tokens).tolist()
    return tokens


def _check(allowed: WholeRange | RealRange, **values: Any) -> None:
    for name, value in values.items():
        allowed.check(name, value, ConfigError)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"dataset_path={str(path)!r} is no file; give the path of a data set file")
