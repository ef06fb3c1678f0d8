"""Token ids to text, one token at a time, with an eye on stop strings.

Ownership of the characters of one request's text while it runs:

    |<---------- given out ---------->|<-- pending -->|<-- tentative -->|<-- held back -->|<- not text yet ->|
    take_delta() has returned these    next delta      bytes that may    may become a      unfinished UTF-8
                                                       be spoilt yet     stop string

Tentative and held back may overlap. `text` is everything before what is held back; when the request finishes, it is
everything up to where a stop string or an end token cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.errors import InvariantError
from lamella.model_executor.text.stop_strings import Match, StopMatcher, StopStrings


class DecodeStream(Protocol):
    """See TextStream."""

    num_tentative: int
    num_taken_back: int

    def step(self, token_id: int) -> str: ...


class TokenDecoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def decode_stream(self, skip_special_tokens: bool) -> DecodeStream: ...


class IncrementalDetokenizer:
    """The text of one sample of one request.

    Call `append` for each token and `finish` once. With `detokenize=False` the text stays empty (and the
    tokenizer may be None). With FINAL_ONLY and no stop strings nothing is decoded before `finish`.

    stop_strings: those of `params`, prepared; None: they are prepared here.
    """

    def __init__(
        self, tokenizer: TokenDecoder | None, params: SamplingParams, stop_strings: StopStrings | None = None
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._token_ids: list[int] = []  # tokens whose text counts: without an end token that is left out
        self._num_tokens = 0
        self._given: list[str] = []  # what take_delta has returned
        self._num_given = 0
        self._pieces: list[str] = []  # decoded text that take_delta has not returned, in order
        self._num_chars = 0  # of the text, whether returned or not
        self._final_text: str | None = None
        self._stops = StopMatcher(stop_strings or StopStrings(params.stop)) if params.stop else None
        at_end_only = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
        self._stream = None
        if self._tokenizer is not None and not at_end_only:
            self._stream = self._tokenizer.decode_stream(params.skip_special_tokens)

    @property
    def text(self) -> str:
        """The text so far: without unfinished characters, and until `finish` without an end that may become a stop
        string. A byte-fallback tokenizer may yet take back the characters of the bytes at its end."""
        if self._final_text is not None:
            return self._final_text
        return "".join([*self._given, *self._pieces])[: self._num_chars - self._num_held_back()]

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add one token; the stop string that it completes, or None.

        A returned stop string ends the text (see `include_stop_str_in_output`); append nothing after it.
        The earliest match wins, and of several at one position the first in `stop`. As in vLLM, a stop
        string counts only if a token after the first `min_tokens` completes it.

        is_stop_token: the token is an end token or one of `stop_token_ids` and ends the request: its text
        is left out unless `include_stop_str_in_output`.
        """
        if self._final_text is not None:
            raise InvariantError(f"token {token_id} appended to a finished text; append before finish()")
        self._num_tokens += 1
        if is_stop_token and not self._params.include_stop_str_in_output:
            return None
        self._token_ids.append(token_id)
        if self._stream is None:
            return None
        text = self._stream.step(token_id)
        if self._stream.num_taken_back:
            self._take_back(self._stream.num_taken_back)
        if text:
            self._pieces.append(text)
            self._num_chars += len(text)
        match = self._look_for_stop(text)
        if match is None or is_stop_token or self._num_tokens <= self._params.min_tokens:
            return None
        end = match.position + (len(match.string) if self._params.include_stop_str_in_output else 0)
        self._final_text = "".join([*self._given, *self._pieces])[:end]
        return match.string

    def finish(self) -> None:
        """The request has ended: nothing is held back any more, and the text is the tokenizer's own decoding
        of all its tokens. After a stop string there is nothing left to do."""
        if self._final_text is None:
            self._final_text = ""
            if self._tokenizer is not None:
                self._final_text = self._tokenizer.decode(self._token_ids, self._params.skip_special_tokens)

    def take_delta(self) -> str:
        """The part of the text that no earlier call has returned: all deltas joined are the text."""
        if self._final_text is not None:
            delta = self._final_text[self._num_given :]
        else:
            pending = "".join(self._pieces)
            delta = pending[: self._num_chars - self._num_tentative() - self._num_given]
            if delta:
                self._pieces = [pending[len(delta) :]] if len(delta) < len(pending) else []
                self._given.append(delta)
        self._num_given += len(delta)
        return delta

    def _take_back(self, num_chars: int) -> None:
        """Remove so many characters from the end of the text. `take_delta` has returned none of them."""
        self._num_chars -= num_chars
        while num_chars:
            piece = self._pieces.pop()
            if len(piece) > num_chars:
                self._pieces.append(piece[:-num_chars])
            num_chars -= min(len(piece), num_chars)

    def _look_for_stop(self, new_text: str) -> Match | None:
        stops, stream = self._stops, self._stream
        if stops is None:
            return None
        assert stream is not None
        if stream.num_taken_back:
            stops.rewind()
        if not stream.num_tentative:
            stops.release()
        elif stream.num_tentative == len(new_text):
            stops.mark()
        return stops.feed(new_text)

    def _num_tentative(self) -> int:
        if self._stream is None:
            return 0
        if self._stops is None or self._params.include_stop_str_in_output:
            return self._stream.num_tentative
        return self._stops.num_tentative()

    def _num_held_back(self) -> int:
        if self._stops is None or self._params.include_stop_str_in_output:
            return 0  # a stop string stays in the text, so nothing need be held back
        return self._stops.num_held_back()
