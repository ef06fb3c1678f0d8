"""Text that grows token by token, against decoding all tokens at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.model_executor.text.text_stream import StreamRules, TextStream
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers import tiny_tokenizers
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.tiny_gguf import save_tiny_gguf

KINDS = {
    "byte level": tiny_tokenizers.byte_level(),
    "straddling": tiny_tokenizers.straddling(),
    "byte fallback": tiny_tokenizers.byte_fallback(),
    "byte fallback, strips": tiny_tokenizers.byte_fallback(strips_space=True),
}
RULES = {kind: StreamRules.of(tokenizer) for kind, tokenizer in KINDS.items()}


def check(backend, rules, token_ids, skip=True):
    """What is settled never changes again, and no more than one unfinished character is missing at the end."""
    stream = TextStream(backend, rules, skip)
    whole = backend.decode(token_ids, skip_special_tokens=skip)
    text = ""
    for token_id in token_ids:
        new = stream.step(token_id)
        text = text[: len(text) - stream.num_taken_back] + new
        assert whole.startswith(text[: len(text) - stream.num_tentative])
        assert stream.num_tentative <= len(text)
    rest = whole.removeprefix(text)
    assert whole.startswith(text) or stream.num_tentative, "characters whose run is cut short are taken back"
    if whole.startswith(text):
        assert len(rest) <= (3 if rules.byte_of else 1)
        assert set(rest) <= {"\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_tokens(kind, skip, data):
    backend = KINDS[kind]
    size = backend.get_vocab_size()
    bytes_of_characters = [token for token in "€🙂é ab".encode() if token < size]
    one = st.one_of(st.integers(0, size), st.sampled_from(bytes_of_characters or [0]))  # `size` is no token
    check(backend, RULES[kind], data.draw(st.lists(one, max_size=40)), skip)


def test_gguf_vocabulary(tmp_path):
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path, save_tiny_gemma(tmp_path / "hf", num_hidden_layers=1, layer_types=["full_attention"]))
    tokenizer = load_tokenizer(resolve_model(str(path)), tmp_path / "cache")
    rules = StreamRules.of(tokenizer._backend)
    assert len(rules.byte_of) == 256
    chance = random.Random(0)
    for _ in range(100):
        kinds = [range(5, 261), range(261, 272), range(tokenizer.vocab_size)]
        check(tokenizer._backend, rules, [chance.choice(chance.choice(kinds)) for _ in range(40)])


@pytest.mark.slow
def test_gemma():
    tokenizer = load_tokenizer(resolve_model("demo:gemma-3-270m"))
    rules = StreamRules.of(tokenizer._backend)
    byte_ids = list(rules.byte_of)
    chance = random.Random(0)
    for _ in range(200):
        kinds = [byte_ids, byte_ids[128:], range(tokenizer.vocab_size), [tokenizer.eos_token_id]]
        check(
            tokenizer._backend, rules, [chance.choice(chance.choice(kinds)) for _ in range(40)], chance.random() < 0.5
        )
        text = "".join(chance.choices("aé€🙂日本 \n𓀀𒀀", k=20))
        ids = tokenizer.encode(text, add_special_tokens=False)
        check(tokenizer._backend, rules, ids)


class CountingBackend:
    """What a stream asks of a tokenizer, counted."""

    def __init__(self, backend):
        self._backend = backend
        self.num_decodes = self.num_ids = 0

    def decode(self, ids, skip_special_tokens):
        self.num_decodes += 1
        self.num_ids += len(ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id):
        return self._backend.id_to_token(token_id)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["no character", "a character and no character", "special", "characters"])
def test_a_token_costs_the_same_wherever_it_is(kind, what):
    backend = KINDS[kind]
    size = backend.get_vocab_size()
    if kind == "straddling":
        pattern = {
            "no character": [8], "a character and no character": [2, 8], "special": [size - 1], "characters": [0, 1]
        }[what]  # fmt: skip
    else:
        byte_ids = (
            range(256) if RULES[kind].byte_of else [backend.token_to_id(one) for one in tiny_tokenizers._letters()]
        )
        pattern = {
            "no character": [byte_ids[0xFF]],
            "a character and no character": [*(byte_ids[byte] for byte in "€".encode()), byte_ids[0xE2], size - 2],
            "special": [size - 1],
            "characters": [byte_ids[byte] for byte in "€".encode()],
        }[what]
    counting = CountingBackend(backend)
    stream = TextStream(counting, RULES[kind], True)
    for token_id in pattern * (2000 // len(pattern)):
        stream.step(token_id)
    assert counting.num_decodes <= 2 * 2000
    assert counting.num_ids <= 10 * 2000
