"""Strings that tokenizers disagree on: over 200 of them, of every kind that a prompt may hold."""

# ruff: noqa: RUF001  (characters that look alike are the point)

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

_WORDS = (
    *("", "a", " ", "Hello world", " leading", "trailing ", "UPPER lower MiXeD", "camelCaseWordsAndHTTPServers"),
    *("snake_case_and__dunder__", "kebab-case-words", "e.g. i.e. etc.", "naïve café résumé", "co-operate", "x", "I"),
    "The quick brown fox jumps over the lazy dog, twice; then it rests.",
)
_CONTRACTIONS = (
    *(
        "I'm",
        "I'M",
        "you're",
        "YOU'RE",
        "he'll",
        "HE'LL",
        "we've",
        "it's",
        "IT'S",
        "don't",
        "DON'T",
        "they'd",
        "'s",
        "'",
    ),
    *("rock 'n' roll", "o'clock", "I’m", "don’t’ve", "''quoted''", "l'ami d'hier", "'twas", "y'all'd've", "'ſ", "I'ſ"),
)
_NUMBERS = (
    *("0", "7", "42", "007", "1234567890", "3.14159", "1,000,000", "1e-5", "0x1F", "12:34:56", "2024-02-29", "v1.2.3"),
    *(
        "½ ¾ ⅓",
        "²³⁴",
        "١٢٣",
        "१२३",
        "一二三",
        "Ⅳ Ⅷ",
        "١a1",
        "1st 2nd 3rd",
        "-1 +1 ±1",
        "100%",
        "$5.00 €7 ¥9",
        "1 2  3   4",
    ),
)
_SPACES = (
    *(
        "  ",
        "   ",
        "    ",
        " " * 7,
        " " * 8,
        " " * 17,
        "\t",
        "\t\t",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        "\r\n\r\n",
        "\r",
        " \n",
    ),
    *(
        "\n ",
        " \n ",
        "\n \n",
        "a  b",
        "a   b",
        "a    b",
        "a \n b",
        "a\n\n b",
        "a\t b",
        "\ta",
        "  a",
        "a  ",
        "a\n",
        "a \n",
    ),
    *(
        "\u00a0",
        "a\u00a0b",
        "\u2003\u2003",
        "\u3000x",
        "\u200b",
        "a\u200bb",
        "\ufeff",
        "\u2028",
        "\x0b\x0c",
        "\x85",
        "\u1680",
    ),
)
_CODE = (
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b[i];\n}\n",
    "if x == 1 and y != 2:\n        pass  # comment\n\n\n",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';",
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9\\n"}',
    '<div class="x">&nbsp;<br/></div>\n<!-- c -->',
    "#!/bin/sh\nset -eu\nls -la | grep '^d' && echo \"$HOME\"\n",
    "\\begin{equation} \\frac{a}{b} \\end{equation}",
    "https://example.org/a/b?c=d&e=f#g",
    "user.name+tag@mail.example.com",
    "let s = `${a}-${b}`; // ok",
    "x = lambda *args, **kw: (args, kw)",
    "::<>()->[]{}!=~^|&%$#@`",
    "....----____====####",
    "/* */ // /// //* \\\\ \\n",
    "\t\tif err != nil {\n\t\t\treturn nil, err\n\t\t}\n",
    "a[0][1]->b.c()->d;",
    "a/b/c\n/d\n//\r\n",
)
_SCRIPTS = (
    *(
        "Привет, мир! Как дела?",
        "Γειά σου Κόσμε",
        "שלום עולם",
        "مرحبا بالعالم",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
        "こんにちは世界",
    ),
    *(
        "안녕하세요 세계",
        "你好，世界！",
        "繁體中文測試。",
        "ひらがなカタカナ漢字",
        "Xin chào thế giới",
        "Zażółć gęślą jaźń",
    ),
    *(
        "İstanbul ığüşöç",
        "ქართული ენა",
        "Հայերեն",
        "ភាសាខ្មែរ",
        "తెలుగు",
        "ગુજરાતી",
        "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
        "ǅ ǆ Ǆ ß ẞ ﬁ ﬂ",
        "Ωμέγα Å Å",
    ),
    *("e\u0301 cafe\u0301", "A\u030a", "\u1100\u1161\u11a8", "n\u0303o", "ḍ̇ ḍ̇", "क्‍ष", "मु्ंबई"),
)
_EMOJI = (
    *(
        "😀",
        "😀😃😄",
        "👍🏽",
        "👨‍👩‍👧‍👦",
        "🏳️‍🌈",
        "🇩🇪🇫🇷",
        "❤️ ❤",
        "☕️ time",
        "a😀b",
        "✓ ✗ → ≤ ≥ ≠ ∑",
        "🙂🙃 end",
        "¯\\_(ツ)_/¯",
    ),
    *(
        "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
        "“quotes” ‘single’ «guillemets»",
        "… — – ‐",
        "© ® ™ § ¶ †",
        "①②③ ㊗",
        "\U0010ffff",
        "\ue000",
        "\ufffd",
    ),
)
_CONTROL = (
    *(
        "\x00",
        "\x01\x02",
        "\x7f",
        "\x1b[0m",
        "a\x00b",
        "\x80\x9f",
        "<|",
        "|>",
        "<||>",
        "<|im_start",
        "im_end|>",
        "</s>",
        "<s>",
    ),
    *("<bos>", "[INST]", "<unk>", "<|unknown|>", "[PAD151935]", "<0x0A>", "▁", "Ġ", "Ġthe", "Ċ", "â", "Ã©"),
)
_PIECES = ("The", " 12", "\n", "  ", "'s", "é", "中", "😀", "\t", "_x")

PLAIN_SAMPLES: tuple[str, ...] = (
    *(_WORDS + _CONTRACTIONS + _NUMBERS + _SPACES + _CODE + _SCRIPTS + _EMOJI + _CONTROL),
    *("".join(pair) for pair in itertools.product(_PIECES, repeat=2)),
)


def marker_samples(markers: list[str]) -> list[str]:
    """Texts with a model's own control and user-defined tokens in them: alone, doubled, cut, and among text."""
    samples = []
    for marker in markers:
        samples += [marker, f"a{marker}b", f" {marker} \n", marker * 2, marker[:-1], f"é{marker}\n\n1", marker.upper()]
    return samples


def drawn_samples(count: int, seed: int, markers: Sequence[str] = ()) -> list[str]:
    """`count` different texts: the plain samples' parts in all orders, cut anywhere, with characters of all of Unicode
    and a model's own markers in between."""
    chance = random.Random(seed)
    parts = [part for sample in PLAIN_SAMPLES for part in (sample, *sample.split(" "))]
    texts: dict[str, None] = {}
    while len(texts) < count:
        pieces = []
        for _ in range(chance.randint(1, 8)):
            kind = chance.random()
            if kind < 0.65:
                piece = chance.choice(parts)
                pieces.append(piece[: chance.randint(0, len(piece))] if chance.random() < 0.2 else piece)
            elif kind < 0.8:
                code = chance.choice((0x80, 0x3000, 0x10000, 0x110000))
                characters = (chance.randrange(code) for _ in range(chance.randint(1, 5)))
                pieces.append("".join(chr(each) for each in characters if not 0xD800 <= each < 0xE000))
            elif kind < 0.9 or not markers:
                pieces.append(chance.choice((" ", "  ", "\n", "\n\n", "\t", " \n", "\u00a0")))
            else:
                pieces.append(chance.choice(markers))
        texts[chance.choice(("", " ")).join(pieces)] = None
    return list(texts)
