"""Batch files in Parquet, compared with the same rows as JSON lines."""

from __future__ import annotations

import datetime
import json
import sys

import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

import lamella.cli
from lamella.batch_files.parquet_files import parquet_rows, write_parquet
from lamella.errors import ConfigError
from tests.helpers.batch_rows import ENGINE, by_id, mixed_rows
from tests.helpers.tiny_gemma import save_tiny_gemma


def write_table(path, rows) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


def read_table(path) -> list[dict]:
    return parquet.read_table(path).to_pylist()


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def test_parquet_in_and_out_give_what_json_lines_give(tmp_path):
    save_tiny_gemma(tmp_path / "model")

    def run(source, target, *flags, exit_code=0):
        arguments = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(tmp_path / "model"), *ENGINE]
        result = CliRunner().invoke(lamella.cli.cli, [*arguments, *flags])
        assert result.exit_code == exit_code, result.output
        return result.stderr

    rows = [{"prompt": f"the {word}", "max_tokens": 3, "temperature": 0.9, "rank": rank, "custom_id": word}
            for rank, word in enumerate(("cat", "dog", "mat", "fox", "brown"))]  # fmt: skip
    rows[3]["temperature"] = 7.0  # too hot
    lines, table = tmp_path / "in.jsonl", tmp_path / "in.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_table(table, rows)
    run(lines, tmp_path / "a.jsonl")
    run(table, tmp_path / "b.jsonl")
    run(table, tmp_path / "c.parquet")
    wanted, found = by_id(tmp_path / "a.jsonl"), by_id(tmp_path / "b.jsonl")
    for row in (wanted["fox"], found["fox"]):
        assert "temperature=7.0 is out of range" in row.pop("error")["message"]
    assert found == wanted
    of_table = read_table(tmp_path / "c.parquet")
    assert [row["custom_id"] for row in of_table] == ["cat", "dog", "mat", "fox", "brown"]
    assert f"{table}, row 4: " in of_table[3].pop("error")["message"]
    assert {row["custom_id"]: without_nulls(row) for row in of_table} == {
        key: without_nulls(row) for key, row in wanted.items()
    }
    assert sorted(path.name for path in tmp_path.glob("c.*")) == ["c.parquet"]
    assert "is complete already" in run(table, tmp_path / "c.parquet", exit_code=2)
    run(table, tmp_path / "c.parquet", "--overwrite")
    # Rows of the OpenAI format, in the order of the input, with the lines that went before from a killed run.
    source = tmp_path / "mixed.jsonl"
    source.write_text("".join(f"{line}\n" for line in mixed_rows(12) if '"url"' in line))
    run(source, tmp_path / "d.jsonl")
    run(source, tmp_path / "d.parquet")
    whole = {key: without_nulls(row) for key, row in by_id(tmp_path / "d.jsonl").items()}
    of_table = without_nulls(read_table(tmp_path / "d.parquet"))
    assert [row.pop("line") for row in of_table] == [1, 2, 3, 4]
    for row in of_table:
        del row["response"]["body"]["created"]
        if "top_logprobs" not in json.dumps(row):
            assert row == whole[row["custom_id"]]


def test_values_of_columns_become_jsons(tmp_path):
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    rows = [
        {"prompt": "a", "day": moment.date(), "at": moment, "score": float("nan"), "tags": ["x", None], "none": None},
        {"prompt": "b", "day": None, "at": None, "score": 0.5, "tags": [], "none": None},
    ]
    write_table(tmp_path / "in.parquet", rows)
    assert list(parquet_rows(tmp_path / "in.parquet")) == [
        {"prompt": "a", "day": "2026-01-02", "at": "2026-01-02T03:04:05", "score": None, "tags": ["x", None]},
        {"prompt": "b", "score": 0.5, "tags": []},
    ]
    write_table(tmp_path / "bytes.parquet", [{"prompt": "a", "image": b"\x00"}])
    with pytest.raises(ConfigError, match="column 'image' holds bytes"):
        list(parquet_rows(tmp_path / "bytes.parquet"))


def test_rows_of_several_kinds_have_columns_for_all_keys(tmp_path):
    rows = [{"line": 3, "a": 1}, {"line": 1, "b": {"c": "x"}}, {"line": 2, "a": 2.5, "b": {"d": [1]}}]
    lines, target = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_parquet(lines, target, lambda row: row["line"])
    assert [without_nulls(row) for row in read_table(target)] == [rows[1], rows[2], {"line": 3, "a": 1.0}]
    lines.write_text('{"line": 1, "a": 1}\n{"line": 2, "a": "one"}\n')
    with pytest.raises(ConfigError, match=r"cannot become Parquet .* give -o a \.jsonl file"):
        write_parquet(lines, target, lambda row: row["line"])
    assert len(read_table(target)) == 3


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "in.parquet").write_text("")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for source, target in (("in.jsonl", "out.parquet"), ("in.parquet", "out.jsonl")):
        arguments = ["run-batch", "-i", str(tmp_path / source), "-o", str(tmp_path / target), "--model", "none"]
        result = CliRunner().invoke(lamella.cli.cli, arguments)
        assert result.exit_code == 2
        assert 'pip install ".[parquet]"' in result.stderr
