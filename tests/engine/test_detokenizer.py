"""The incremental text against decoding every prefix from scratch."""

from __future__ import annotations

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from lamella.engine.detokenizer import IncrementalDetokenizer
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.errors import InvariantError

END = "<end>"


class Stream:
    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = decoders.DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        return self._stream.step(self._tokenizer, token_id)


class TinyTokenizer:
    """What the detokenizer needs of a tokenizer; counts how often it is asked."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.add_special_tokens([END])
        self.tokenizer = tokenizer
        self.num_decodes = 0
        self.num_streams = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decodes += 1
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, skip_special_tokens: bool) -> Stream:
        self.num_streams += 1
        return Stream(self.tokenizer, skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def byte_level() -> TinyTokenizer:
    """GPT-2's kind: every byte is a letter, and a few merges."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("s", "t"), ("o", "p"), ("st", "op")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TinyTokenizer(tokenizer)


def byte_fallback() -> TinyTokenizer:
    """Gemma's kind: letters, and the bytes of any character that is no letter of the vocabulary."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ["▁", *"abcdefghijklmnopqrstuvwxyz.!\n", "▁t", "▁th", "▁the", "st", "op", "stop"]:
        vocab[word] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("s", "t"), ("o", "p"), ("st", "op")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return TinyTokenizer(tokenizer)


BOTH = pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
TEXT = " the theatre, 日本語 ± naïve 🙂🙃 stop it\nnow the stop."


def run(tokenizer: TinyTokenizer, token_ids: list[int], **params) -> tuple[str, str | None, list[str], int]:
    """Append until a stop string matches: final text, stop string, deltas, tokens taken."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(max_tokens=None, **params))
    deltas: list[str] = []
    stop, num_taken = None, 0
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        num_taken += 1
        deltas.append(detokenizer.take_delta())
        if stop is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert detokenizer.take_delta() == ""
    return detokenizer.text, stop, deltas, num_taken


def stable_prefix(tokenizer: TinyTokenizer, token_ids: list[int]) -> str:
    """The text as of the last token that finished a character, decoded from scratch. Valid UTF-8 only."""
    for length in range(len(token_ids), 0, -1):
        text = tokenizer.tokenizer.decode(token_ids[:length])
        if not text.endswith("\ufffd"):
            return text
    return ""


def oracle(
    tokenizer: TinyTokenizer, token_ids: list[int], stops: list[str], *, min_tokens: int = 0, include: bool = False
) -> tuple[str, str | None, int]:
    """Look for stop strings in every prefix: final text, stop string, tokens taken."""
    previous = ""
    for num_taken in range(1, len(token_ids) + 1):
        text = stable_prefix(tokenizer, token_ids[:num_taken])
        if num_taken > min_tokens:
            matches = []
            for order, stop in enumerate(stops):
                for position in range(len(text)):
                    if text.startswith(stop, position) and position + len(stop) > len(previous):
                        matches.append((position, order, stop))
            if matches:
                position, _, stop = min(matches)
                return text[: position + (len(stop) if include else 0)], stop, num_taken
        previous = text
    return tokenizer.tokenizer.decode(token_ids), None, len(token_ids)


@BOTH
def test_text_grows_as_the_decoded_prefixes_do(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode(TEXT)
    assert tokenizer.tokenizer.decode(token_ids) == TEXT
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    num_unfinished = 0
    for i, token_id in enumerate(token_ids):
        assert detokenizer.append(token_id) is None
        assert detokenizer.text == stable_prefix(tokenizer, token_ids[: i + 1])
        num_unfinished += tokenizer.tokenizer.decode(token_ids[: i + 1]).endswith("\ufffd")
    assert num_unfinished > 10  # characters of several tokens did occur
    detokenizer.finish()
    assert detokenizer.text == TEXT


@BOTH
@pytest.mark.parametrize("cut", range(1, 6))
def test_unfinished_characters_appear_only_at_the_end(make_tokenizer, cut: int) -> None:
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode("a🙂b🙂")[:-cut]
    text, _, deltas, _ = run(tokenizer, token_ids)
    assert text == tokenizer.tokenizer.decode(token_ids)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas[:-1])


