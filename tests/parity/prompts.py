"""The prompts of the parity fixture, by name.

The long ones are generated, so that the fixture need not carry their text: a name is enough to rebuild
one. Their lines all differ, and each ends by asking for something that was said far above, beyond a window of
512 tokens: an engine that drops or misplaces distant keys in a full-attention layer answers differently.
"""

# ruff: noqa: RUF001  (other scripts than Latin are the point)

from __future__ import annotations

import random
from collections.abc import Sequence

SHORT_PROMPTS: dict[str, str] = {
    "one_word": "Once",
    "english_fact": "The three largest cities of Australia by population are",
    "english_story": "The lighthouse keeper had not spoken to anyone for nineteen days when the radio crackled and",
    "english_list": "Shopping list for a vegetable soup:\n1. carrots\n2. leeks\n3.",
    "english_letter": (
        "Dear Ms. Okafor,\n\nThank you for your letter of 14 March. We regret that the parcel reached you with a "
        "broken lid, and"
    ),
    "english_chat": (
        "<start_of_turn>user\nWhy does ice float on water? Two sentences, please.<end_of_turn>\n<start_of_turn>model\n"
    ),
    "arithmetic": "7 + 5 = 12\n9 + 8 = 17\n6 + 7 = 13\n15 + 6 =",
    "python": (
        "def merge_intervals(intervals):\n"
        '    """Merge overlapping (start, end) pairs and return them sorted."""\n'
        "    merged = []\n    for start, end in sorted(intervals):\n"
    ),
    "c": (
        "#include <stddef.h>\n\n/* Reverse n bytes in place. */\nvoid reverse_bytes(unsigned char *data, size_t n)\n"
        "{\n\tsize_t i = 0;\n"
    ),
    "sql": (
        "CREATE TABLE loans (id INTEGER PRIMARY KEY, book_id INTEGER, member_id INTEGER, due DATE);\n"
        "-- members with more than three overdue loans\nSELECT member_id, COUNT(*) AS overdue FROM loans WHERE"
    ),
    "json": '{"stations": [{"id": 1, "name": "Harbour", "open": true}, {"id": 2, "name": "Market",',
    "html": "<!DOCTYPE html>\n<html>\n<head><title>Tide table</title></head>\n<body>\n<table>\n  <tr><th>Day</th>",
    "shell": "#!/bin/sh\n# Print the ten largest files below the current folder.\nset -eu\nfind . -type f",
    "whitespace_and_symbols": "a  b   c\t\td\n\n\n- [ ] one\n- [x] two ✓\n→ ≤ ≥ ≠ ∑ 🙂🙃",
    "german": "Am Rand des Moores stand eine alte Mühle, deren Räder sich seit Jahren nicht mehr",
    "french": "Pour préparer une bonne soupe à l'oignon, il faut d'abord",
    "spanish": "El tren de las ocho salió con retraso porque la máquina",
    "russian": "Зимой река замерзает, и жители деревни переходят её",
    "polish": "Na strychu znaleźliśmy skrzynię pełną listów, które",
    "turkish": "Sabah erkenden limana indik ve balıkçılar",
    "arabic": "في الصباح الباكر خرج الصياد إلى البحر ومعه",
    "hindi": "पहाड़ी गाँव में हर साल वसंत के समय लोग",
    "korean": "할머니는 매일 아침 작은 시장에 가서",
    "chinese": "图书馆在山脚下，每到周末，孩子们都会",
    "japanese": "駅前の小さなパン屋では、毎朝五時になると",
    "english_medium": (
        "Notes of the allotment society, spring meeting. Present: nine members and one visitor. The treasurer reported "
        "that the water bill has risen by a fifth, and that the new hose was paid for from the seed fund. It was asked "
        "whether the plots by the railway could share a tank; the secretary will write to the railway about the fence. "
        "The compost heap is to be moved before May, because the old place floods. Two plots are free: one is shaded "
        "by the plane tree, the other has good soil but no path. The visitor asked for the second and was told of the "
        "path. A swap of seeds is planned for the first Sunday in April, with tea. Somebody has lost a green glove. "
        "Decisions taken:\n1."
    ),
}

