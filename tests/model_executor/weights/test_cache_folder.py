"""What the folder of converted copies keeps, gives out and removes. Weights are compared with transformers'."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lamella
from lamella import Engine
from lamella.errors import ModelLoadError
from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights import cache_parts, cache_trust, checksums, demo_models, loading
from lamella.model_executor.weights.cache_folder import entry_path, written_entry
from lamella.model_executor.weights.loading import load_config, load_weights, resolve_model
from tests.helpers.tiny_gemma import native_weights, save_tiny_gemma


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny_gemma(path, seed=3)


@pytest.fixture
def model(saved):
    return saved[1]


@pytest.fixture
def folder(saved, tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for file in saved[0].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def load(folder, cache_dir, model, monkeypatch):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)

    def load():
        source = resolve_model(str(folder))
        return load_weights(source, Model(load_config(source), torch.float32), cache_dir=cache_dir)

    return load


@pytest.fixture
def entry(load, cache_dir):
    """Of a first load."""
    load()
    (entry,) = cache_dir.rglob("*.safetensors")
    return entry


@pytest.fixture
def conversions(monkeypatch):
    """One entry for each conversion from here on."""
    made = []
    write = loading.write_weight_entry
    monkeypatch.setattr(
        loading, "write_weight_entry", lambda *args, **options: (made.append(args[0]), write(*args, **options))
    )
    return made


@pytest.fixture
def read_blocks(monkeypatch):
    """One entry for each file whose content is compared from here on."""
    made = []
    digest = checksums.content_digest
    monkeypatch.setattr(checksums, "content_digest", lambda path: (made.append(path), digest(path))[1])
    return made


def restart(monkeypatch, tmp_path, name="another boot"):
    boot = tmp_path / "boot_id"
    boot.write_text(name)
    monkeypatch.setattr(checksums, "_BOOT_ID", boot)


def assert_same(found, model):
    wanted = native_weights(model)
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def flip_a_bit(path, at=-5):
    """Without a trace in the file's size or times, as where a disk forgets."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# Unfinished files.

WRITER = """
import os, sys, time
from pathlib import Path
from lamella.model_executor.weights.cache_folder import written_entry
with written_entry(Path(sys.argv[1])) as file:
    file.write(b"x" * 1000)
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(cache_dir):
    """A process that is in the midst of writing an entry of another model."""
    command = [sys.executable, "-c", WRITER, str(cache_dir / "other" / "weights-1.safetensors")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(lamella.__file__).parents[1])
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_parts_of_killed_writers_go_and_those_of_living_ones_stay(load, model, cache_dir, writer):
    (part,) = cache_dir.rglob(".*.part")
    assert_same(load(), model)
    assert list(cache_dir.rglob(".*.part")) == [part]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert_same(load(), model)  # from its entry: a load that writes nothing cleans up, too
    assert list(cache_dir.rglob(".*.part")) == []


def test_a_part_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    taken = []
    lock = cache_parts._lock

    def clean_first(handle, *, blocking):
        if blocking and not taken:
            (part,) = tmp_path.rglob(".*.part")
            part.unlink()
            taken.append(part)
        return lock(handle, blocking=blocking)

    monkeypatch.setattr(cache_parts, "_lock", clean_first)
    path = tmp_path / "cache" / "model" / "kind-1.json"
    with written_entry(path) as file:
        file.write(b"whole")
    assert len(taken) == 1
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.rglob(".*.part")) == []


# Damage.


def test_a_flipped_bit_is_noticed_after_the_next_start(entry, load, model, conversions, monkeypatch, tmp_path, caplog):
    good = entry.read_bytes()
    noted = json.loads(entry.with_name(entry.name + ".sum").read_text())
    flip_a_bit(entry)
    restart(monkeypatch, tmp_path)
    # As where the disk itself has changed the content, the times say nothing.
    monkeypatch.setattr(checksums, "_state", lambda path: noted["state"])
    assert_same(load(), model)
    assert len(conversions) == 1
    assert entry.read_bytes() == good
    assert "is damaged" in caplog.text


def test_a_file_that_was_written_to_since_is_compared_in_the_same_boot(entry, load, model, conversions):
    flip_a_bit(entry)
    assert_same(load(), model)
    assert len(conversions) == 1


def test_content_is_compared_once_after_each_start(entry, load, model, read_blocks, conversions, monkeypatch, tmp_path):
    assert_same(load(), model)
    assert read_blocks == []
    restart(monkeypatch, tmp_path)
    for _ in range(3):
        assert_same(load(), model)
    assert read_blocks == [entry]
    restart(monkeypatch, tmp_path, "a third boot")
    assert_same(load(), model)
    assert read_blocks == [entry] * 2
    assert conversions == []


def test_without_a_name_of_the_boot_content_is_compared_each_time(entry, load, model, read_blocks, monkeypatch):
    monkeypatch.setattr(checksums, "_BOOT_ID", Path("/nowhere/boot_id"))
    for _ in range(2):
        assert_same(load(), model)
    assert read_blocks == [entry] * 2


@pytest.mark.parametrize("fault", ["missing", "no JSON", "another's", "of another content"])
def test_an_entry_without_its_checksum_is_made_anew(entry, load, model, conversions, fault):
    noted = entry.with_name(entry.name + ".sum")
    if fault == "missing":
        noted.unlink()
    elif fault == "no JSON":
        noted.write_text("{")
    elif fault == "another's":
        noted.chmod(0o666)
    else:
        noted.write_text(json.dumps({"sha256": "0" * 64}))
    assert_same(load(), model)
    assert len(conversions) == 1
    assert_same(load(), model)
    assert len(conversions) == 1


def test_the_checksum_is_that_of_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 100)
    path = tmp_path / "file"
    digests = set()
    for change in (None, 0, 99, 100, 250, 349):
        content = bytearray(range(175)) * 2
        if change is not None:
            content[change] ^= 1
        path.write_bytes(content)
        digests.add(checksums.content_digest(path))
    path.write_bytes(content[:-1])
    digests.add(checksums.content_digest(path))
    assert len(digests) == 7


# Whose it is.


def forge(entry):
    """What an attacker would put in an entry's place: the same shapes, other weights, a checksum that holds."""
    forged = {name: torch.zeros_like(value) for name, value in load_file(entry).items()}
    save_file(forged, entry)
    (entry.with_name(entry.name + ".sum")).write_text(json.dumps({"sha256": checksums.content_digest(entry)}))


