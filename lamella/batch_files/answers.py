"""What came of a request, as the OpenAI format writes it."""

from __future__ import annotations

import math
from typing import Any

from lamella.engine.outputs import CompletionOutput, Logprob, RequestOutput
from lamella.engine.sampling_params import SamplingParams

LEAST_LOGPROB = -9999.0  # what the format writes where the probability is 0


def chat_body(
    output: RequestOutput, params: SamplingParams, digest: str, model_name: str, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if completion.logprobs is None else {"content": logprob_rows(completion, params)},
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    return _body(f"chatcmpl-{digest}", "chat.completion", output, model_name, created, choices)


def completion_body(
    output: RequestOutput, params: SamplingParams, digest: str, model_name: str, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": completion.index,
            "text": completion.text,
            "logprobs": None if completion.logprobs is None else _completion_logprobs(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        for completion in output.outputs
    ]
    return _body(f"cmpl-{digest}", "text_completion", output, model_name, created, choices)


def logprob_rows(completion: CompletionOutput, params: SamplingParams) -> list[dict[str, Any]]:
    """Per token: the token itself, and the asked-for top ones, best first."""
    rows = []
    for token_id, ranked in zip(completion.token_ids, completion.logprobs or (), strict=True):
        # The drawn token is among `ranked` in any case.
        best = sorted(ranked.values(), key=lambda one: one.rank or 0)
        if params.logprobs != -1:
            best = best[: params.logprobs]
        rows.append({**_token(ranked[token_id]), "top_logprobs": [_token(one) for one in best]})
    return rows


def _completion_logprobs(completion: CompletionOutput) -> dict[str, Any]:
    tokens = list(zip(completion.token_ids, completion.logprobs or (), strict=True))
    texts = [ranked[token_id].decoded_token or "" for token_id, ranked in tokens]
    offsets, length = [], 0
    for text in texts:
        offsets.append(length)
        length += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(ranked[token_id].logprob) for token_id, ranked in tokens],
        "top_logprobs": [
            {one.decoded_token or "": _finite(one.logprob) for one in ranked.values()} for _, ranked in tokens
        ],
        "text_offset": offsets,
    }


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _body(
    name: str, kind: str, output: RequestOutput, model_name: str, created: int, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    num_in, num_out = len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs)
    usage = {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}
    return {
        "id": name,
        "object": kind,
        "created": created,
        "model": model_name,
        "choices": choices,
        "usage": usage,
    }
