"""Public request traces as requests with concrete token ids.

A trace holds no text: lengths, and hash ids, one per span of so many prompt tokens. Equal ids mean an equal prefix
up to and including that span. Each id becomes a fixed run of token ids here, so that any prefix cache sees the
sharing that the trace recorded, and no other.

    agentic            multi-turn coding sessions; 64-token spans (callanjfox/kv-cache-tester)
    conversation       chats, each request a session of its own; 512-token spans (kvcache-ai/Mooncake)
    conversation-cont  the same, with later turns linked to what they continue (see `_link_continuations`)
    synthetic          as conversation (kvcache-ai/Mooncake)
    documents          made up: questions on documents, see `_documents`; no file is read
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lamella.errors import ConfigError

VOCAB_SIZE = 200_000
FILES = {
    "agentic": "weka_agentic_sample.jsonl.gz",
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "conversation-cont": "mooncake_conversation_trace.jsonl.gz",
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
}
DOCUMENTS = "documents"
TRACES = (*FILES, DOCUMENTS)
# Of the documents: how many a session goes through in turns, questions on each, and the ranges of tokens.
_DOCUMENTS_AT_ONCE, _QUESTIONS = 3, 5
_DOCUMENT_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = (2_000, 16_000), (20, 200), (40, 300)
MOONCAKE_SPAN_TOKENS = 512
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbouring seeds give unrelated ids


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One turn. hash_ids name spans of span_tokens prompt tokens each, from the first token on, within `scope`.

    continued_by: the next turn, where its prompt begins with this prompt; it tells what this turn's last tokens and
    output were. boundaries: after how many tokens other prompts part from this one, as the application knows.
    arrival_seconds: from the beginning of the trace; None where the trace does not say, or only within a session.
    """

    request_id: str
    session: str
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    span_tokens: int
    scope: str
    continued_by: TraceRequest | None = field(default=None, repr=False)
    boundaries: tuple[int, ...] = ()
    arrival_seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_named_tokens(self) -> int:
        """Prompt tokens that hash ids say."""
        return min(len(self.hash_ids) * self.span_tokens, self.num_prompt_tokens)


def load_trace(
    trace: str,
    trace_dir: str | Path | None,
    *,
    num_requests: int,
    scale: float = 1.0,
    max_total_tokens: int | None = None,
) -> list[TraceRequest]:
    """The trace's first `num_requests` requests, in its order.

    scale: multiplies all lengths, spans included. max_total_tokens: longer requests (prompt and output) are left out,
    with the rest of their session. Raises ConfigError for an unknown trace, a missing file, or a scale that leaves
    less than one token of a span.
    """
    if trace not in TRACES:
        raise ConfigError(f"trace={trace!r} is not known; choose one of {', '.join(TRACES)}")
    if trace == DOCUMENTS:
        return _documents(num_requests, scale, max_total_tokens if max_total_tokens is not None else 1 << 62)
    if trace_dir is None:
        raise ConfigError(f"trace {trace!r} is read from a file: give the folder that holds it as trace_dir")
    path = Path(trace_dir) / FILES[trace]
    if not path.is_file():
        raise ConfigError(f"trace {trace!r} is read from {path}, which does not exist; give its folder as trace_dir")
    limit = max_total_tokens if max_total_tokens is not None else 1 << 62
    if trace == "agentic":
        return _agentic(path, num_requests, scale, limit)
    requests = _mooncake(path, num_requests, scale, limit)
    return _link_continuations(requests) if trace == "conversation-cont" else requests


