"""Each script of examples/ that runs on Ray does as its first lines say, here with a tiny random model."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet
import pytest

from lamella import LLM, SamplingParams
from lamella.distributed.ray_cluster import connect
from tests.helpers.processes import called, wait_until
from tests.helpers.tiny_gemma import save_tiny_gemma

EXAMPLES = Path(__file__).parents[2] / "examples"
PORT = 8765


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(folder, num_hidden_layers=2, sliding_window_pattern=2, max_position_embeddings=2048)
    return str(folder)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(name: str, *arguments: object) -> str:
        connect()
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_each_example_on_ray_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("ray_*.py")} - tested == set()


@pytest.mark.slow
def test_ray_batch(run: Callable[..., str], tiny: str, tmp_path: Path) -> None:
    rows = [{"custom_id": f"row {index}", "prompt": "one cat sat", "page": index} for index in range(9)]
    rows[4]["temperature"] = 9
    (tmp_path / "in.jsonl").write_text("\n".join([*map(json.dumps, rows), "no JSON"]) + "\n")
    for _ in range(2):  # the second run finds all in the checkpoint
        out = run("ray_batch", tmp_path / "in.jsonl", tmp_path / "out", tiny)
        assert f"10 rows in {tmp_path / 'out'}, 2 errors" in out
        answers = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
        assert sorted(row["line"] for row in answers) == list(range(1, 11))
        assert {row["line"] for row in answers if row["error"]} == {5, 10}
    assert len({row["outputs"][0]["text"] for row in answers if not row["error"]}) > 1, "seeds follow from ids"


@pytest.mark.slow
def test_ray_replicas(run: Callable[..., str], tiny: str) -> None:
    out = run("ray_replicas", tiny)
    assert len(re.findall(r"^'A (?:sliding|tree).* -> '", out, re.M)) == 8
    counted = [tuple(map(int, found)) for found in re.findall(r"engine \d: (\d+) of (\d+) tokens cached", out)]
    # Each engine had one beginning, and computed it once for its four prompts.
    assert len(counted) == 2
    assert all(cached > num_tokens / 2 for cached, num_tokens in counted)


@pytest.mark.slow
def test_ray_serve(tiny: str) -> None:
    from ray import serve

    connect()
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / "ray_serve.py"))
    arguments: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**23}
    beginnings = ["the quick brown fox jumps over a lazy dog " * 8, "one cat sat on mats and " * 14]
    prompts = [beginning + end for end in ("a", "b", "c") for beginning in beginnings]
    with LLM(tiny, **arguments) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    example["start"](tiny, 2, PORT, arguments)
    url = f"http://127.0.0.1:{PORT}/generate"
    try:
        engines: list[set[int]] = [set(), set()]
        for index, (prompt, text) in enumerate(zip(prompts, expected, strict=True)):
            lines, last = asked(url, {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True})
            assert "".join(line["text"] for line in lines) == text
            assert len(lines) > 3, "it does not stream"
            engines[index % 2].add(last["engine"])
            assert (last["num_cached_tokens"] > 16) == (index >= 2)  # all share the token they begin with
        assert [len(one) for one in engines] == [1, 1]
        _, last = asked(url, {"prompt": "a", "temperature": 9})
        assert "temperature=9" in last["error"]
        assert httpx.post(url, json={"max_tokens": 3}, timeout=60).status_code == 400
    finally:
        serve.shutdown()
    assert wait_until(lambda: not called("ray::ServeReplica"), 30)


def asked(url: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of an answer, and the last."""
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        assert response.status_code == 200
        *lines, last = map(json.loads, response.iter_lines())
    return lines, last
