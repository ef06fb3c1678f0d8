"""The incremental text against decoding every prefix from scratch."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.engine.detokenizer import IncrementalDetokenizer
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.errors import InvariantError
from lamella.model_executor.text.stop_strings import StopMatcher
from lamella.model_executor.text.text_stream import StreamRules, TextStream
from tests.helpers import tiny_tokenizers
from tests.helpers.tiny_tokenizers import END


class TinyTokenizer:
    """What the detokenizer needs of a tokenizer; counts how often it is asked."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decodes = 0
        self.num_streams = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decodes += 1
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, skip_special_tokens: bool) -> TextStream:
        self.num_streams += 1
        return TextStream(self.tokenizer, StreamRules.of(self.tokenizer), skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def byte_level() -> TinyTokenizer:
    return TinyTokenizer(tiny_tokenizers.byte_level())


def byte_fallback() -> TinyTokenizer:
    return TinyTokenizer(tiny_tokenizers.byte_fallback())


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


class Pieces:
    """Each token is a piece of text as it stands."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens):
        return "".join(self.pieces[one] for one in ids)

    def decode_stream(self, skip_special_tokens):
        return SimpleNamespace(step=self.pieces.__getitem__, num_tentative=0, num_taken_back=0)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_is_found_however_tokens_split_it(include: bool, kind: RequestOutputKind) -> None:
    """In every way to cut the text into tokens, also such that begin before the string or go on after it."""
    text, stop = "asSTOPx", "STOP"
    end = text.index(stop) + len(stop)
    expected = text[:end] if include else text[: text.index(stop)]
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        ends = [place + 1 for place, is_cut in enumerate(cuts) if is_cut] + [len(text)]
        pieces = [text[first:last] for first, last in zip([0, *ends], ends, strict=False)]
        params = SamplingParams(stop=[stop], include_stop_str_in_output=include, output_kind=kind)
        detokenizer = IncrementalDetokenizer(Pieces(pieces), params)
        deltas, found = [], None
        for token_id in range(len(pieces)):
            found = detokenizer.append(token_id)
            if found is not None:
                break
            deltas.append(detokenizer.take_delta())
        detokenizer.finish()
        deltas.append(detokenizer.take_delta())
        assert (found, ends[token_id]) == (stop, next(one for one in ends if one >= end))
        assert detokenizer.text == "".join(deltas) == expected


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
    assert deltas[:3] == [""] * 3, "not certain yet"
    assert "".join(deltas) == text
    assert run(tokenizer, token_ids)[0] == tokenizer.tokenizer.decode(token_ids) == "\ufffd" * 4 + "ab"


@BOTH
@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_end_as_the_tokenizer_decodes_them(make_tokenizer, seed: int) -> None:
    tokenizer = make_tokenizer()
    token_ids = random.Random(seed).choices(range(tokenizer.tokenizer.get_vocab_size()), k=60)
    expected = tokenizer.tokenizer.decode(token_ids)
    for params in ({}, {"stop": "\0never"}, {"output_kind": RequestOutputKind.FINAL_ONLY}):
        assert run(tokenizer, token_ids, **params)[0] == expected


def visible_text(tokenizer: TinyTokenizer, token_ids: list[int]) -> str:
    """By the definition of byte fallback: a run of bytes is its text, or a U+FFFD for each byte. The bytes of a
    character that lacks some are left out as long as they may be completed."""
    text = ""
    runs = [(is_byte, list(run)) for is_byte, run in itertools.groupby(token_ids, key=lambda token_id: token_id < 256)]
    for index, (is_byte, run) in enumerate(runs):
        if not is_byte:
            text += "".join(tokenizer.tokenizer.id_to_token(token_id).replace("▁", " ") for token_id in run)
            continue
        try:
            text += bytes(run).decode()
        except UnicodeDecodeError as error:
            is_open = index == len(runs) - 1 and error.reason == "unexpected end of data"
            text += bytes(run[: error.start]).decode() if is_open else "\ufffd" * len(run)
    return text


BYTES_AND_LETTERS = [*"€🙂a".encode(), 0xE2, 0xFF, ord("b"), 256 + 1, 256 + 2, 256 + 3]


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.sampled_from(BYTES_AND_LETTERS), max_size=30),
    stops=st.lists(st.text(alphabet="ab€🙂\ufffd", min_size=1, max_size=4), max_size=3, unique=True),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stop_strings_among_bytes_that_may_be_spoilt(token_ids, stops, min_tokens, include) -> None:
    """The first place at which any stop string occurs, in a text whose end may change under it."""
    tokenizer = byte_fallback()
    expected = tokenizer.tokenizer.decode(token_ids), None, len(token_ids)
    before = ""
    for num_taken in range(1, len(token_ids) + 1):
        text = visible_text(tokenizer, token_ids[:num_taken])
        num_same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        matches = [
            (position, stops.index(stop), stop)
            for stop in stops
            for position in range(len(text))
            if text.startswith(stop, position) and position + len(stop) > min(num_same, len(text))
        ]
        before = text
        if matches and num_taken > min_tokens:
            position, _, stop = min(matches)
            expected = text[: position + len(stop) * include], stop, num_taken
            break
    final, stop, deltas, num_taken = run(
        tokenizer, token_ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include
    )
    assert (final, stop, num_taken) == expected
    assert "".join(deltas) == final


@BOTH
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stop", [[], ["stop", "\ufffdx", "aa"]])
def test_deltas_of_random_tokens_join_to_the_text(make_tokenizer, seed: int, stop: list[str]) -> None:
    tokenizer = make_tokenizer()
    chance = random.Random(seed)
    kinds = [range(256), range(128, 256), range(tokenizer.tokenizer.get_vocab_size())]
    token_ids = [chance.choice(chance.choice(kinds)) for _ in range(200)]
    final, found, deltas, num_taken = run(tokenizer, token_ids, stop=stop, output_kind=RequestOutputKind.DELTA)
    assert "".join(deltas) == final
    if found is None:
        assert final == tokenizer.tokenizer.decode(token_ids)
    else:
        assert final == tokenizer.tokenizer.decode(token_ids[:num_taken])[: len(final)]


@BOTH
@pytest.mark.parametrize("token", [0xFF, 0x82, 0xE2])
def test_bytes_that_form_no_character_come_out_as_they_are_made(make_tokenizer, token: int) -> None:
    """2,000 equal bytes: all but the newest few characters have been given out after each token, at the cost of the
    last few tokens each."""
    tokenizer = make_tokenizer()
    letter = tokenizer.encode(bytes([token]).decode("latin-1"))
    token_id = token if make_tokenizer is byte_fallback else letter[-1]
    assert tokenizer.tokenizer.decode([token_id]) == "\ufffd"
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(max_tokens=None, stop="never"))
    num_given = 0
    for num_tokens in range(1, 2001):
        assert detokenizer.append(token_id) is None
        num_given += len(detokenizer.take_delta())
        assert num_given >= num_tokens - 3
    assert tokenizer.num_decodes == 0, "nothing was decoded from the beginning"
    detokenizer.finish()
    assert detokenizer.text == "\ufffd" * 2000


def test_a_text_with_many_long_stop_strings_is_compared_a_few_times(monkeypatch) -> None:
    """1,000 stop strings of 10,000 characters: as many comparisons as with one, each of a few characters."""
    num_compared = []
    compare = StopMatcher._compare

    def counted(self, position, start):
        num_compared.append(self._num_chars - position - start.num_compared)
        return compare(self, position, start)

    monkeypatch.setattr(StopMatcher, "_compare", counted)
    tokenizer = byte_level()
    chance = random.Random(0)
    letters = "abcdefghij"
    stops = ["".join(chance.choices(letters, k=10_000)) for _ in range(1000)]
    text = "".join(chance.choices(letters, k=1500)) + stops[7][:1500]  # the second half may become the seventh
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(max_tokens=None, stop=stops))
    deltas = []
    for token_id in tokenizer.encode(text):
        assert detokenizer.append(token_id) is None
        deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == text[:1500]
    assert len(num_compared) <= 3 * len(text)
    assert sum(num_compared) <= 6 * len(text)