@BOTH
@pytest.mark.parametrize(
    ("stops", "found", "text"),
    [
        (["stop"], "stop", " the theatre, 日本語 ± naïve 🙂🙃 "),
        (["op it"], "op it", " the theatre, 日本語 ± naïve 🙂🙃 st"),  # from inside one token into others
        (["語"], "語", " the theatre, 日本"),  # one character of three tokens
        (["🙃 s"], "🙃 s", " the theatre, 日本語 ± naïve 🙂"),
        (["now", "it"], "it", " the theatre, 日本語 ± naïve 🙂🙃 stop "),
        (["top", "stop"], "stop", " the theatre, 日本語 ± naïve 🙂🙃 "),  # both end at once: the earlier position
        (["stop it", "stop"], "stop", " the theatre, 日本語 ± naïve 🙂🙃 "),  # the shorter is complete first
        (["sto", "st"], "sto", " the theatre, 日本語 ± naïve 🙂🙃 "),  # same token, same position: the first listed
        (["st", "sto"], "st", " the theatre, 日本語 ± naïve 🙂🙃 "),
        (["never"], None, TEXT),
        ([" the stop.", "."], " the stop.", " the theatre, 日本語 ± naïve 🙂🙃 stop it\nnow"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(make_tokenizer, stops: list[str], found: str | None, text: str, include: bool) -> None:
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode(TEXT)
    final, stop, deltas, num_taken = run(tokenizer, token_ids, stop=stops, include_stop_str_in_output=include)
    assert stop == found
    assert final == text + (found if include and found else "")
    assert "".join(deltas) == final
    assert (final, stop, num_taken) == oracle(tokenizer, token_ids, stops, include=include)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from([byte_level, byte_fallback]),
    text=st.text(alphabet="ab st 🙂é", max_size=25),
    stops=st.lists(st.text(alphabet="ab st 🙂é", min_size=1, max_size=4), max_size=3, unique=True),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_any_text_and_stop_strings(kind, text, stops, min_tokens, include) -> None:
    tokenizer = kind()
    token_ids = tokenizer.encode(text)
    final, stop, deltas, num_taken = run(
        tokenizer, token_ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include
    )
    assert (final, stop, num_taken) == oracle(tokenizer, token_ids, stops, min_tokens=min_tokens, include=include)
    assert "".join(deltas) == final


def test_deltas_hold_back_only_what_may_become_a_stop_string() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["abc", "bcbd"]))
    deltas = []
    for letter in "xababcb":
        if detokenizer.append(tokenizer.encode(letter)[0]):
            break
        deltas.append((detokenizer.take_delta(), detokenizer.text))
    assert deltas == [("x", "x"), ("", "x"), ("", "x"), ("ab", "xab"), ("", "xab")]
    assert (detokenizer.take_delta(), detokenizer.text) == ("", "xab")


def test_what_was_held_back_comes_out_when_the_request_ends() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="abc"))
    for token_id in tokenizer.encode("xab"):
        detokenizer.append(token_id)
    assert detokenizer.take_delta() == "x"
    detokenizer.finish()
    assert detokenizer.take_delta() == "ab"
    assert detokenizer.text == "xab"


