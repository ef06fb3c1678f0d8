"""Small tokenizers of each kind of decoder, and what they make of bytes, from the definitions."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END = "<end>"


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte is a letter, and a few merges."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("s", "t"), ("o", "p"), ("st", "op")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def straddling() -> tokenizers.Tokenizer:
    """Byte-level, with tokens that end one character and begin the next."""
    letter_of = dict(zip(range(256), _letters(), strict=True))
    pieces = [
        b"\xe2",
        b"\x82\xac",
        b"\xac\xe2\x82",
        b"\x82",
        b"\xac",
        b"\x9f\x99\x82\xf0",
        b"\xf0",
        b"a",
        b"\xff",
        b" b",
    ]
    vocab = {"".join(letter_of[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def byte_fallback(*, strips_space: bool = False) -> tokenizers.Tokenizer:
    """Gemma's kind: letters, and the bytes of any character that is no letter of the vocabulary. strips_space: as
    Llama 2 does, from the beginning of a text."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ["▁", *"abcdefghijklmnopqrstuvwxyz.!\n", "▁t", "▁th", "▁the", "st", "op", "stop"]:
        vocab[word] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("s", "t"), ("o", "p"), ("st", "op")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_space:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([END])
    return tokenizer


def _letters() -> list[str]:
    """GPT-2's letter of each byte: itself where it is printable Latin-1, else the next code point from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


# A token that files give as an object, without its `__type`.
OBJECT = {"content": "<image>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
