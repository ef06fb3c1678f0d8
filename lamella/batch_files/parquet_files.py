"""Batch files in Parquet, through pyarrow, which is imported where it is used."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lamella.errors import ConfigError

_ROWS_AT_ONCE = 512


def require_pyarrow(path: Path) -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'{path}: Parquet files need pyarrow, which is not installed; run: pip install ".[parquet]" in a clone of '
            "lamella, or give a .jsonl file"
        ) from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, without columns that are null in them. Times become text in ISO 8601. ConfigError for what is no
    Parquet file, and for columns of bytes, which no row of output could carry."""
    require_pyarrow(path)
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for field in file.schema_arrow:
                if pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
                    raise ConfigError(
                        f"{path}: column {field.name!r} holds bytes, which rows cannot carry; leave it out"
                    )
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield {name: json_value(path, name, value) for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet ({error}); give a file that can") from error


def write_parquet(lines_path: Path, path: Path, line_of: Callable[[dict[str, Any]], int]) -> None:
    """Write JSON lines as a Parquet file, in the order of `line_of`; it appears whole or not at all. Columns are the
    keys of all rows together. ConfigError where one key has values of kinds that no column can hold."""
    require_pyarrow(path)
    import pyarrow
    import pyarrow.parquet

    places, schema = [], None
    with lines_path.open("rb") as file:
        offset = 0
        for lines in _chunks(iter(file)):
            rows = [json.loads(line) for line in lines]
            for line, row in zip(lines, rows, strict=True):
                places.append((line_of(row), offset))
                offset += len(line)
            try:
                own = pyarrow.Table.from_pylist(_of_one_set_of_keys(rows)).schema
                schema = own if schema is None else pyarrow.unify_schemas([schema, own], promote_options="permissive")
            except pyarrow.ArrowException as error:
                raise ConfigError(
                    f"{lines_path} cannot become Parquet ({error}): a column holds values of one kind; give -o a "
                    ".jsonl file"
                ) from error
    places.sort()
    partial = path.with_name(f"{path.name}.partial")
    with lines_path.open("rb") as file:
        schema = pyarrow.schema([]) if schema is None else schema

        def line_at(offset: int) -> bytes:
            file.seek(offset)
            return file.readline()

        with pyarrow.parquet.ParquetWriter(partial, schema) as writer:
            for chunk in _chunks(iter(places)):
                rows = [json.loads(line_at(offset)) for _, offset in chunk]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    os.replace(partial, path)


def _of_one_set_of_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """pyarrow takes the columns from the first row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def json_value(path: Path | str, name: str, value: Any) -> Any:
    """The value as JSON has it; what is no number is null."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, dict):
        return {key: json_value(path, name, one) for key, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [json_value(path, name, one) for one in value]
    raise ConfigError(f"{path}: column {name!r} holds {type(value).__name__}, which rows cannot carry; leave it out")


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(items, _ROWS_AT_ONCE)):
        yield chunk
