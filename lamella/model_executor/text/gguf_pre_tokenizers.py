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
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_GPT4O,))),
}
