"""Data sets of Ray: each row is answered once and as one engine answers it, whoever is lost, and whatever is bad."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from lamella import LLM, ConfigError, RequestError, SamplingParams
from lamella.batch_files.run import BatchFiles, run_batch
from lamella.ray import LamellaBatches, batch_inference, connect
from lamella.ray.batch_checkpoint import KEY_COLUMN, BatchCheckpoint
from tests.helpers.processes import called, wait_until
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8}
DEFAULTS: dict[str, Any] = {"max_tokens": 5, "temperature": 0.9, "ignore_eos": True}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "one", "cat", "sat", "on", "mats"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(folder, num_hidden_layers=2, sliding_window_pattern=2)
    return str(folder)


def lines_of(count: int, num_bad: int) -> list[str]:
    """Rows of every kind, of which so many are bad: no JSON, or nothing that can be run."""
    rng = random.Random(3)
    bad = set(rng.sample(range(count), num_bad))
    lines = []
    for index in range(count):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 9)))
        row: dict[str, Any] = {"custom_id": f"row-{index}", "label": {"page": index}}
        match index % 4:
            case 0:
                row["prompt"] = text
            case 1:
                row |= {"prompt_token_ids": [5 + index % 200, 7, 9], "sampling_params": {"max_tokens": 3}}
            case 2:
                row |= {"messages": [{"role": "user", "content": text}], "temperature": 0}
            case 3:
                row |= {"prompt": text, "n": 2, "logprobs": 1}
                del row["custom_id"]
        if index in bad:
            lines.append(['{"custom_id": "torn', json.dumps({**row, "temperature": 9})][index % 2])
        else:
            lines.append(json.dumps(row))
    return lines


def answered_by_run_batch(tiny: str, path: Path, output_path: Path) -> dict[int, dict[str, Any]]:
    """What one engine answers: line -> row."""
    run_batch(
        BatchFiles(path, output_path),
        lambda: LLM(tiny, use_tqdm_on_load=False, **ARGUMENTS),
        defaults=DEFAULTS,
        model_name="tiny",
        shows_progress=False,
    )
    return {row["line"]: row for row in map(json.loads, output_path.read_text().splitlines())}


def require_same(rows: list[dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    assert sorted(row["line"] for row in rows) == sorted(expected)
    for row in rows:
        wanted = expected[row["line"]]
        assert row["custom_id"] == wanted.get("custom_id")
        if wanted["error"] is not None:
            assert row["error"] == wanted["error"]
            assert row["outputs"] == []
            assert row["usage"] is None
            continue
        assert row["error"] is None
        assert row["usage"] == wanted["usage"]
        assert json.loads(row["row"])["label"] == wanted["label"]
        for found, known in zip(row["outputs"], wanted["outputs"], strict=True):
            assert {name: found[name] for name in known} == known


def actors() -> set[int]:
    return called("ray::MapWorker")


class Killer(threading.Thread):
    """Kills an actor that has an engine, once so many batches are answered. num_answered: how many then were."""

    def __init__(self, checkpoint: BatchCheckpoint, after_batches: int) -> None:
        super().__init__()
        self._checkpoint, self._after_batches = checkpoint, after_batches
        self.num_answered = 0

    def run(self) -> None:
        assert wait_until(lambda: len(self._checkpoint.parts()) >= self._after_batches, 200)
        os.kill(min(actors() - called("(MapBatches(LamellaBatches)).__init__")), 9)
        self.num_answered = len(self._checkpoint.parts())


def check_job(tiny: str, tmp_path: Path, count: int, batch_size: int, killed_after: int, *, resumes: bool) -> int:
    """How many batches were answered when an actor was killed."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines_of(count, count // 20)) + "\n")
    expected = answered_by_run_batch(tiny, path, tmp_path / "out.jsonl")
    assert sum(row["error"] is not None for row in expected.values()) == count // 20
    connect()
    arguments = {
        "sampling_params": DEFAULTS,
        "num_actors": 2,
        "batch_size": batch_size,
        "ray_actor_options": {"num_cpus": 0.5},
        "checkpoint_path": tmp_path / "checkpoint",
        **ARGUMENTS,
    }
    checkpoint = BatchCheckpoint(tmp_path / "checkpoint")
    killer = Killer(checkpoint, killed_after)
    killer.start()
    require_same(batch_inference(path, tiny, **arguments).take_all(), expected)
    killer.join()
    assert killer.num_answered >= killed_after, "nobody was killed"
    assert sum(pyarrow.parquet.read_metadata(part).num_rows for part in checkpoint.parts()) == count
    if resumes:
        check_resumed(tiny, path, arguments, expected)
    assert wait_until(lambda: not actors(), 30)
    return killer.num_answered


