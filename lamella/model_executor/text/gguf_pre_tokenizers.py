"""How byte-level BPE cuts a text into words before it merges, by the name in `tokenizer.ggml.pre`.

Which names share a rule, which of them look a word up before merging, and which put a bos before a text that nothing is
said about, are facts of llama.cpp's src/llama-vocab.cpp. Patterns are those of the models' own tokenizer.json (GPT-2,
StarCoder, SmolLM2, Command R, Llama 3, Qwen2, Qwen3.5, Mistral Nemo, gpt-oss, DeepSeek V3 and so on), whose regex
dialect the tokenizers library has: llama.cpp spells out in other words what its own cannot say. So is the Unicode
normal form of Qwen's and Command R's, which a GGUF file does not state and llama.cpp leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
# A word is capitals (or letters without case) and then small letters, either of them possibly none.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}"
    rf"|{_LINES_AND_SPACES}"
)
# Digits by threes, Han and kana by themselves, and words with the mark of ASCII or the other character before them.
_DIGITS, _HAN_AND_KANA = r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK = (
    rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_LINES = r"[^\n]+|\n+"
_SEED = rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Digits by threes from the right; `\b` of the one's own file.
_DIGITS_FROM_RIGHT, _DIGITS_TO_BORDER = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", r"\d{1,3}(?=(?:\d{3})*\b)"
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_JAIS2 = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
_MINICPM5 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    _DIGIT,
)
# Words of letters that are not Han, beside runs of Han.
_NOT_HAN = r"&&[^\p{Han}]]"
_UPPER_NOT_HAN, _LOWER_NOT_HAN = (each.replace("]", _NOT_HAN) for each in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTION}?"
    rf"|{_BEFORE}{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns: each cuts what those before it left. normal_form: "NFC" or None. ignores_merges: a word that is a
    token is that token, whatever merges say. adds_bos: unless the file says otherwise."""

    patterns: tuple[str, ...]
    normal_form: str | None = None
    ignores_merges: bool = False
    adds_bos: bool = False

    def document(self) -> dict[str, Any]:
        """The normalizer and the pre-tokenizer of a tokenizers JSON document."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "normalizer": None if self.normal_form is None else {"type": self.normal_form},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_alone]},
        }


_WORDS = PreTokenizer((_GPT2,))
_WORDS_AND_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,))
_LLAMA3_WHOLE = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_QWEN2_LIKE = PreTokenizer((_QWEN2,), normal_form="NFC")

PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert"), _WORDS),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), _WORDS),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone"), _WORDS_AND_DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _WORDS_AND_DIGITS),
    "command-r": PreTokenizer((_DIGIT, _GPT2), normal_form="NFC"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3_WHOLE),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3_WHOLE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3_LIKE),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignores_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2_LIKE),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), PreTokenizer((_QWEN2,))),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "qwen35": PreTokenizer((_QWEN35,), normal_form="NFC"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer((_DIGITS, _HAN_AND_KANA, _DEEPSEEK))),
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "afmoe": PreTokenizer((_DIGITS_FROM_RIGHT, _ASIAN_SCRIPTS, _DEEPSEEK)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((_DIGITS_TO_BORDER, _GPT4O))),
    "jais-2": PreTokenizer((_JAIS2,)),
    "minicpm5": PreTokenizer((_DIGITS, _MINICPM5), ignores_merges=True),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "kimi-k2": PreTokenizer((_KIMI,)),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_GPT4O,))),
}
