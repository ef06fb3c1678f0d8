"""From a batch of a data set to rows as batch files have them, and back with their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow

from lamella.argument_checks import shown
from lamella.batch_files.input_rows import InputRow, digest, input_row
from lamella.batch_files.parquet_files import json_value
from lamella.batch_files.row_keys import ABSENT_FIELDS, CACHE_KEYS, CHAT_KEYS, PROMPT_KEYS, SAMPLING_KEYS
from lamella.errors import ConfigError, LamellaError
from lamella.ray.jsonl_rows import ROW_COLUMNS, input_row_of

# Columns that are read. All others are the caller's own and are carried as they are.
_READ_KEYS = {
    *("custom_id", "sampling_params", "method", "url", "body"),
    *PROMPT_KEYS,
    *CHAT_KEYS,
    *CACHE_KEYS,
    *SAMPLING_KEYS,
    *ABSENT_FIELDS,
}  # fmt: skip
_TOKEN = [("token", pyarrow.string()), ("logprob", pyarrow.float64()), ("bytes", pyarrow.list_(pyarrow.int64()))]
_LOGPROB = pyarrow.struct([*_TOKEN, ("top_logprobs", pyarrow.list_(pyarrow.struct(_TOKEN)))])
_OUTPUT = pyarrow.struct(
    [
        ("text", pyarrow.string()),
        ("token_ids", pyarrow.list_(pyarrow.int64())),
        ("finish_reason", pyarrow.string()),
        ("stop_reason", pyarrow.string()),
        ("logprobs", pyarrow.list_(_LOGPROB)),
    ]
)
# The same whatever the rows hold, so that blocks of all actors fit one another.
ANSWER_COLUMNS = {
    "outputs": pyarrow.list_(_OUTPUT),
    "usage": pyarrow.struct([("prompt_tokens", pyarrow.int64()), ("completion_tokens", pyarrow.int64())]),
    "error": pyarrow.struct([("code", pyarrow.string()), ("message", pyarrow.string())]),
}


class DataRow(NamedTuple):
    """key: tells the row from the others of its job, in 16 bytes."""

    row: InputRow
    key: bytes


def table_of(batch: Any) -> pyarrow.Table:
    """A batch in any of Ray's formats (pyarrow, pandas, numpy) as a table."""
    if isinstance(batch, pyarrow.Table):
        return batch
    from ray.data.block import BlockAccessor

    return BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()


def data_rows(table: pyarrow.Table) -> list[DataRow]:
    """What is wrong with a row is its `error`. A row without custom_id is known by its file and line, or else by its
    content."""
    if _is_of_lines(table):
        found = [input_row_of(columns) for columns in table.select(ROW_COLUMNS.names).to_pylist()]
        return [DataRow(row, digest(row.key if row.custom_id else row.place)) for row in found]
    read = [name for name in table.column_names if name in _READ_KEYS]
    if not read:
        return [_without_keys(table.column_names)] * table.num_rows
    return [_data_row(columns) for columns in table.select(read).to_pylist()]


def with_answers(table: pyarrow.Table, answers: Sequence[dict[str, Any]]) -> pyarrow.Table:
    """The table and its answers' columns: outputs, usage, error."""
    if _is_of_lines(table):
        table = table.drop_columns(["row_error"])
    if taken := [name for name in ANSWER_COLUMNS if name in table.column_names]:
        raise ConfigError(f"{taken[0]}: answers have a column of this name; rename it, as by Dataset.rename_columns")
    for name, kind in ANSWER_COLUMNS.items():
        table = table.append_column(name, pyarrow.array([answer[name] for answer in answers], type=kind))
    return table


def answer_columns(answer: dict[str, Any]) -> dict[str, Any]:
    """Of the row that `run-batch` would write, what is in columns. One column holds one kind of values, so that a
    stop_reason that is a token is its number as text."""
    outputs = [
        {**one, "stop_reason": None if (reason := one["stop_reason"]) is None else str(reason)}
        for one in answer["outputs"]
    ]
    return {"outputs": outputs, "usage": answer["usage"], "error": answer["error"]}


def error_columns(code: str, message: str) -> dict[str, Any]:
    return {"outputs": [], "usage": None, "error": {"code": code, "message": message}}


def _is_of_lines(table: pyarrow.Table) -> bool:
    return {"row", "row_error", "file", "line"} <= set(table.column_names)


def _data_row(columns: dict[str, Any]) -> DataRow:
    custom_id = columns.get("custom_id")
    place = "a row without custom_id" if custom_id is None else f"custom_id {shown(custom_id)}"
    try:
        value = {name: made for name, given in columns.items() if (made := _plain(place, name, given)) is not None}
        row = input_row(0, place, value)
    except LamellaError as error:
        row = InputRow(0, place, {}, error=str(error).removeprefix(f"{place}: "))
    if row.custom_id is None:
        text = json.dumps(columns, sort_keys=True, default=str)
        content = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        row = replace(row, custom_id=f"content {content}")
    return DataRow(row, digest(row.key))


def _without_keys(names: list[str]) -> DataRow:
    error = f"has the columns {shown(sorted(names))}; give it one of prompt, prompt_token_ids and messages"
    row = InputRow(0, "a row", {}, error=error)
    return DataRow(row, digest(row.key))


def _plain(place: str, name: str, value: Any) -> Any:
    # numpy's scalars and arrays, which columns of tensors hold
    return json_value(place, name, value.tolist() if hasattr(value, "tolist") else value)
