"""How likely given continuations are: what `LLM.score` returns, and how a pair of texts becomes tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.argument_checks import shown
from lamella.engine.outputs import RequestOutput
from lamella.engine.prompts import Prompt, split_prompts
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """One continuation of one prompt.

    token_ids: the continuation's tokens. logprobs: of each, given the prompt and the tokens before it (natural
    logarithms, of the model's own distribution). is_greedy: whether each is the one that greedy decoding would choose.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: list[bool]
    num_cached_tokens: int

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum."""
        return math.fsum(self.logprobs)

    @property
    def is_all_greedy(self) -> bool:
        """Whether greedy decoding would give this continuation."""
        return all(self.is_greedy)


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """token_ids: prompt and continuation, of which the first num_prompt_tokens are the prompt's."""

    token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None

    @property
    def prompt(self) -> dict[str, Any]:
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt_token_ids": self.token_ids, **salt}

    @property
    def params(self) -> SamplingParams:
        """A request of one token that reports the continuation's log-probabilities, and the most likely tokens."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=1,
            prompt_logprob_start=self.num_prompt_tokens,
            detokenize=False,
        )

    def score(self, output: RequestOutput) -> ScoreOutput:
        """From what the request gave."""
        entries = output.prompt_logprobs
        continuation = self.token_ids[self.num_prompt_tokens :]
        if entries is None:
            raise RequestError(f"the request that scores a continuation ended early: {output.outputs[0].stop_reason}")
        found = [entry for entry in entries[self.num_prompt_tokens :] if entry is not None]
        logprobs = [entry[token_id].logprob for entry, token_id in zip(found, continuation, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            raise RequestError(
                f"the log-probabilities of a continuation are no numbers ({shown(logprobs)}): the model's weights or "
                "dtype give logits that are none"
            )
        # An entry has the most likely token beside the given one, where that is another.
        return ScoreOutput(continuation, logprobs, [len(entry) == 1 for entry in found], output.num_cached_tokens)


def pairs_of(prompts: Any, continuations: Any) -> list[tuple[Any, Any]]:
    """(prompt, continuation), one prompt for all continuations or one for each."""
    all_prompts = split_prompts(prompts)
    all_continuations = split_prompts(continuations)
    if len(all_prompts) == 1 and not _is_list_of_prompts(prompts):
        all_prompts = all_prompts * len(all_continuations)
    if len(all_prompts) != len(all_continuations):
        raise RequestError(
            f"continuations has {len(all_continuations)} entries for {len(all_prompts)} prompts: give one for each, or "
            "a single prompt for all"
        )
    return list(zip(all_prompts, all_continuations, strict=True))


def encode_pair(prompt: Prompt, continuation: Any, tokenizer: Tokenizer) -> ScoredPair:
    """Tokens of a prompt (a string, token ids, or a dict of either) and its continuation (a string or token ids).

    Two texts are tokenised as one: the continuation's tokens are those after as many as the prompt has alone. So a word
    is split as it is in a text, and a space between the two belongs to the continuation.
    """
    salt: str | None = None
    text: Any = prompt if isinstance(prompt, str) else None
    ids: Any = None if isinstance(prompt, str) else prompt
    if isinstance(prompt, Mapping):
        salt, text, ids = prompt.get("cache_salt"), prompt.get("prompt"), prompt.get("prompt_token_ids")
    if isinstance(continuation, Mapping):
        raise RequestError(f"continuation is {shown(continuation)}: give a string or token ids")
    prompt_ids: list[int] = tokenizer.encode(text) if ids is None and text is not None else _as_list("prompt", ids)
    if not prompt_ids:
        raise RequestError(
            "prompt is empty, so that nothing comes before the continuation's first token: give at least one token, "
            "such as the model's bos"
        )
    if not isinstance(continuation, str):
        of_both = [*prompt_ids, *_as_list("continuation", continuation)]
    elif ids is None and text is not None:
        of_both = tokenizer.encode(text + continuation)
    else:
        of_both = [*prompt_ids, *tokenizer.encode(continuation, add_special_tokens=False)]
    if len(of_both) <= len(prompt_ids):
        raise RequestError(
            f"continuation {shown(continuation)} adds no token to its prompt: give one that does, or token ids"
        )
    return ScoredPair(of_both, len(prompt_ids), salt)


def _as_list(name: str, ids: Any) -> list[int]:
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise RequestError(f"{name} is {type(ids).__name__}: give a string or token ids")
    return list(ids)


def _is_list_of_prompts(prompts: Any) -> bool:
    is_sequence = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    return is_sequence and bool(prompts) and not isinstance(prompts[0], (int, np.integer))