def check_resumed(tiny: str, path: Path, arguments: dict[str, Any], expected: dict[int, dict[str, Any]]) -> None:
    """A job that has lost some of its answers runs just those rows again."""
    checkpoint = BatchCheckpoint(arguments["checkpoint_path"])
    parts = checkpoint.parts()
    before = {part.name: part.stat().st_mtime_ns for part in parts[1:]}
    lost = pyarrow.parquet.read_metadata(parts[0]).num_rows
    parts[0].unlink()
    require_same(batch_inference(path, tiny, **arguments).take_all(), expected)
    after = {part.name: part for part in checkpoint.parts()}
    assert {name: after[name].stat().st_mtime_ns for name in before} == before
    new = [part for name, part in after.items() if name not in before]
    assert sum(pyarrow.parquet.read_metadata(part).num_rows for part in new) == lost


@pytest.mark.slow
def test_a_job_answers_each_row_once_though_an_actor_is_killed(tiny: str, tmp_path: Path) -> None:
    check_job(tiny, tmp_path, 120, 12, 1, resumes=False)


@pytest.mark.slow
def test_a_job_of_two_thousand_rows(tiny: str, tmp_path: Path) -> None:
    assert check_job(tiny, tmp_path, 2000, 50, 6, resumes=True) < 30, "it was killed too late to tell anything"


@pytest.fixture(scope="module")
def batches(tiny: str) -> LamellaBatches:
    return LamellaBatches(tiny, sampling_params=SamplingParams(**DEFAULTS), **ARGUMENTS)


def test_batches_of_every_format_and_cut_have_the_same_answers(tiny: str, batches: LamellaBatches) -> None:
    """Also columns that are the caller's own, bytes among them, and another engine."""
    ids = [f"id {index}" for index in range(7)]
    prompts = [f"{WORDS[index]} {WORDS[index + 1]}" for index in range(7)]
    own = [bytes([index]) for index in range(7)]
    table = pyarrow.table({"custom_id": ids, "prompt": prompts, "own": own, "max_tokens": [3, None, 4, 5, 6, 7, 8]})
    rows = batches(table).to_pylist()
    assert [row["own"] for row in rows] == own
    assert [row["usage"]["completion_tokens"] for row in rows] == [3, 5, 4, 5, 6, 7, 8]
    texts = [row["outputs"][0]["text"] for row in rows]
    assert len(set(texts)) == 7
    frame = pandas.DataFrame({"custom_id": ids, "prompt": prompts, "max_tokens": [3, 5, 4, 5, 6, 7, 8]})
    arrays = {name: frame[name].to_numpy() for name in frame}
    other = LamellaBatches(tiny, sampling_params=DEFAULTS, **ARGUMENTS)
    for found in (batches(frame), other(arrays), *(batches(table.slice(start, 2)) for start in (0, 5))):
        for row in found.to_pylist():
            assert row["outputs"][0]["text"] == texts[ids.index(row["custom_id"])]
    assert batches(table.slice(0, 0)).schema == batches(table).schema
    other.close()
    assert other(arrays).num_rows == 7, "an engine that has ended is opened anew"
    other.close()


def test_a_bad_row_is_an_error_of_that_row(batches: LamellaBatches) -> None:
    tokens = np.array([[5, 6, 7], [5, 6, 10**6]])
    first, second = batches({"prompt_token_ids": tokens, "custom_id": np.array(["a", "b"])}).to_pylist()
    assert first["error"] is None
    assert second["error"]["code"] == "invalid_request"
    assert second["error"]["message"].startswith("custom_id 'b': prompt")
    rows = [
        ({"prompt": "a", "temperature": 9}, "a row without custom_id: temperature=9"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "give it one of prompt"),
        ({"custom_id": "c"}, "give it one of prompt"),
        ({"custom_id": 5, "prompt": "a"}, "must be a string"),
        ({"prompt": b"a"}, "holds bytes, which rows cannot carry"),
        ({"custom_id": "d", "url": "/v1/completions"}, "of the OpenAI format"),
        ({"other": 1}, "give it one of prompt"),
    ]
    for given, told in rows:
        (row,) = batches(pyarrow.Table.from_pylist([given])).to_pylist()
        assert told in row["error"]["message"]
        assert row["outputs"] == []
    with pytest.raises(ConfigError, match="usage: answers have a column of this name"):
        batches(pyarrow.table({"prompt": ["a"], "usage": [1]}))


