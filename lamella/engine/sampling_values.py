"""Parameters of SamplingParams that are collections, each checked and brought to one form: tuples without repetitions.

Whatever is wrong is a RequestError that names the parameter, the value and what would work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lamella.argument_checks import MOST_TOKENS, RealRange, WholeRange, shown
from lamella.errors import RequestError

TOKEN_ID = WholeRange(0, MOST_TOKENS, f"ids of the vocabulary, none negative or above {MOST_TOKENS}")
# More would drown any logit, and what is added to float32 logits must not overflow.
BIAS = RealRange(-1e9, 1e9, "a number to add to the token's logit, from -1e9 to 1e9")

Biases = tuple[tuple[int, float], ...]
TokenSequences = tuple[tuple[int, ...], ...]


def stop_strings(given: Any) -> tuple[str, ...]:
    """One string or several; None: no string."""
    strings = _texts("stop", given)
    if "" in strings:
        raise RequestError(
            f"stop={shown(list(strings))} holds an empty string, which would match at once; leave it out"
        )
    return strings


def bad_words(given: Any) -> tuple[str, ...]:
    """One string or several; None: no string. Each has a character that is no space."""
    words = _texts("bad_words", given)
    for word in words:
        if not word.strip():
            raise RequestError(
                f"bad_words={shown(list(words))} holds {word!r}, which is no word; leave it out, or rule tokens out "
                "with suppress_tokens"
            )
    return words


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """None: no ids."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"{name}={shown(given)} is a {type(given).__name__}; give a list of token ids")
    return tuple(dict.fromkeys(TOKEN_ID.check(name, token_id, RequestError) for token_id in given))


def allowed_token_ids(given: Any) -> tuple[int, ...] | None:
    """None: all are allowed."""
    ids = token_ids("allowed_token_ids", given)
    if given is not None and not ids:
        raise RequestError(
            f"allowed_token_ids={shown(given)} allows no token at all; name at least one, or give None to allow all"
        )
    return None if given is None else ids


def token_sequences(name: str, given: Any) -> TokenSequences:
    """Lists of token ids, none of them empty; None: no list."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"{name}={shown(given)} is a {type(given).__name__}; give a list of lists of token ids")
    sequences = []
    for sequence in given:
        if isinstance(sequence, (str, bytes, Mapping)) or not isinstance(sequence, Iterable):
            raise RequestError(
                f"{name} holds {shown(sequence)}, a {type(sequence).__name__}; give a list of lists of token ids"
            )
        sequences.append(tuple(TOKEN_ID.check(name, token_id, RequestError) for token_id in sequence))
        if not sequences[-1]:
            raise RequestError(f"{name} holds an empty list; each must have at least one token id")
    return tuple(dict.fromkeys(sequences))


def logit_bias(given: Any) -> Biases:
    """A mapping of token ids (or their digits, as JSON has them) to numbers, or pairs of these; None: no bias."""
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    is_text = isinstance(pairs, (str, bytes))
    if is_text or not isinstance(pairs, Iterable):
        raise RequestError(f"logit_bias={shown(given)} is a {type(given).__name__}; give a dict {{token id: bias}}")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RequestError(f"logit_bias holds {shown(pair)}; give a dict {{token id: bias}}")
        key, value = pair
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
            key = int(key)
        token_id = TOKEN_ID.check("logit_bias' token id", key, RequestError)
        if token_id in biases:
            raise RequestError(f"logit_bias names token {token_id} twice; give each token one bias")
        biases[token_id] = BIAS.check(f"logit_bias[{token_id}]", value, RequestError)
    return tuple(biases.items())


def _texts(name: str, given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        given = (given,)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{name}={shown(given)} is a {type(given).__name__}; give a string or a list of strings")
    strings = tuple(given)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"{name}={shown(list(strings))} holds a {type(string).__name__}; give strings only")
    return tuple(dict.fromkeys(strings))
