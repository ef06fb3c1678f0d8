"""The state of one output in its grammar, against a list of all strings that the grammar has."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lamella.engine.structured.compiler import GrammarCompiler
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.params import StructuredOutputsParams
from lamella.model_executor.text.tokenizer import Tokenizer
from tests.helpers import tiny_tokenizers

WORDS = ("stop", "stopper", "the stop", "a", "ab", "", "öl", "\n x")
VOCAB = 300  # more than the tokenizers have
LIBRARIES = ("guidance", "xgrammar")
MAKERS = (tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback)


@pytest.fixture(
    scope="module", params=itertools.product(MAKERS, LIBRARIES), ids=lambda pair: f"{pair[0].__name__}-{pair[1]}"
)
def made(request):
    make, library = request.param
    backend = make()
    end = backend.token_to_id(tiny_tokenizers.END)
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": tiny_tokenizers.END})
    return backend, end, GrammarCompiler(tokenizer, VOCAB, (end,), StructuredOutputsConfig(backend=library))


def bytes_of(backend, token_id: int) -> bytes | None:
    """What a token is in a text's middle; None for the end token and for what no token has."""
    token = backend.id_to_token(token_id)
    if token is None or token == tiny_tokenizers.END:
        return None
    if token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    if backend.normalizer is not None:
        return token.replace("▁", " ").encode()
    return bytes(tiny_tokenizers._letters().index(letter) for letter in token)


def allowed_of(pieces: list[bytes | None], end: int, words: tuple[bytes, ...], written: bytes) -> set[int]:
    """pieces: of each token, as `bytes_of` has it."""
    allowed = {end} if written in words else set()
    for token_id, piece in enumerate(pieces):
        if piece and any(word.startswith(written + piece) for word in words):
            allowed.add(token_id)
    return allowed


def ids_in(mask: np.ndarray) -> set[int]:
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-VOCAB // 32),)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_masks_along_random_ways_and_back(made):
    backend, end, compiler = made
    words = tuple(word.encode() for word in WORDS if word)
    pieces = [bytes_of(backend, token_id) for token_id in range(VOCAB)]
    grammar = compiler.compile(StructuredOutputsParams(choice=[word for word in WORDS if word]))()
    random = np.random.default_rng(0)
    output: list[int] = []
    seen = set()
    for _ in range(400):
        written = b"".join(pieces[token_id] for token_id in output)
        expected = allowed_of(pieces, end, words, written)
        found = ids_in(grammar.mask(np.array(output, dtype=np.int32)))
        # Where all words go on with the same bytes, the mask has the tokens alone into which a tokenizer cuts these.
        next_bytes = {word[len(written) : len(written) + 1] for word in words if word.startswith(written)}
        assert (found == expected) if len(next_bytes) > 1 else (found and found <= expected)
        seen.add(written)
        going_on = sorted(expected - {end})
        if going_on and random.random() < 0.7:
            output.append(int(random.choice(going_on)))
        else:  # taken back, as rejected drafts are, and perhaps gone on elsewhere
            output = output[: random.integers(0, len(output) + 1)]
    assert grammar.problem is None
    assert set(words) <= seen


def test_how_many_drafts_may_come(made):
    backend, end, compiler = made
    grammar = compiler.compile(StructuredOutputsParams(regex="(the )?stop[ab]*"))()
    written = backend.encode("the stop").ids
    drafts = backend.encode("abab").ids
    nothing = np.zeros(0, dtype=np.int32)
    assert grammar.num_allowed(nothing, [*written, *drafts, end]) == len(written) + len(drafts) + 1
    assert grammar.num_allowed(np.array(written, dtype=np.int32), [*drafts, end]) == len(drafts) + 1
    wrong = backend.encode("t").ids[-1]
    assert grammar.num_allowed(np.array(written, dtype=np.int32), [*drafts[:2], wrong, *drafts]) == 2
    assert grammar.num_allowed(np.array(written, dtype=np.int32), []) == 0
    assert end in ids_in(grammar.mask(np.array(written, dtype=np.int32)))  # asking has changed nothing


def test_two_samples_have_states_of_their_own(made):
    backend, end, compiler = made
    new = compiler.compile(StructuredOutputsParams(choice=["a", "b"]))
    first, second = new(), new()
    nothing = np.zeros(0, dtype=np.int32)
    a = backend.encode("a").ids
    assert ids_in(first.mask(np.array(a, dtype=np.int32))) == {end}
    pieces = [bytes_of(backend, token_id) for token_id in range(VOCAB)]
    assert ids_in(second.mask(nothing)) == allowed_of(pieces, end, (b"a", b"b"), b"")


def test_an_output_that_left_its_grammar_has_a_problem_and_allows_nothing(made):
    backend, _, compiler = made
    grammar = compiler.compile(StructuredOutputsParams(choice=["stop"]))()
    left = np.array(backend.encode("the").ids, dtype=np.int32)
    assert not ids_in(grammar.mask(left))
    assert grammar.problem is not None
    assert "cannot go on in its grammar" in grammar.problem
    assert grammar.num_allowed(left, [1]) == 0