_SERVICES = ("ledger", "mailer", "gateway", "thumbnailer", "planner", "courier", "archive", "beacon")
_EVENTS = (
    "accepted a batch of {n} items",
    "waited {n} ms for a lock",
    "closed {n} idle connections",
    "rewrote index {n}",
    "retried upload {n} twice",
    "dropped {n} stale leases",
    "reported a queue of {n}",
    "reloaded its limits, now {n}",
)
_PEOPLE = ("Mirela", "Tobias", "Anjali", "Kwame", "Ingrid", "Rafael", "Sunniva", "Dmitri", "Yuki", "Leila")
_PLACES = (
    "the ferry landing",
    "the clock tower",
    "the salt market",
    "the upper bridge",
    "the old cannery",
    "the orchard",
)
_THINGS = (
    "a brass key",
    "a torn map",
    "a jar of honey",
    "three letters",
    "a blue lantern",
    "a broken flute",
    "a coil of rope",
)
_SHELVES = "ABCDEFGH"
_WEATHER = ("fog lay on the water", "a dry wind rose", "rain came in sheets", "the sun stood low", "snow began to fall")
_MOODS = ("without a word", "in great haste", "laughing", "against all advice", "after some doubt", "with both hands")


class _Dice:
    """Draws that depend on the seed alone: `random.Random.random` is promised to be the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low))

    def pick(self, items: Sequence[str]) -> str:
        return items[self.number(0, len(items))]


def _server_log(num_lines: int, seed: int) -> str:
    dice = _Dice(seed)
    lines = ["Log of the night shift. The operator on duty was Sunniva; the spare pump is number 47.\n"]
    for line in range(1, num_lines + 1):
        event = dice.pick(_EVENTS).format(n=dice.number(3, 980))
        lines.append(f"{line:03d} 0{line // 30}:{2 * line % 60:02d} {dice.pick(_SERVICES)}: {event}\n")
    return "".join(lines) + "\nSummary for the morning shift. The operator on duty was"


def _story(num_days: int, seed: int, *, first_day: int = 1) -> str:
    dice = _Dice(seed)
    sentences = []
    for day in range(first_day, first_day + num_days):
        giver, taker = dice.pick(_PEOPLE), dice.pick(_PEOPLE)
        if giver == taker:
            taker = "a stranger"
        sentences.append(
            f"On day {day}, while {dice.pick(_WEATHER)}, {giver} went to {dice.pick(_PLACES)} {dice.pick(_MOODS)} "
            f"and gave {dice.pick(_THINGS)} to {taker}. "
        )
        if dice.number(0, 3) == 0:
            sentences.append(f"{taker[0].upper()}{taker[1:]} hid it near {dice.pick(_PLACES)}.\n\n")
    return "".join(sentences)


def _code_listing(num_functions: int, seed: int) -> str:
    dice = _Dice(seed)
    lines = [
        '"""Rules of the parcel counter. TARIFF is 318 cents; LIMIT is 25 kilograms."""\n',
        "TARIFF = 318\nLIMIT = 25\n",
    ]
    verbs = ("weigh", "sort", "stamp", "route", "refund", "insure", "delay", "split")
    nouns = ("parcel", "crate", "letter", "pallet", "tube", "sack")
    conditions = ("{x} > {n}", "{x} % {n} == 0", "{x} + {n} < LIMIT", "not {x}")
    results = ("{x} * {n}", "{x} - {n}", "max({x}, {n})", "TARIFF + {n}", "[{x}, {n}]")
    for index in range(num_functions):
        x = dice.pick(("count", "grams", "zone", "age"))
        condition = dice.pick(conditions).format(x=x, n=dice.number(2, 60))
        yes, no = (dice.pick(results).format(x=x, n=dice.number(2, 900)) for _ in range(2))
        lines.append(
            f"\n\ndef {dice.pick(verbs)}_{dice.pick(nouns)}_{index}({x}):\n"
            f"    if {condition}:\n        return {yes}\n    return {no}\n"
        )
    return (
        "".join(lines)
        + '\n\ndef test_constants():\n    """The values that the head of this file promises."""\n    assert'
    )


def _inventory(num_records: int, seed: int) -> str:
    dice = _Dice(seed)
    lines = ['{"depot": "Quarry Lane", "inspector": "Anjali", "records": [\n']
    for record in range(num_records):
        thing = dice.pick(_THINGS).replace("a ", "", 1)
        lines.append(
            f'  {{"id": {1000 + 7 * record}, "item": "{thing}", "shelf": "{dice.pick(_SHELVES)}{dice.number(1, 40)}", '
            f'"count": {dice.number(0, 500)}, "keeper": "{dice.pick(_PEOPLE)}"}},\n'
        )
    return "".join(lines) + '], "signed": {"depot": "'


def _phrase_book(num_phrases: int, seed: int) -> str:
    dice = _Dice(seed)
    subjects = (
        ("der Müller", "le meunier", "мельник", "방앗간 주인", "磨坊主"),
        ("die Ärztin", "la médecin", "врач", "의사", "医生"),
        ("der Nachbar", "le voisin", "сосед", "이웃", "邻居"),
        ("die Lehrerin", "l'institutrice", "учительница", "선생님", "老师"),
        ("das Kind", "l'enfant", "ребёнок", "아이", "孩子"),
    )
    objects = (
        ("das Brot", "le pain", "хлеб", "빵", "面包"),
        ("den Schlüssel", "la clé", "ключ", "열쇠", "钥匙"),
        ("die Zeitung", "le journal", "газету", "신문", "报纸"),
        ("einen Apfel", "une pomme", "яблоко", "사과", "苹果"),
        ("das Boot", "la barque", "лодку", "배", "小船"),
    )
    lines = ["Phrase book, edited by Tobias Quint. Deutsch | français | русский | 한국어 | 中文\n"]
    for number in range(1, num_phrases + 1):
        who, what, hour = subjects[dice.number(0, 5)], objects[dice.number(0, 5)], dice.number(1, 13)
        lines.append(
            f"{number}. Um {hour} Uhr sucht {who[0]} {what[0]}. | À {hour} h, {who[1]} cherche {what[1]}. | "
            f"В {hour} ч. {who[2]} ищет {what[2]}. | "
            f"{hour}시에 {who[3]} {what[3]} 찾기 | {hour}点，{who[4]}找{what[4]}。\n"
        )
    return "".join(lines) + "\nThis phrase book was edited by"


def long_prompts() -> dict[str, str]:
    """Prompts of 1,590 to 2,620 tokens of Gemma 3's tokenizer, by name.

    The `journal_*` ones share their beginnings: all three the first 1,113 tokens, which ends inside a block
    of 16; `journal_south` and `journal_west` the first 1,536, which is the end of a block.
    """
    journal = "The journal belongs to Leila, who set out from Cape Ostra with 64 silver coins.\n\n" + _story(
        31, seed=11
    )
    fork = "That evening, when the coins had been counted once more, the party took the road to"
    journal_on = journal + fork + " the south, as the chart had said. "
    on_south = journal_on + _story(12, seed=12, first_day=32)
    ending = "\n\nOn the last page is written again to whom the journal belongs:"
    return {
        "journal_north": journal
        + fork
        + " a frozen pass in the north, where nobody had been. "
        + _story(14, seed=13, first_day=32)
        + ending,
        "journal_south": on_south + "Nobody was tired. " + _story(8, seed=14, first_day=44) + ending,
        "journal_west": on_south + "Two mules were lame. " + _story(7, seed=15, first_day=44) + ending,
        "server_log": _server_log(77, seed=3),
        "inventory": _inventory(42, seed=4),
        "story": "The fair at Lindmoor was opened by old Bartholomew Crane.\n\n"
        + _story(64, seed=5)
        + "\n\nWhen it was over, all of Lindmoor thanked the man who had opened the fair,",
        "phrase_book": _phrase_book(25, seed=6),
        "code_listing": _code_listing(63, seed=7),
    }


def all_prompts() -> dict[str, str]:
    """Every prompt of Gemma's fixture, in its order."""
    return SHORT_PROMPTS | long_prompts()


def medium_prompts() -> dict[str, str]:
    """Prompts of 256 to 1,100 tokens of byte-level tokenizers, by name: more than four windows of 64.

    `diary_north` and `diary_south` share their beginning, of some 300 tokens.
    """
    diary = "The diary belongs to Ingrid, who carries 12 candles.\n\n" + _story(9, seed=21)
    return {
        "short_log": _server_log(14, seed=22),
        "short_inventory": _inventory(9, seed=23),
        "short_code": _code_listing(12, seed=24),
        "short_phrases": _phrase_book(5, seed=25),
        "short_story": "The bridge at Aldwater was built by the widow Prentice.\n\n"
        + _story(16, seed=26)
        + "\n\nOn a stone beside the bridge stands the name of",
        "diary_north": diary + "The road went north. " + _story(3, seed=27, first_day=10) + "\n\nThe diary belongs to",
        "diary_south": diary + "The road went south. " + _story(4, seed=28, first_day=10) + "\n\nThe diary belongs to",
    }