def token_ids(request: TraceRequest) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, output) of a request, int32 [num_prompt_tokens] and [num_output_tokens].

    What its hash ids leave open, the end of the prompt and the output, is what the turn that continues it has there,
    and beyond that ids that no other request has.
    """
    named = request.num_named_tokens
    tokens = np.empty(request.num_tokens, dtype=np.int32)
    tokens[:named] = _expand(request.scope, request.hash_ids, request.span_tokens)[:named]
    tokens[named:] = _expand("tail", (request.request_id,), request.num_tokens - named)
    following = request.continued_by
    if following is not None:
        span = following.span_tokens
        first = named // span
        last = min(len(following.hash_ids), -(-request.num_tokens // span))
        end = min(request.num_tokens, following.num_named_tokens, last * span)
        if end > named:
            known = _expand(following.scope, following.hash_ids[first:last], span)
            tokens[named:end] = known[named - first * span : end - first * span]
    return tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]


def _expand(scope: str, hash_ids: tuple[Any, ...], span_tokens: int) -> np.ndarray:
    """Token ids of all spans, one after the other: int32 [len(hash_ids) * span_tokens]."""
    digests = (hashlib.blake2b(f"{scope}/{hash_id}".encode(), digest_size=6).digest() for hash_id in hash_ids)
    seeds = np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)
    mixed: np.ndarray = (seeds[:, None] + np.arange(span_tokens, dtype=np.uint64)) * _MULTIPLIER
    return ((mixed >> np.uint64(40)) % np.uint64(VOCAB_SIZE)).astype(np.int32).ravel()


def _documents(num_requests: int, scale: float, limit: int) -> list[TraceRequest]:
    """Sessions that put several questions to each of several documents, in turns: the first to each, then the second.
    Every prompt is a document and a question after it, so all prompts on a document part where it ends.

    Lengths are drawn evenly on a logarithmic scale, and are the same in every call."""
    rng = np.random.default_rng(0)

    def length(least: int, most: int) -> int:
        return _scaled(int(np.exp(rng.uniform(np.log(least), np.log(most)))), scale)

    requests: list[TraceRequest] = []
    session = 0
    while len(requests) < num_requests:
        documents = [length(*_DOCUMENT_TOKENS) for _ in range(_DOCUMENTS_AT_ONCE)]
        for question in range(_QUESTIONS):
            for index, num_tokens in enumerate(documents):
                num_prompt, num_output = num_tokens + length(*_QUESTION_TOKENS), length(*_ANSWER_TOKENS)
                if num_prompt + num_output > limit:
                    continue
                name, scope = f"s{session}.{question}.{index}", f"{DOCUMENTS}/{session}"
                requests.append(
                    TraceRequest(name, f"s{session}", num_prompt, num_output, (index,), num_tokens, scope,
                                 boundaries=(num_tokens,))
                )  # fmt: skip
        session += 1
        if session > num_requests and not requests:
            break
    return requests[:num_requests]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _scaled(num_tokens: int, scale: float) -> int:
    return max(1, int(num_tokens * scale))


def _scaled_span(span_tokens: int, scale: float) -> int:
    span = int(span_tokens * scale)
    if span < 1:
        raise ConfigError(f"scale={scale}: leaves nothing of spans of {span_tokens} tokens; give {1 / span_tokens}")
    return span


def _mooncake(path: Path, num_requests: int, scale: float, limit: int) -> list[TraceRequest]:
    span = _scaled_span(MOONCAKE_SPAN_TOKENS, scale)
    requests: list[TraceRequest] = []
    for index, row in enumerate(_lines(path)):
        num_prompt = _scaled(row["input_length"], scale)
        num_output = _scaled(row["output_length"], scale)
        if num_prompt + num_output > limit:
            continue
        ids = tuple(row["hash_ids"][: -(-num_prompt // span)])
        # The file's name is the scope: ids of different files name different spans.
        requests.append(
            TraceRequest(f"r{index}", f"r{index}", num_prompt, num_output, ids, span, path.name,
                         arrival_seconds=row["timestamp"] / 1000)
        )  # fmt: skip
        if len(requests) == num_requests:
            break
    return requests


def _link_continuations(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Mooncake gives a prompt's last, partial span an id of its own, even where a later turn goes on from there.

    So here the first later request that shares every whole span (of two at least) and is longer counts as the one
    that continues a request; the partial span's own id is dropped.
    """
    linked: list[TraceRequest] = []
    nearest: dict[tuple[int, int], TraceRequest] = {}  # (number of whole spans, id of the last) -> next request with it
    for request in reversed(requests):
        num_whole = request.num_prompt_tokens // request.span_tokens
        whole = request.hash_ids[:num_whole]
        if num_whole >= 2:
            following = nearest.get((num_whole, whole[-1]))
            if following is not None and following.num_prompt_tokens > request.num_prompt_tokens:
                request = replace(request, continued_by=following, hash_ids=whole)
        linked.append(request)
        for index, hash_id in enumerate(whole):
            nearest[index + 1, hash_id] = request
    return linked[::-1]


def _agentic(path: Path, num_requests: int, scale: float, limit: int) -> list[TraceRequest]:
    """Whole sessions of two turns or more, until there are enough requests; the last one may be cut."""
    requests: list[TraceRequest] = []
    for conversation in _lines(path):
        turns = _agentic_turns(conversation, scale, limit)
        if len(turns) >= 2:
            requests += turns
        if len(requests) >= num_requests:
            break
    return requests[:num_requests]


def _agentic_turns(conversation: dict[str, Any], scale: float, limit: int) -> list[TraceRequest]:
    session = conversation["id"]
    span = _scaled_span(conversation["block_size"], scale)
    turns: list[TraceRequest] = []
    for index, row in enumerate(conversation["requests"]):
        if "in" not in row or not row.get("hash_ids"):
            continue
        num_prompt, num_output = _scaled(row["in"], scale), _scaled(row["out"], scale)
        if num_prompt + num_output > limit:
            break
        ids = tuple(row["hash_ids"])
        turns.append(TraceRequest(f"{session}.{index}", session, num_prompt, num_output, ids, span, session))
    for index, (turn, following) in reversed(list(enumerate(pairwise(turns)))):
        if following.hash_ids[: len(turn.hash_ids)] == turn.hash_ids:
            turns[index] = replace(turn, continued_by=turns[index + 1])
    return turns
