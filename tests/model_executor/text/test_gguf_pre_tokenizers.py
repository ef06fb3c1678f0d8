"""How byte-level vocabularies cut texts into words, against the rules as llama.cpp's table has them, run by another
engine of regular expressions (the `regex` package)."""

from __future__ import annotations

import json
from unicodedata import category, ucd_3_2_0

import pytest
import regex
import tokenizers
from tokenizers import models, pre_tokenizers

from lamella.model_executor.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from tests.helpers.text_samples import PLAIN_SAMPLES, drawn_samples

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_HALVES = "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|{_END}"
)
_ASIAN = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x3040, 0x309F), (0x30A0, 0x30FF), (0xFF65, 0xFF9F),
    (0x2F00, 0x2FDF), (0x0E40, 0x0E7F), (0x0E80, 0x0EFF), (0x1780, 0x17FF), (0x1000, 0x109F), (0xAA60, 0xAA7F),
    (0xA9E0, 0xA9FF), (0xAC00, 0xD7AF), (0x1100, 0x11FF),
]  # fmt: skip
_IN_ASIAN = "[" + "".join(rf"\u{first:04x}-\u{last:04x}" for first, last in _ASIAN) + "]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001
# Han is a script of its own; letters of other scripts, by what is left of the categories.
_UPPER_KIMI, _LOWER_KIMI = (rf"(?:(?!\p{{Han}}){each})" for each in (_UPPER, _LOWER))
SPELLED = {
    "jais-2": [
        rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_HALVES}"
        r"|\s{1,2}(?!\S)|\s{1}"
    ],
    "minicpm5": [
        r"\p{N}{1,3}",
        rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}",
    ],
    "exaone-moe": [
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "kimi-k2": [
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}*{_LOWER_KIMI}+{_CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_KIMI}+{_LOWER_KIMI}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
    ],
    "bloom": [_BLOOM],
    "viking": [_BLOOM, r"\p{N}"],
    "afmoe": [None, _IN_ASIAN, _DEEPSEEK],
}
SAME = {"cohere2moe": "tiny_aya", "gpt3-finnish": "bloom", "poro-chat": "bloom"}


def is_settled(text: str) -> bool:
    """Whether all versions of Unicode have the characters in the same categories, and engines agree on which of them
    are parts of words: not on numbers that are no digits."""
    return all(ucd_3_2_0.category(char) == category(char) not in ("Cn", "No", "Nl") for char in text)


def cut(text: str, patterns: list[str | None]) -> list[str]:
    """Each pattern cuts what those before it left; None: numbers, into threes from the right."""
    pieces = [text]
    for pattern in patterns:
        pieces = [
            part for piece in pieces for part in (by_threes(piece) if pattern is None else isolated(piece, pattern))
        ]
    return pieces


def isolated(text: str, pattern: str) -> list[str]:
    parts, end = [], 0
    for match in regex.finditer(pattern, text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in (*parts, text[end:]) if part]


def by_threes(text: str) -> list[str]:
    parts = []
    for run in isolated(text, r"\p{N}+"):
        if not regex.fullmatch(r"\p{N}+", run):
            parts.append(run)
            continue
        first = len(run) % 3 or 3
        parts += [run[:first], *(run[start : start + 3] for start in range(first, len(run), 3))]
    return parts


@pytest.mark.parametrize("name", [*SPELLED, *SAME])
def test_words_are_those_of_the_spelled_rules(name: str) -> None:
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None}
    document |= {**PRE_TOKENIZERS[name].document(), "decoder": None}
    document["model"] = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())["model"]
    ours = tokenizers.Tokenizer.from_str(json.dumps(document)).pre_tokenizer
    assert ours is not None
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = (*PLAIN_SAMPLES, *drawn_samples(300, seed=4), "1234567 12ab 1,234 ٣٤٥٦ 漢字かなABC def", " " * 700 + "x")
    texts = list(filter(is_settled, texts))
    assert len(texts) > 300
    for text in texts:
        words = [alphabet.pre_tokenize_str(piece)[0][0] for piece in cut(text, SPELLED[SAME.get(name, name)])]
        assert [word for word, _ in ours.pre_tokenize_str(text)] == words, repr(text)
