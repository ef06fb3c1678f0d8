"""What the parity tests of Llama and Qwen2 share: how they load a model, in how many ways, and what they keep small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella import LLM
from tests.parity.greedy_run import runner
from tests.parity.harness import ParityCase, compare_greedy

VARIATIONS: dict[str, dict[str, Any]] = {
    "chunk 32": {"max_num_batched_tokens": 32},
    "page 1": {"page_size": 1},
    "page 64, chunk 512": {"page_size": 64, "max_num_batched_tokens": 512},
    "torch": {"attention_backend": "torch"},
}
# Of models with windows.
WINDOW_VARIATIONS: dict[str, dict[str, Any]] = {
    "chunk 32": {"max_num_batched_tokens": 32},
    "page 1, interval 1": {"page_size": 1, "swa_eviction_interval": 1},
    "page 64, interval 128": {"page_size": 64, "swa_eviction_interval": 128},
    "no sliding": {"disable_hybrid_kv_cache": True},
    "torch": {"attention_backend": "torch"},
}


def open_model(model: str, **arguments: Any) -> LLM:
    """With room for the longest prompt of the fixtures, or as `arguments` say."""
    return LLM(model, **{"max_model_len": 2560, "kv_cache_memory_bytes": 2**29, "max_num_seqs": 32, **arguments})


def check_variation(model: str, cases: Sequence[ParityCase], batch: int | None = None, **arguments: Any) -> None:
    """All the oracle's tokens, `batch` prompts at a time (None: all at once)."""
    with open_model(model, **arguments) as llm:
        compare_greedy(runner(llm, batch), cases)


def check_preemption(model: str, cases: Sequence[ParityCase], **arguments: Any) -> None:
    """The same in memory in which not all of them find room at once."""
    with open_model(model, **arguments) as llm:
        compare_greedy(runner(llm), cases)
        assert llm.engine.stats().num_preemptions > 0


def short_cases(cases: Sequence[ParityCase]) -> list[ParityCase]:
    return [case for case in cases if len(case.prompt_token_ids) < 200]


def medium_cases(cases: Sequence[ParityCase]) -> list[ParityCase]:
    return [case for case in cases if 200 < len(case.prompt_token_ids) < 1000]
