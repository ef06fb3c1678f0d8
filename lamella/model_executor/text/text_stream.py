"""Token ids to text one at a time, at a cost that does not depend on how many there were before.

A character may take several tokens, so some text is not certain yet when its token comes. What is still open, and how
far back, depends on the decoder. There are two kinds:

- *Byte runs* (SentencePiece with byte fallback: Gemma, Llama 2). Tokens <0x00> to <0xFF> that follow each other are a
  run. If all its bytes are valid UTF-8 the run is that text, else it is one U+FFFD for each of its bytes. So the
  characters of a run are *tentative* until another token ends it; and once a byte has spoilt it, all is certain.
- *Windows* (byte-level BPE and others). Bytes of all tokens are one sequence, where what is not UTF-8 becomes U+FFFD
  piece by piece. A sequence that may yet become a character has three bytes at most and shows as one U+FFFD at the
  end of the text, so decoding the last few tokens tells all that is new.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

import tokenizers

REPLACEMENT = "\ufffd"
# How many tokens of a window are left when it is cut, and from how many on it is cut. The bytes of an unfinished
# character, at most three, are in the last three tokens.
_KEPT_TOKENS = 4
_MOST_TOKENS = 8


class StreamRules(NamedTuple):
    """What a tokenizer's decoder does. byte_of: id -> byte where bytes make runs, else empty; special_ids: tokens that
    skip_special_tokens leaves out; anchor: the id of the byte "A", in a run or none (-1); num_stripped: spaces that
    are taken off the beginning of a text."""

    byte_of: dict[int, int]
    special_ids: frozenset[int]
    anchor: int
    num_stripped: int

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> StreamRules:
        special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        byte_ids = [token_id for token_id in ids if token_id is not None]
        makes_runs = len(byte_ids) == 256 and backend.decode([byte_ids[0xE2], byte_ids[0x41]]) == 2 * REPLACEMENT
        if not makes_runs:
            return cls({}, special_ids, -1, 0)
        anchor = byte_ids[0x41]
        spaces = [byte_ids[0x20]] * 8
        num_stripped = len(spaces) + 1 - len(backend.decode([*spaces, anchor]))
        return cls(dict(zip(byte_ids, range(256), strict=True)), special_ids, anchor, num_stripped)


class TextStream:
    """The texts that `step` returns, less what is taken back, joined are the beginning of `decode` of all the ids; at
    most the characters missing at its end are those that lack bytes, and one U+FFFD of a text that ends with it.

    num_tentative: so many characters at the end of the text may yet be taken back.
    num_taken_back: so many at the end of the earlier text were taken back by the last step, before its own text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, rules: StreamRules, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._rules = rules
        self._left_out = rules.special_ids if skip_special_tokens else frozenset()
        self.num_tentative = self.num_taken_back = 0
        self._is_at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._num_run_bytes = 0
        self._is_spoilt = False
        self._num_to_strip = 0  # spaces that the run's first characters lose
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text that have been returned

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character lacks bytes."""
        self.num_taken_back = 0
        if token_id in self._left_out or self._backend.id_to_token(token_id) is None:
            return ""  # decoders are not given this token
        byte = self._rules.byte_of.get(token_id)
        if byte is not None:
            return self._take_byte(byte)
        if not self._rules.byte_of:
            return self._take_into_window(token_id)
        return self._end_run() + self._decode_alone(token_id)

    # Byte runs

    def _take_byte(self, byte: int) -> str:
        if not self._num_run_bytes and self._is_at_start:
            self._num_to_strip = self._rules.num_stripped
        self._is_at_start = False
        self._num_run_bytes += 1
        if self._is_spoilt:
            return REPLACEMENT
        try:
            characters = self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._is_spoilt = True
            return self._spoil()
        if self._num_to_strip and characters:
            self._num_to_strip = self._num_to_strip - 1 if characters == " " else 0
            characters = characters.removeprefix(" ")
        self.num_tentative += len(characters)
        return characters

    def _spoil(self) -> str:
        """The run is no valid UTF-8: take back what was given of it, and give one U+FFFD for each of its bytes."""
        self.num_taken_back, self.num_tentative = self.num_tentative, 0
        return REPLACEMENT * self._num_run_bytes

    def _end_run(self) -> str:
        """The run has ended: the rest of its text that has not been given out."""
        is_cut_short = not self._is_spoilt and bool(self._utf8.getstate()[0])
        text = self._spoil() if is_cut_short else ""
        self._utf8.reset()
        self.num_tentative = self._num_run_bytes = self._num_to_strip = 0
        self._is_spoilt = False
        return text

    def _decode_alone(self, token_id: int) -> str:
        """The text of a token that is no byte; it depends on no other but that the first of all may lose a space."""
        if self._is_at_start:
            self._is_at_start = False
            return self._decode([token_id])
        return self._decode([self._rules.anchor, token_id])[1:]

    # Windows

    def _take_into_window(self, token_id: int) -> str:
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        # The last one may be the beginning of a character. All before it is certain.
        num_open = int(text.endswith(REPLACEMENT))
        new = text[self._num_given : len(text) - num_open]
        self._num_given += len(new)
        if len(window) > _MOST_TOKENS:
            del window[:-_KEPT_TOKENS]
            self._num_given = len(self._decode(window)) - num_open
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
