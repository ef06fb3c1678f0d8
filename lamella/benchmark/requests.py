"""What a benchmark sends: requests of known lengths, drawn by a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from lamella.argument_checks import WholeRange
from lamella.errors import ConfigError

# All requests of a run are in memory at once.
NUM_PROMPTS = WholeRange(1, 10**8)


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """A prompt and how many tokens to generate for it, end-of-sequence ignored."""

    prompt_token_ids: list[int]
    output_len: int

    @property
    def total_len(self) -> int:
        return len(self.prompt_token_ids) + self.output_len


@dataclass(frozen=True, slots=True)
class DrawContext:
    """What a data set may depend on. Equal contexts give equal requests.

    num_prompts: how many requests are wanted. max_model_len: most prompt + output tokens of a request.
    encode: the model's tokenizer, text to token ids.
    """

    num_prompts: int
    vocab_size: int
    max_model_len: int
    seed: int
    encode: Callable[[str], list[int]]


def check_lengths(prompt_len: int, output_len: int, context: DrawContext) -> None:
    """ConfigError for a request that the model cannot hold: called before so many tokens are drawn."""
    if prompt_len + output_len > context.max_model_len:
        raise ConfigError(
            f"a prompt of {prompt_len} tokens with {output_len} to generate exceeds "
            f"max_model_len={context.max_model_len}; ask for shorter lengths, or raise --max-model-len"
        )


class Dataset(Protocol):
    """A source of requests."""

    def requests(self, context: DrawContext) -> Iterator[BenchmarkRequest | None]:
        """Requests in sending order; may end before or go on after `context.num_prompts`.

        None stands for a recorded request that is passed over because it exceeds max_model_len.
        """
        ...


@dataclass(frozen=True, slots=True)
class RequestSet:
    """The requests of one run, and how many were passed over as longer than max_model_len."""

    requests: tuple[BenchmarkRequest, ...]
    num_skipped: int


def draw_requests(dataset: Dataset, context: DrawContext) -> RequestSet:
    """The first `context.num_prompts` requests that fit into max_model_len; fewer if the data set ends before.

    Raises ConfigError if lengths that were asked for do not fit, or if no request is left.
    """
    NUM_PROMPTS.check("num_prompts", context.num_prompts, ConfigError)
    requests: list[BenchmarkRequest] = []
    num_skipped = 0
    for request in dataset.requests(context):
        if request is None:
            num_skipped += 1
        else:
            check_lengths(len(request.prompt_token_ids), request.output_len, context)
            requests.append(request)
        if len(requests) == context.num_prompts:
            break
    if not requests:
        raise ConfigError(
            f"the data set gave no usable request ({num_skipped} were longer than "
            f"max_model_len={context.max_model_len}); raise --max-model-len, lower --trace-scale, or use another file"
        )
    return RequestSet(tuple(requests), num_skipped)
