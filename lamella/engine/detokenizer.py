"""Token ids to text, one token at a time, with an eye on stop strings.

Ownership of the characters of one request's text while it runs:

    |<---------- given out ---------->|<-- pending -->|<-------- held back -------->|<- not text yet ->|
    take_delta() has returned these    next delta      may become a stop string      unfinished UTF-8

`text` is the first two parts; when the request finishes, it is everything up to the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.errors import InvariantError


class DecodeStream(Protocol):
    def step(self, token_id: int) -> str | None:
        """The text that became certain with this token; None or "" while a character is unfinished."""
        ...


class Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def decode_stream(self, skip_special_tokens: bool) -> DecodeStream: ...


class IncrementalDetokenizer:
    """The text of one sample of one request.

    Call `append` for each token and `finish` once. With `detokenize=False` the text stays empty (and the
    tokenizer may be None). With FINAL_ONLY and no stop strings nothing is decoded before `finish`.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._stop = tuple(params.stop)
        self._token_ids: list[int] = []  # those whose text counts
        self._num_tokens = 0
        self._text = ""
        self._num_given_out = 0
        self._num_searched = 0  # characters in which a stop string may no longer end
        self._finished = False
        at_end_only = params.output_kind is RequestOutputKind.FINAL_ONLY and not self._stop
        self._stream = None if at_end_only else self._new_stream()

    @property
    def text(self) -> str:
        """The text that can no longer change: without unfinished characters, and until `finish` without
        an end that may become a stop string."""
        return self._text if self._finished else self._text[: len(self._text) - self._num_held_back()]

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add one token; the stop string that it completes, or None.

        A returned stop string ends the text (see `include_stop_str_in_output`); append nothing after it.
        The earliest match wins, and of several at one position the first in `stop`. As in vLLM, a stop
        string counts only if a token after the first `min_tokens` completes it.

        is_stop_token: the token is an end token or one of `stop_token_ids` and ends the request: its text
        is left out unless `include_stop_str_in_output`.
        """
        if self._finished:
            raise InvariantError(f"token {token_id} appended to a finished text; append before finish()")
        self._num_tokens += 1
        if is_stop_token and not self._params.include_stop_str_in_output:
            return None
        self._token_ids.append(token_id)
        if self._stream is None:
            return None
        self._step(token_id)
        return None if is_stop_token else self._find_stop()

    def finish(self) -> None:
        """The request has ended: nothing is held back any more, and the text is the tokenizer's own decoding
        of all its tokens. After a stop string there is nothing left to do."""
        if not self._finished and self._tokenizer is not None:
            self._text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens)
        self._finished = True

    def take_delta(self) -> str:
        """The part of `text` that no earlier call returned."""
        text = self.text
        delta = text[self._num_given_out :]
        self._num_given_out = max(self._num_given_out, len(text))
        return delta

    def _new_stream(self) -> DecodeStream | None:
        return None if self._tokenizer is None else self._tokenizer.decode_stream(self._params.skip_special_tokens)

    def _step(self, token_id: int) -> None:
        assert self._stream is not None
        assert self._tokenizer is not None
        try:
            self._text += self._stream.step(token_id) or ""
        except Exception:
            # A byte-fallback decoder takes back text it had given: bytes that made a character become
            # replacement characters when later bytes spoil their run. `tokenizers` reports that as a bare
            # Exception and leaves the stream unusable, so start a new one at this token. What take_delta
            # has returned stays returned.
            self._text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens)
            self._stream = self._new_stream()
            assert self._stream is not None
            self._stream.step(token_id)

    def _find_stop(self) -> str | None:
        searched, self._num_searched = self._num_searched, len(self._text)
        if not self._stop or self._num_tokens <= self._params.min_tokens:
            return None
        best: tuple[int, str] | None = None
        for stop in self._stop:
            position = self._text.find(stop, max(0, searched - len(stop) + 1))
            if position >= 0 and (best is None or position < best[0]):
                best = (position, stop)
        if best is None:
            return None
        position, stop = best
        self._text = self._text[: position + len(stop) if self._params.include_stop_str_in_output else position]
        self._finished = True
        return stop

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        if self._params.include_stop_str_in_output:
            return 0  # it stays in the text either way
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
