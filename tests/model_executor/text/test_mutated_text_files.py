"""Mutants of the files that tokenizers and templates come from: refused by name, or read as transformers and tokenizers
read the same bytes.

Each mutant is made from a seed; on a failure the seed in the message makes it again.
"""

import json
import random
import shutil

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from lamella.errors import ModelLoadError, RequestError
from lamella.model_executor.text.chat import ChatRenderer
from lamella.model_executor.weights.loading import load_tokenizer, resolve_model
from tests.helpers.gguf_vocabulary import save
from tests.helpers.tiny_gemma import CHAT_TEMPLATE, save_tiny_tokenizer
from tests.helpers.tiny_gguf import tiny_vocabulary
from tests.helpers.tiny_tokenizers import OBJECT

TEXTS = ("", "a", "the quick brown fox", " h\u00e9llo \U0001f600", "<bos>x<eos>", "<turn>a</turn>", "<image>b<extra>",
         "0 1 2 10 100", "\n\n\t", "abc abc  ab", "<unk><pad>", "over the lazy dog;")  # fmt: skip
MESSAGES = [
    {"role": "user", "content": " Hi \n"},
    {"role": "model", "content": "Hello."},
    {"role": "user", "content": "?"},
]
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
VALUES = (
    *(None, True, -1, 0, 3, 2**31, 2**63, 1.5, "", "a", "<bos>", "\ud800"),
    *([], ["a"], [[]], {}, {"a": 1}, {"content": "<x>"}),
)
NUM_MUTANTS = {
    "tokenizer.json": 150,
    "tokenizer_config.json": 80,
    "special_tokens_map.json": 40,
    "added_tokens.json": 25,
}


def every_place(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:40]) if isinstance(value, list) else ()
    for key, item in items:
        yield from every_place(item, (*path, key))


def mutated(data, random):
    """JSON with a change of one to three places: another value, another place's value, or nothing there."""
    document = json.loads(data)
    for _ in range(random.randint(1, 3)):
        places = [place for place in every_place(document) if place and "vocab" not in place[:-1]]
        *path, key = random.choice(places)
        parent = document
        for step in path:
            parent = parent[step]
        how = random.randrange(4)
        if how == 0:
            del parent[key]
        elif how == 1:
            parent[key] = random.choice(VALUES)
        elif how == 2 and isinstance(parent, dict):
            parent[random.choice(list(parent))] = parent[key]
        elif isinstance(parent[key], str):
            text = list(parent[key] or "x")
            text[random.randrange(len(text))] = random.choice("a<>\u2581 \u00e9{")
            parent[key] = "".join(text)
        else:
            parent[key] = [parent[key]]
    return json.dumps(document).encode()


def damaged(data, random):
    """Bytes changed, cut out, cut off or doubled."""
    data = bytearray(data)
    for _ in range(random.randint(1, 4)):
        position = random.randrange(len(data))
        how = random.randrange(4)
        if how == 0:
            data[position] = random.randrange(256)
        elif how == 1:
            del data[position : position + random.randint(1, 30)]
        elif how == 2:
            data[position:position] = data[position : position + random.randint(1, 30)]
        else:
            data[position:position] = bytes(random.choice((b"{", b"[", b'"', b"\\", b"\xff", b"null", b"9" * 30)))
        if not data:
            return b"{"
    return bytes(data)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    special = {
        "bos_token": "<bos>",
        "eos_token": {**OBJECT, "content": "<eos>"},
        "additional_special_tokens": ["<turn>"],
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({"<image>": 320, "<turn>": 4}))
    return folder


def answers_of_theirs(folder):
    """What transformers makes of the folder: ids, texts and a prompt for each text; None where it raises."""
    try:
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        theirs.backend_tokenizer.no_truncation()
        theirs.backend_tokenizer.no_padding()
    except BaseException:
        return None
    return (
        [
            (ids, theirs.decode(ids), theirs.decode(ids, skip_special_tokens=True))
            for ids in (theirs.backend_tokenizer.encode(text).ids for text in TEXTS)
        ],
        [theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS],
        prompt_of(theirs),
    )


def prompt_of(tokenizer):
    try:
        return tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    except Exception:
        return None


def answers_of_ours(folder):
    """The same of ours; None where it refuses. Any other exception is a failure."""
    try:
        ours = load_tokenizer(resolve_model(str(folder), "dummy"))
        encoded = [ours.encode(text) for text in TEXTS]
        plain = [ours.encode(text, add_special_tokens=False) for text in TEXTS]
        texts = [(ids, ours.decode(ids, skip_special_tokens=False), ours.decode(ids)) for ids in encoded]
    except (ModelLoadError, RequestError):
        return None
    try:
        prompt = ours.apply_chat_template(MESSAGES)
    except RequestError:
        prompt = None
    return texts, plain, prompt