@BOTH
def test_min_tokens_pass_over_early_stop_strings(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode("a.b.c.d.e")
    assert len(token_ids) == 9

    def taken(min_tokens: int, stop: str = ".") -> tuple[str, int]:
        final, _, _, num_taken = run(tokenizer, token_ids, stop=stop, min_tokens=min_tokens)
        return final, num_taken

    assert taken(0) == ("a", 2)
    assert taken(1) == ("a", 2)
    assert taken(2) == ("a.b", 4)  # the second token's stop string does not count
    assert taken(3) == ("a.b", 4)
    assert taken(8) == ("a.b.c.d.e", 9)  # no later one comes
    assert taken(4, ".c.") == ("a.b", 6)  # begun before, completed after


@BOTH
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_tokens_leave_no_text_unless_asked_for(make_tokenizer, skip_special_tokens, include, kind) -> None:
    tokenizer = make_tokenizer()
    end_id = tokenizer.tokenizer.token_to_id(END)
    letter = tokenizer.encode("z")[0]
    for stop_id, stop_text in ((end_id, "" if skip_special_tokens else END), (letter, "z")):
        params = SamplingParams(
            skip_special_tokens=skip_special_tokens, include_stop_str_in_output=include, output_kind=kind
        )
        detokenizer = IncrementalDetokenizer(tokenizer, params)
        for token_id in tokenizer.encode("ab"):
            assert detokenizer.append(token_id) is None
        assert detokenizer.append(stop_id, is_stop_token=True) is None
        detokenizer.finish()
        assert detokenizer.text == "ab" + (stop_text if include else "")
        assert detokenizer.take_delta() == detokenizer.text


@BOTH
def test_special_tokens_inside_the_text(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    token_ids = [*tokenizer.encode("ab"), tokenizer.tokenizer.token_to_id(END), *tokenizer.encode("c")]
    assert run(tokenizer, token_ids)[0] == "abc"
    assert run(tokenizer, token_ids, skip_special_tokens=False)[0] == f"ab{END}c"
    assert run(tokenizer, token_ids, skip_special_tokens=False, stop=END)[:2] == ("ab", END)


def test_final_only_decodes_once() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode(TEXT)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    for token_id in token_ids:
        assert detokenizer.append(token_id) is None
    assert (tokenizer.num_decodes, tokenizer.num_streams, detokenizer.text) == (0, 0, "")
    detokenizer.finish()
    detokenizer.finish()
    assert (tokenizer.num_decodes, tokenizer.num_streams, detokenizer.text) == (1, 0, TEXT)


def test_final_only_still_finds_stop_strings() -> None:
    tokenizer = byte_level()
    kind = RequestOutputKind.FINAL_ONLY
    assert run(tokenizer, tokenizer.encode(TEXT), stop="it", output_kind=kind)[:2] == (TEXT[: TEXT.index("it")], "it")


def test_without_detokenization_there_is_no_text_and_no_tokenizer() -> None:
    detokenizer = IncrementalDetokenizer(None, SamplingParams(detokenize=False))
    assert detokenizer.append(3) is None
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.take_delta()) == ("", "")


def test_nothing_is_appended_after_the_end() -> None:
    tokenizer = byte_level()
    for params in (SamplingParams(), SamplingParams(stop="a")):
        detokenizer = IncrementalDetokenizer(tokenizer, params)
        if detokenizer.append(tokenizer.encode("a")[0]) is None:
            detokenizer.finish()
        with pytest.raises(InvariantError, match="finished text"):
            detokenizer.append(tokenizer.encode("b")[0])


def test_bytes_that_spoil_an_earlier_character() -> None:
    """A byte-fallback decoder turns a whole run of bytes to replacement characters when its end is broken,
    the character already shown included."""
    tokenizer = byte_fallback()
    token_ids = [*"€".encode(), 0xE2, *tokenizer.encode("ab")]
    assert tokenizer.tokenizer.decode(token_ids[:3]) == "€"
    text, stop, deltas, _ = run(tokenizer, token_ids, stop="b")
    assert (text, stop) == ("\ufffd" * 4 + "a", "b")
    assert deltas[2] == "€"
    assert "".join(deltas)[1:] == text[1:]
    assert run(tokenizer, token_ids)[0] == tokenizer.tokenizer.decode(token_ids) == "\ufffd" * 4 + "ab"


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_end_as_the_tokenizer_decodes_them(make_tokenizer, seed: int) -> None:
    tokenizer = make_tokenizer()
    token_ids = random.Random(seed).choices(range(tokenizer.tokenizer.get_vocab_size()), k=60)
    expected = tokenizer.tokenizer.decode(token_ids)
    for params in ({}, {"stop": "\0never"}, {"output_kind": RequestOutputKind.FINAL_ONLY}):
        assert run(tokenizer, token_ids, **params)[0] == expected
