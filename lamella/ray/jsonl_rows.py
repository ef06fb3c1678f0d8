"""JSON lines as a data set in which a line that is no row is an error of that row, and ends nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow

from lamella.batch_files.input_rows import InputRow, input_rows
from lamella.errors import ConfigError

_ROWS_AT_ONCE = 256
ROW_COLUMNS = pyarrow.schema(
    [
        ("custom_id", pyarrow.string()),
        ("file", pyarrow.string()),
        ("line", pyarrow.int64()),
        ("row", pyarrow.string()),
        ("row_error", pyarrow.string()),
    ]
)


def read_jsonl(paths: str | Path | Sequence[str | Path]) -> Any:
    """A Dataset of the rows of files that every machine of the cluster can read, gzip where a name ends in .gz.

    Columns: custom_id (null where the row has none), file, line (from 1), row (the row as JSON text, whatever keys it
    has) and row_error (why a line is no row; then row is empty). A file is read by one task, row by row. Raises
    ConfigError where a file does not exist.
    """
    from ray.data import from_items

    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{str(file)!r} is no file here; give .jsonl files, or a Dataset of Ray")
    items = from_items([{"path": str(Path(file).absolute())} for file in files], override_num_blocks=len(files) or 1)
    return items.map_batches(_tables, batch_size=1, batch_format="pyarrow")


def input_row_of(columns: dict[str, Any]) -> InputRow:
    """A row of such a data set as `run-batch` reads it from the file."""
    line, custom_id = columns["line"], columns["custom_id"]
    place = f"{columns['file']}, line {line}"
    value = json.loads(columns["row"]) if columns["row_error"] is None else {}
    return InputRow(line, place, value, custom_id, columns["row_error"])


def _tables(paths: pyarrow.Table) -> Iterator[pyarrow.Table]:
    for path in paths.column("path").to_pylist():
        rows = input_rows(Path(path))
        while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            columns = [
                {
                    "custom_id": row.custom_id,
                    "file": path,
                    "line": row.line,
                    "row": json.dumps(row.value) if row.error is None else "",
                    "row_error": row.error,
                }
                for row in chunk
            ]
            yield pyarrow.Table.from_pylist(columns, schema=ROW_COLUMNS)
