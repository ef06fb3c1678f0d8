"""Checks prompts and their parameters against a model, and makes of them what an engine queues."""

from __future__ import annotations

import dataclasses
from typing import Any

from lamella.engine.config import EngineConfig
from lamella.engine.model_opening import ServedConfig
from lamella.engine.prompts import ParsedPrompt, parse_prompt
from lamella.engine.request_rules import RuleMaker
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.structured.compiler import GrammarCompiler
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer


class RequestParser:
    """Needs nothing of an engine but what its files and its config say."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, model_config: ServedConfig, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._max_model_len = max_model_len
        self._grammars = GrammarCompiler(
            tokenizer,
            model_config.vocab_size,
            model_config.eos_token_ids,
            StructuredOutputsConfig.of(config.structured_outputs_config),
        )
        self._rules = RuleMaker(tokenizer, model_config.vocab_size, model_config.eos_token_ids)

    def parse(self, prompt: Any, params: SamplingParams) -> ParsedPrompt:
        """Raises RequestError where the request cannot be run as given."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}: must be a SamplingParams")
        for name in ("logprobs", "prompt_logprobs"):
            num_top = getattr(params, name)
            if num_top is not None and num_top > self._vocab_size:
                raise RequestError(
                    f"{name}={num_top}: the vocabulary has only {self._vocab_size} tokens; -1 is all of them"
                )
        rules = self._rules.make(params)
        max_model_len = self._max_model_len
        parsed = parse_prompt(prompt, self._tokenizer, vocab_size=self._vocab_size, max_model_len=max_model_len)
        room = max_model_len - len(parsed.token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens}: a prompt of {len(parsed.token_ids)} tokens leaves room for {room} "
                f"within max_model_len={max_model_len}"
            )
        if (params.prompt_logprob_start or 0) >= len(parsed.token_ids):
            raise RequestError(
                f"prompt_logprob_start={params.prompt_logprob_start}: the prompt has only {len(parsed.token_ids)} "
                f"tokens; give at most {len(parsed.token_ids) - 1}"
            )
        form = StructuredOutputsParams.of(params.structured_outputs)
        new_grammar = None if form is None else self._grammars.compile(form)
        return dataclasses.replace(parsed, rules=rules, new_grammar=new_grammar)


def drawn_seed(seed: int, num_arrived: int) -> int:
    """Of a request that gives none: by the engine's seed and how many came before it."""
    return (seed * 0x9E3779B97F4A7C15 + num_arrived * 0xD1B54A32D192ED03 + 1) % 2**64