def make_world_writable(entry):
    forge(entry)
    entry.chmod(0o646)


def make_group_writable(entry):
    forge(entry)
    entry.chmod(0o620)


def open_the_folder(entry):
    forge(entry)
    entry.parent.chmod(0o777)


def link_the_entry(entry):
    forge(entry)
    elsewhere = entry.parents[2] / "elsewhere.safetensors"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)


def link_the_folder(entry):
    forge(entry)
    elsewhere = entry.parents[2] / "elsewhere"
    entry.parent.rename(elsewhere)
    entry.parent.symlink_to(elsewhere)


def open_the_cache_folder(entry):
    forge(entry)
    entry.parents[1].chmod(0o777)


@pytest.mark.parametrize(
    "attack",
    [
        make_world_writable,
        make_group_writable,
        open_the_folder,
        link_the_entry,
        link_the_folder,
        open_the_cache_folder,
    ],
)
def test_what_another_could_have_written_is_not_used(entry, load, model, caplog, attack):
    attack(entry)
    assert_same(load(), model)
    assert "is not used" in caplog.text
    assert_same(load(), model)


@pytest.mark.parametrize("owned", ["entry", "folder", "cache folder", "checksum"])
def test_what_belongs_to_another_is_not_used(entry, load, model, monkeypatch, owned):
    """Told by the owner's number, which the test sets, for only root could give a file away."""
    paths = {
        "entry": entry,
        "folder": entry.parent,
        "cache folder": entry.parents[1],
        "checksum": entry.with_name(entry.name + ".sum"),
    }
    forge(entry)
    theirs, lstat = paths[owned].lstat().st_ino, Path.lstat

    def owned_by_another(path):
        stat = lstat(path)
        return os.stat_result([*stat[:4], stat.st_uid + 1, *stat[5:]]) if stat.st_ino == theirs else stat

    monkeypatch.setattr(Path, "lstat", owned_by_another)
    assert_same(load(), model)


def test_a_cache_folder_may_be_reached_through_a_link(load, model, cache_dir, conversions, tmp_path):
    (tmp_path / "large disk").mkdir(mode=0o700)
    cache_dir.symlink_to(tmp_path / "large disk")
    for _ in range(2):
        assert_same(load(), model)
    assert len(conversions) == 1