@pytest.mark.parametrize("file", FILES)
def test_mutants_of_a_folder(original, tmp_path, file):
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    num_read = 0
    for seed in range(NUM_MUTANTS[file]):
        generator = random.Random(f"{file} {seed}")
        data = (original / file).read_bytes()
        data = damaged(data, generator) if seed % 4 == 3 else mutated(data, generator)
        (tmp_path / file).write_bytes(data)
        ours = answers_of_ours(tmp_path)
        if ours is None:
            continue
        num_read += 1
        theirs = answers_of_theirs(tmp_path)
        if theirs is None:
            # What transformers refuses, ours may read; then the tokenizers library has the last word on the text.
            continue
        assert ours[:2] == theirs[:2], f"mutant {seed} of {file} is read in another way"
        if ours[2] is not None and theirs[2] is not None:
            assert ours[2] == theirs[2], f"mutant {seed} of {file} renders another prompt"
    assert num_read > NUM_MUTANTS[file] // 20


def test_mutants_of_templates(original):
    renderer, theirs = ChatRenderer(), PreTrainedTokenizerFast.from_pretrained(original)
    rng = random.Random(7)
    num_equal = 0
    for number in range(80):
        template = damaged(CHAT_TEMPLATE.encode(), rng).decode("utf-8", "replace")
        try:
            ours = renderer.render(template, MESSAGES, add_generation_prompt=True, variables=theirs.special_tokens_map)
        except RequestError:
            continue
        wanted = theirs.apply_chat_template(
            MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert ours == wanted, f"template {number}: {template}"
        num_equal += 1
    assert num_equal > 10


def test_mutants_of_gguf_metadata(tmp_path):
    """Except in the tokens' types, of which a wrong one is read better than transformers reads it."""
    tokens, types = tiny_vocabulary(320)
    good = save(tmp_path / "good.gguf", tokens, types).read_bytes()
    start = good.index(b"tokenizer.ggml.token_type")
    places = [place for place in range(24, len(good)) if not start <= place < start + 40 + 4 * len(tokens)]
    path = tmp_path / "m.gguf"
    rng = random.Random(11)
    num_equal = 0
    for number in range(60):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.choice(places)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            ours = load_tokenizer(resolve_model(str(path)), tmp_path / f"cache{number}")
            ids = [ours.encode(text, add_special_tokens=False) for text in TEXTS]
        except (ModelLoadError, RequestError):
            continue
        try:
            theirs, _ = convert_gguf_tokenizer("gemma3", get_gguf_tokenizer(str(path))[1])
        except Exception:
            continue
        assert ids == [theirs.encode(text, add_special_tokens=False).ids for text in TEXTS], f"mutant {number}"
        num_equal += 1
    assert num_equal > 5


BYTE_LEVEL_MERGES = ["t h", "th e", "\u0120 the", "o w", "r o", "c k", "a b", "ab c", "\u0120 abc", "1 0", "10 0"]


def save_byte_level(path):
    import gguf

    made = ["".join(merge.split(" ")) for merge in BYTE_LEVEL_MERGES]
    tokens = ["<eos>", "<bos>", "<turn>", "<image>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *made]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(tokens)
    writer.add_token_merges(BYTE_LEVEL_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_token_types([3, 3, 3, 4, *[1] * (len(tokens) - 4)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_mutants_of_byte_level_gguf_metadata(tmp_path):
    """Except in the tokens' types, as above, which stand last. What ours refuses names the file."""
    good = save_byte_level(tmp_path / "good.gguf").read_bytes()
    letters = [place for place in range(24, good.index(b"tokenizer.ggml.token_type")) if 0x20 < good[place] < 0x7F]
    path = tmp_path / "m.gguf"
    rng = random.Random(13)
    num_equal, refusals = 0, []
    for number in range(200):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):  # most other bytes are of lengths, and make a file that ends too early
            data[rng.choice(letters)] = rng.randrange(0x21, 0x7F)
        path.write_bytes(data)
        try:
            ours = load_tokenizer(resolve_model(str(path)), tmp_path / f"cache{number}")
            ids = [ours.encode(text, add_special_tokens=False) for text in TEXTS]
        except ModelLoadError as error:
            refusals.append(str(error))
            continue
        try:
            theirs, _ = convert_gguf_tokenizer("llama", get_gguf_tokenizer(str(path))[1])
        except Exception:
            continue
        assert ids == [theirs.encode(text, add_special_tokens=False).ids for text in TEXTS], f"mutant {number}"
        num_equal += 1
    assert num_equal > 10
    assert len(refusals) > 10
    assert all("m.gguf" in refusal for refusal in refusals)