def test_what_a_job_cannot_do_is_refused_before_it_starts(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for arguments, told in (
        ({"num_actors": 0}, "num_actors=0"),
        ({"num_actors": (3, 2)}, "the fewest are more"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"data_parallel_size": 2}, "give num_actors instead"),
        ({"ray_actor_options": {"gpus": 1}}, "ray_actor_options has gpus"),
        ({"sampling_params": 5}, "sampling_params=5"),
        ({"checkpoint_path": tmp_path}, "holds other files"),
    ):
        (tmp_path / "other").touch()
        with pytest.raises(ConfigError, match=told):
            batch_inference(path, tiny, **arguments)
    for params in (SamplingParams(prompt_logprobs=1), {"logits_processors": [print]}):
        with pytest.raises(RequestError, match="is not here"):
            batch_inference(path, tiny, sampling_params=params)


def test_a_checkpoint_is_of_one_job_and_has_each_row_once(tmp_path: Path) -> None:
    checkpoint = BatchCheckpoint(tmp_path / "folder")
    checkpoint.open_for({"model": "a", "sampling_params": {"max_tokens": 3}})
    checkpoint.open_for({"model": "a", "sampling_params": {"max_tokens": 3}})
    with pytest.raises(ConfigError, match="is of a job with model='a', not 'b'"):
        checkpoint.open_for({"model": "b", "sampling_params": {"max_tokens": 3}})
    keys = [bytes([index] * 16) for index in range(5)]
    for own in ((0, 1), (1, 2, 3), (4,), (3, 4)):
        checkpoint.write([keys[one] for one in own], pyarrow.table({"value": list(own)}))
    assert checkpoint.read([keys[1], keys[2], keys[3]]).to_pydict() == {"value": [1, 2, 3]}
    assert checkpoint.read([keys[1], keys[2]]) is None
    assert checkpoint.done() == set(keys)
    tables = [pyarrow.parquet.read_table(part) for part in checkpoint.parts()]
    assert sorted(value for table in tables for value in table.column("value").to_pylist()) == [0, 1, 2, 3, 4]
    for table in tables:
        assert [keys[value] for value in table.column("value").to_pylist()] == table.column(KEY_COLUMN).to_pylist()


@pytest.mark.slow
def test_the_class_in_map_batches_and_parquet_files(tiny: str, tmp_path: Path) -> None:
    """In Ray's usual format of batches, numpy; and a job over files of columns, with nulls, which is resumed."""
    ray = connect()
    rows = [
        {
            "custom_id": f"row {index}",
            "messages": [{"role": "user", "content": WORDS[index]}],
            "max_tokens": None if index % 2 else 3,
            "own": index,
        }
        for index in range(14)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    files = BatchFiles(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    run_batch(files, lambda: LLM(tiny, **ARGUMENTS), defaults=DEFAULTS, model_name="tiny", shows_progress=False)
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    expected = {row["custom_id"]: (row["own"], row["outputs"][0]["text"]) for row in lines}
    assert len(expected) == 14

    def found(dataset: Any) -> dict[str, tuple[int, str]]:
        answers = dataset.take_all()
        assert len(answers) == 14
        return {row["custom_id"]: (row["own"], row["outputs"][0]["text"]) for row in answers}

    given = {"model": tiny, "sampling_params": DEFAULTS, **ARGUMENTS}
    dataset = ray.data.from_items(rows, override_num_blocks=2)
    assert found(
        dataset.map_batches(LamellaBatches, concurrency=2, batch_size=4, num_cpus=0.5, fn_constructor_kwargs=given)
    ) == expected  # fmt: skip
    arguments = {"ray_actor_options": {"num_cpus": 0.5}, "batch_size": 4, "checkpoint_path": tmp_path / "kept"}
    for _ in range(2):
        assert found(batch_inference(tmp_path / "in.parquet", **given, **arguments)) == expected
        BatchCheckpoint(tmp_path / "kept").parts()[0].unlink()