def test_entries_and_folders_are_made_for_the_user_alone(entry):
    for path, mode in ((entry, 0o600), (entry.with_name(entry.name + ".sum"), 0o600), (entry.parent, 0o700)):
        assert path.stat().st_mode & 0o777 == mode
    assert entry.parents[1].stat().st_mode & 0o077 == 0


def test_a_folder_left_open_is_closed_and_used_again(entry, load, model, conversions):
    entry.parent.chmod(0o777)
    for _ in range(3):
        assert_same(load(), model)
    assert len(conversions) == 1
    assert entry.parent.stat().st_mode & 0o022 == 0


# The model that an entry was made from.


@pytest.mark.parametrize("at", ["start", "middle", "end"])
def test_a_model_edited_in_place_gets_no_old_entry(entry, load, folder, model, at):
    """One value changes; size and time of change are what they were."""
    path = folder / "model.safetensors"
    stat = path.stat()
    content = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    place = {
        "start": 8 + header_bytes,
        "middle": (8 + header_bytes + len(content)) // 2 // 4 * 4,
        "end": len(content) - 4,
    }
    start = place[at]
    content[start : start + 4] = b"\0\0\x80\x41"  # 16.0
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    edited = load_file(path)
    changed = [name for name, value in edited.items() if not torch.equal(value, model.state_dict()[name])]
    assert len(changed) == 1
    model_after = type(model)(model.config)
    model_after.load_state_dict(edited, strict=False)
    model_after.tie_weights()
    assert_same(load(), model_after)


def test_samples_tell_an_edit_where_the_status_time_is_not_kept(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1 << 20))
    kept = path.stat()
    names = set()
    for at in (None, 3, 1 << 15, (1 << 20) // 32 * 7 + 9, (1 << 20) - 1):
        content = bytearray(1 << 20)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", lambda self, **_: kept)
            names.add(entry_path(tmp_path, (path,), kind="k", format_version=1, suffix=".json").name)
    assert len(names) == 5


# Demo models.


@pytest.fixture
def demo(monkeypatch):
    """A demo model whose package writes a few bytes: (times that it wrote, its content)."""
    written, content = [], b"GGUF" + bytes(range(100))

    def assemble(path, overwrite=False):
        assert overwrite or not Path(path).exists()
        written.append(path)
        Path(path).write_bytes(content)

    package = types.SimpleNamespace(assemble=assemble)
    monkeypatch.setitem(sys.modules, "a_demo_package", package)
    monkeypatch.setitem(demo_models._PACKAGES, "tiny", demo_models.DemoPackage("a_demo_package", "tiny.gguf"))
    return written, content


def test_the_cache_folder_given_to_an_engine_is_that_of_demo_models(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))
    with pytest.raises(ModelLoadError):  # it is no model, and both would need one
        Engine(model="demo:tiny", cache_dir=str(tmp_path / "given"))
    assert (tmp_path / "given" / "demo" / "tiny.gguf").read_bytes() == demo[1]
    assert not (tmp_path / "default").exists()


def test_a_demo_model_is_written_once_and_compared_once_a_start(demo, tmp_path, monkeypatch, read_blocks):
    for _ in range(2):
        source = resolve_model("demo:tiny", cache_dir=tmp_path)
    assert len(demo[0]) == 1
    read_blocks.clear()
    restart(monkeypatch, tmp_path)
    for _ in range(2):
        source = resolve_model("demo:tiny", cache_dir=tmp_path)
    assert read_blocks == list(source.paths)
    assert len(demo[0]) == 1


@pytest.mark.parametrize("fault", ["edited in place", "linked", "cut short", "writable"])
def test_a_demo_model_that_is_not_as_it_was_written_is_written_anew(demo, tmp_path, fault):
    path = resolve_model("demo:tiny", cache_dir=tmp_path).paths[0]
    if fault == "edited in place":
        flip_a_bit(path)
    elif fault == "linked":
        path.rename(tmp_path / "elsewhere")
        flip_a_bit(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif fault == "cut short":
        path.write_bytes(demo[1][:50])
    else:
        path.chmod(0o666)
    assert resolve_model("demo:tiny", cache_dir=tmp_path).paths[0].read_bytes() == demo[1]
    assert len(demo[0]) == 2
    assert not path.is_symlink()


def test_a_demo_model_is_not_written_into_a_linked_folder(demo, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "demo").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match="demo is a symbolic link"):
        resolve_model("demo:tiny", cache_dir=tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_owner_is_told(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    tmp_path.chmod(0o700)
    assert cache_trust.distrust(path) is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to another user" in cache_trust.distrust(path)
