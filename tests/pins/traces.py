"""Two short traces, made of seeds: what they hold follows from `random.Random.random`, which is promised to be the same
everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from tests.pins.replay_places import TraceRequest

SPAN_TOKENS = 60
NUM_SESSIONS_AT_ONCE = 12


class _Dice:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """low <= number < high."""
        return low + int(self._random.random() * (high - low))


def sessions() -> list[TraceRequest]:
    """16 sessions of two to five turns, each turn's prompt the one before with its answer and more. Three beginnings of
    600 tokens are shared by the sessions."""
    dice = _Dice(15)
    requests: list[TraceRequest] = []
    for session in range(16):
        beginning = dice.number(0, 3)
        num_tokens = 600 + dice.number(10, 900)
        turns: list[TraceRequest] = []
        for turn in range(dice.number(2, 6)):
            num_output = dice.number(8, 90)
            ids = [1_000 * (beginning + 1) + span for span in range(600 // SPAN_TOKENS)]
            ids += [100_000 * (session + 1) + span for span in range(len(ids), num_tokens // SPAN_TOKENS)]
            turns.append(_request(f"s{session}.{turn}", f"s{session}", num_tokens, num_output, ids))
            num_tokens += num_output + dice.number(5, 500)
        requests += _linked(turns)
    return requests


def documents() -> list[TraceRequest]:
    """48 questions on 12 documents of 300 to 2,500 tokens, asked in no order; every sixth is on no document."""
    dice = _Dice(51)
    lengths = [SPAN_TOKENS * dice.number(5, 43) for _ in range(12)]
    requests: list[TraceRequest] = []
    for index in range(48):
        document = dice.number(0, len(lengths))
        is_apart = index % 6 == 5
        num_spans = 0 if is_apart else lengths[document] // SPAN_TOKENS
        ids = [1_000 * (document + 1) + span for span in range(num_spans)]
        num_prompt = num_spans * SPAN_TOKENS + dice.number(3, 250)
        requests.append(_request(f"d{index}", f"d{index}", num_prompt, dice.number(1, 120), ids))
    return requests


TRACES: dict[str, Callable[[], list[TraceRequest]]] = {"sessions": sessions, "documents": documents}


def _request(request_id: str, session: str, num_prompt: int, num_output: int, ids: list[int]) -> TraceRequest:
    return TraceRequest(request_id, session, num_prompt, num_output, tuple(ids), SPAN_TOKENS, "pins")


def _linked(turns: list[TraceRequest]) -> list[TraceRequest]:
    """Each turn told which one continues it, from the last to the first."""
    linked = [turns[-1]]
    for turn, _ in reversed(list(pairwise(turns))):
        linked.append(
            TraceRequest(
                turn.request_id,
                turn.session,
                turn.num_prompt_tokens,
                turn.num_output_tokens,
                turn.hash_ids,
                turn.span_tokens,
                turn.scope,
                linked[-1],
            )
        )
    return linked[::-1]
