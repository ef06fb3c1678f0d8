"""Fields of a JSON file that nobody vouches for: what is accepted equals json's own reading, the rest is named."""

from __future__ import annotations

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
