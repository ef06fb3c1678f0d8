"""Which data set a benchmark uses: the flags, and what they mean together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from lamella.argument_checks import RealRange, WholeRange
from lamella.benchmark.datasets import (
    NUM_TOKENS,
    NUM_TOKENS_OR_NONE,
    RANGE_RATIO,
    TRACE_SCALE,
    CustomDataset,
    PrefixRepetitionDataset,
    RandomDataset,
    ShareGPTDataset,
    SonnetDataset,
    TraceDataset,
)
from lamella.benchmark.requests import NUM_PROMPTS, Dataset
from lamella.errors import ConfigError

T = TypeVar("T")

_RANGES: dict[str, WholeRange | RealRange] = {
    "input_len": NUM_TOKENS,
    "output_len": NUM_TOKENS,
    "random_input_len": NUM_TOKENS,
    "random_output_len": NUM_TOKENS,
    "random_range_ratio": RANGE_RATIO,
    "random_prefix_len": NUM_TOKENS_OR_NONE,
    "prefix_repetition_prefix_len": NUM_TOKENS,
    "prefix_repetition_suffix_len": NUM_TOKENS_OR_NONE,
    "prefix_repetition_num_prefixes": NUM_PROMPTS,
    "prefix_repetition_output_len": NUM_TOKENS,
    "sonnet_input_len": NUM_TOKENS,
    "sonnet_output_len": NUM_TOKENS,
    "sonnet_prefix_len": NUM_TOKENS_OR_NONE,
    "custom_output_len": NUM_TOKENS,
    "trace_scale": TRACE_SCALE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """The data set flags of vLLM's `bench throughput`, and traces. None means: not given.

    dataset_name: random, prefix-repetition, sharegpt, sonnet, custom or trace.
    dataset_path: file of the sharegpt (JSON), sonnet (text), custom (JSONL) or trace data set.
    input_len: prompt tokens of random (without its prefix) or of prefix-repetition (prefix and suffix).
    output_len: output tokens of any data set, instead of its default or recorded ones.
    random_input_len: [default: 1024]
    random_output_len: [default: 128]
    random_range_ratio: spread of the random lengths, in [0, 1) [default: 0.0]
    random_prefix_len: tokens that all random prompts start with [default: 0]
    prefix_repetition_prefix_len: [default: 256]
    prefix_repetition_suffix_len: [default: 256]
    prefix_repetition_num_prefixes: [default: 10]
    prefix_repetition_output_len: [default: 128]
    sonnet_input_len: [default: 550]
    sonnet_output_len: [default: 150]
    sonnet_prefix_len: tokens of lines that all sonnet prompts start with [default: 200]
    custom_output_len: of rows that give no output_tokens [default: 256]
    trace_scale: factor on all lengths of a trace [default: 1.0]

    Raises ConfigError from `dataset()` where flags contradict each other, or one belongs to another data set.
    """

    dataset_name: Literal["random", "prefix-repetition", "sharegpt", "sonnet", "custom", "trace"] = "random"
    dataset_path: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_range_ratio: float | None = None
    random_prefix_len: int | None = None
    prefix_repetition_prefix_len: int | None = None
    prefix_repetition_suffix_len: int | None = None
    prefix_repetition_num_prefixes: int | None = None
    prefix_repetition_output_len: int | None = None
    sonnet_input_len: int | None = None
    sonnet_output_len: int | None = None
    sonnet_prefix_len: int | None = None
    custom_output_len: int | None = None
    trace_scale: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if getattr(self, name) is not None:
                allowed.check(name, getattr(self, name), ConfigError)

    def dataset(self) -> Dataset:
        makers: dict[str, Callable[[], Dataset]] = {
            "random": self._random,
            "prefix-repetition": self._prefix_repetition,
            "sharegpt": self._sharegpt,
            "sonnet": self._sonnet,
            "custom": self._custom,
            "trace": self._trace,
        }
        if self.dataset_name not in makers:
            raise ConfigError(f"dataset_name={self.dataset_name!r} is not known; choose one of {', '.join(makers)}")
        self._refuse_foreign_flags(makers)
        return makers[self.dataset_name]()

    def _random(self) -> RandomDataset:
        return RandomDataset(
            input_len=self._agreed("input_len", "random_input_len", 1024),
            output_len=self._agreed("output_len", "random_output_len", 128),
            range_ratio=_or_default(self.random_range_ratio, 0.0),
            prefix_len=_or_default(self.random_prefix_len, 0),
        )

    def _prefix_repetition(self) -> PrefixRepetitionDataset:
        prefix_len, suffix_len = self.prefix_repetition_prefix_len, self.prefix_repetition_suffix_len
        if self.input_len is not None:
            # What is left of the total goes to the part that was not given; to both equally, as by default.
            if prefix_len is None:
                prefix_len = self.input_len // 2 if suffix_len is None else self.input_len - suffix_len
            if suffix_len is None:
                suffix_len = self.input_len - prefix_len
            if prefix_len + suffix_len != self.input_len or min(prefix_len, suffix_len) < 0:
                raise ConfigError(
                    f"--input-len {self.input_len} contradicts the given prefix or suffix length: "
                    "a prompt is prefix + suffix; leave one of the flags out"
                )
        return PrefixRepetitionDataset(
            prefix_len=_or_default(prefix_len, 256),
            suffix_len=_or_default(suffix_len, 256),
            num_prefixes=_or_default(self.prefix_repetition_num_prefixes, 10),
            output_len=self._agreed("output_len", "prefix_repetition_output_len", 128),
        )

    def _sharegpt(self) -> ShareGPTDataset:
        self._refuse_input_len()
        return ShareGPTDataset(path=self._path(), output_len=self.output_len)

    def _sonnet(self) -> SonnetDataset:
        return SonnetDataset(
            path=self._path(),
            input_len=self._agreed("input_len", "sonnet_input_len", 550),
            output_len=self._agreed("output_len", "sonnet_output_len", 150),
            prefix_len=_or_default(self.sonnet_prefix_len, 200),
        )

    def _custom(self) -> CustomDataset:
        self._refuse_input_len()
        return CustomDataset(path=self._path(), output_len=self._agreed("output_len", "custom_output_len", 256))

    def _trace(self) -> TraceDataset:
        self._refuse_input_len()
        return TraceDataset(path=self._path(), scale=_or_default(self.trace_scale, 1.0), output_len=self.output_len)

    def _agreed(self, general: str, own: str, default: int) -> int:
        """The value of whichever of two flags for the same thing was given; the default if neither."""
        general_value, own_value = getattr(self, general), getattr(self, own)
        if None not in (general_value, own_value) and general_value != own_value:
            raise ConfigError(
                f"{_flag(general)} {general_value} contradicts {_flag(own)} {own_value}; give one of the two"
            )
        return _or_default(general_value, _or_default(own_value, default))

    def _path(self) -> Path:
        if self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs the file: give --dataset-path")
        return Path(self.dataset_path)

    def _refuse_input_len(self) -> None:
        if self.input_len is not None:
            raise ConfigError(
                f"--input-len {self.input_len} contradicts --dataset-name {self.dataset_name}, whose prompts have "
                "lengths of their own; leave it out, or use the random data set"
            )

    def _refuse_foreign_flags(self, dataset_names: Iterable[str]) -> None:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]
        for name in given:
            owners = [owner for owner in dataset_names if name.startswith(owner.replace("-", "_") + "_")]
            if name == "dataset_path":
                owners = ["sharegpt", "sonnet", "custom", "trace"]
            if owners and self.dataset_name not in owners:
                raise ConfigError(
                    f"{_flag(name)} has no effect with --dataset-name {self.dataset_name}; leave it out, "
                    f"or use --dataset-name {' or '.join(owners)}"
                )


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
