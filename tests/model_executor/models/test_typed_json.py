"""Fields of a JSON file that nobody vouches for: what is accepted equals json's own reading, the rest is named."""

from __future__ import annotations

import json
import os
import socket

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_json import parse_json_object, read_json_object

PLACE = "folder/config.json"


def fields(text: str | bytes):
    return parse_json_object(text if isinstance(text, bytes) else text.encode(), PLACE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "names 'c' twice"),
        (b"[1]", "holds a list, not a JSON object"),
        (b"null", "holds a NoneType, not a JSON object"),
        (b"{} {}", "cannot be read as JSON"),
    ],
    ids=range(12),
)
def test_documents_that_are_no_object_of_fields(data, message):
    with pytest.raises(ModelLoadError, match=f"folder/config.json .*{message}"):
        parse_json_object(data, PLACE)


VALUES = {
    "zero": 0,
    "big": 2**63,
    "huge": 10**400,
    "half": 0.5,
    "whole": 1.0,
    "infinite": "1e999",
    "nan": float("nan"),
    "list_of_nan": [float("nan")],
    "yes": True,
    "text": "abc",
    "surrogate": "\ud800",
    "null": None,
    "list": [1, 2],
    "mixed": [1, "x", True],
    "object": {"inner": -3},
}
READERS = {
    "integer": (lambda f, key: f.integer(key), {"zero"}),
    "number": (lambda f, key: f.number(key), {"zero", "big", "half", "whole"}),
    "boolean": (lambda f, key: f.boolean(key), {"yes"}),
    "string": (lambda f, key: f.string(key), {"text"}),
    "integers": (lambda f, key: list(f.integers(key)), {"list"}),
    "numbers": (lambda f, key: list(f.numbers(key)), {"list"}),
    "strings": (lambda f, key: list(f.strings(key)), set()),
    "token_ids": (lambda f, key: f.token_ids(key), {"zero", "list", "null"}),
    "object": (lambda f, key: f.object(key), {"object"}),
}


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_takes_its_own_kind_alone(reader):
    text = json.dumps(VALUES).replace('"1e999"', "1e999")
    found, (read, accepted) = fields(text), READERS[reader]
    for key in [*VALUES, "absent"]:
        wanted = reader == "token_ids" and key in ("null", "absent", "zero", "list")
        if key in accepted or wanted:
            value = read(found, key)
            expected = {"token_ids": {"zero": (0,), "list": (1, 2)}}.get(reader, {}).get(key, json.loads(text).get(key))
            assert reader == "object" or value == (() if expected is None else expected)
            continue
        with pytest.raises(ModelLoadError, match=rf"folder/config.json: {key}[ =].*must be"):
            read(found, key)


def test_ranges_are_kept_and_told():
    found = fields('{"a": 5, "b": 0, "c": -0.5, "inner": {"d": 7, "list": [{"e": 1}, {"e": -1}]}}')
    assert found.integer("a", low=5, high=5) == 5
    with pytest.raises(ModelLoadError, match="a=5: must be an integer from 6 to 9"):
        found.integer("a", low=6, high=9)
    with pytest.raises(ModelLoadError, match="b=0: must be a finite number, more than 0"):
        found.number("b", above=0)
    with pytest.raises(ModelLoadError, match=r"c=-0\.5: must be a finite number of at least 0"):
        found.number("c", low=0)
    with pytest.raises(ModelLoadError, match=r"inner\.d=7: must be one of 'x', 'y'"):
        found.object("inner").string("d", choices=("x", "y"))
    first, second = found.object("inner").objects("list")
    assert first.integer("e") == 1
    with pytest.raises(ModelLoadError, match=r"inner\.list\[1\]\.e=-1"):
        second.integer("e")
    with pytest.raises(ModelLoadError, match="nothing is missing; must be true or false"):
        found.boolean("nothing")
    assert found.integer("nothing", 3) == 3
    assert found.optional_integer("nothing") is None


def test_values_in_messages_are_cut_short():
    deep = "[" * 500 + "]" * 500
    found = fields(f'{{"long": "{"x" * 10**6}", "deep": {deep}, "digits": {"9" * 4000}}}')
    for key in ("long", "deep", "digits"):
        with pytest.raises(ModelLoadError) as error:
            found.boolean(key)
        assert len(str(error.value)) < 300


def test_only_regular_files_are_opened(tmp_path):
    pipe, folder, dangling = tmp_path / "pipe", tmp_path / "folder", tmp_path / "dangling"
    os.mkfifo(pipe)
    folder.mkdir()
    dangling.symlink_to(tmp_path / "nowhere")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, kind in (
            (pipe, "a pipe"),
            (folder, "a folder"),
            (tmp_path / "socket", "a socket"),
            (tmp_path / "device", "a device"),
            (dangling, "cannot be read"),
        ):
            if kind == "a device":
                path.symlink_to("/dev/zero")
            with pytest.raises(ModelLoadError, match=f"{path.name} .*{kind}"):
                read_json_object(path)


def test_a_link_to_a_regular_file_is_followed(tmp_path):
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    assert read_json_object(tmp_path / "config.json").integer("a") == 1


def test_a_file_longer_than_its_kind_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10**12)  # sparse
    with pytest.raises(ModelLoadError, match="is 1000000000000 bytes long"):
        read_json_object(tmp_path / "config.json")
