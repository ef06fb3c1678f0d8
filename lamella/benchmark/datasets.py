"""Data sets with synthetic prompts, recorded chats and recorded traces."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella.benchmark.requests import BenchmarkRequest, DrawContext
from lamella.errors import ConfigError

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
        _require_at_least(1, input_len=self.input_len, output_len=self.output_len)
        _require_at_least(0, prefix_len=self.prefix_len)
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(f"random_range_ratio={self.range_ratio}: must lie in [0, 1); 0 gives equal lengths")

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest]:
        rng = np.random.default_rng(context.seed)
        prefix = _random_tokens(rng, context.vocab_size, self.prefix_len)
        for _ in range(context.num_prompts):
            input_len = self._draw_length(rng, self.input_len)
            output_len = self._draw_length(rng, self.output_len)
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
        _require_at_least(1, prefix_len=self.prefix_len, num_prefixes=self.num_prefixes, output_len=self.output_len)
        _require_at_least(0, suffix_len=self.suffix_len)

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest]:
        if context.num_prompts < self.num_prefixes:
            raise ConfigError(
                f"num_prompts={context.num_prompts} cannot use {self.num_prefixes} prefixes; "
                "raise --num-prompts or lower --prefix-repetition-num-prefixes"
            )
        if context.vocab_size**self.prefix_len < self.num_prefixes:
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
            _require_at_least(1, output_len=self.output_len)

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
        try:
            chats = json.loads(self.path.read_text(encoding="utf-8"))
            turns = [chat.get("conversations", []) for chat in chats]
            return [(chat[0]["value"], chat[1]["value"]) for chat in turns if len(chat) >= 2]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} is no ShareGPT file ({type(error).__name__}: {error}); "
                'needed is a JSON list of {"conversations": [{"value": "..."}, ...]}'
            ) from error


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
        if not 0.0 < self.scale < math.inf:
            raise ConfigError(f"trace_scale={self.scale}: must be positive and finite; 1 keeps the recorded lengths")
        if self.output_len is not None:
            _require_at_least(1, output_len=self.output_len)

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
            # No id covers the rest, so nothing shares it: the row number makes it the request's own.
            rng = np.random.default_rng((context.seed, 1, row))
            prompt += _random_tokens(rng, context.vocab_size, max(0, input_len - len(prompt)))
            yield BenchmarkRequest(prompt[:input_len], output_len)

    def _scaled(self, length: int) -> int:
        return max(1, int(length * self.scale))

    def _rows(self) -> Iterator[tuple[int, int, list[int]]]:
        """(input length, output length, hash ids) of each line of the trace."""
        is_csv = self.path.suffix == ".csv"
        with _open_text(self.path) as lines:
            for number, row in enumerate(csv.DictReader(lines) if is_csv else lines, start=1):
                try:
                    yield _azure_row(row) if is_csv else _mooncake_row(json.loads(row))
                except (ValueError, KeyError, TypeError) as error:
                    needed = (
                        "the columns ContextTokens and GeneratedTokens"
                        if is_csv
                        else "input_length, output_length and hash_ids"
                    )
                    raise ConfigError(
                        f"{self.path}, request {number} cannot be read ({type(error).__name__}: {error}); "
                        f"needed are {needed}"
                    ) from error


def _azure_row(row: dict[str, str]) -> tuple[int, int, list[int]]:
    return int(row["ContextTokens"]), int(row["GeneratedTokens"]), []


def _mooncake_row(row: dict[str, Any]) -> tuple[int, int, list[int]]:
    hash_ids = [int(hash_id) for hash_id in row["hash_ids"]]
    if min(hash_ids, default=0) < 0:
        raise ValueError("a hash id is negative")
    return int(row["input_length"]), int(row["output_length"]), hash_ids


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


def _open_text(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8", newline="")


def _require_at_least(least: int, **lengths: int) -> None:
    for name, length in lengths.items():
        if length < least:
            raise ConfigError(f"{name}={length}: must be at least {least}")


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"dataset_path={str(path)!r} is no file; give the path of a data set file")
