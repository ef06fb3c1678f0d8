"""A folder that keeps what a job has answered: one Parquet file for each batch, which appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from lamella.errors import ConfigError

KEY_COLUMN = "row_key"  # of the files alone


class BatchCheckpoint:
    """The folder, which every machine of the cluster must see under this path."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()

    def open_for(self, job: Mapping[str, Any]) -> None:
        """Make the folder, or find it made by the same job: ConfigError where it is another's, or no folder."""
        path = self.folder / "job.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(self.folder.iterdir()):
                    raise ConfigError(f"checkpoint_path={str(self.folder)!r} holds other files; give an empty one")
                self._replace(path, json.dumps(job, default=str).encode())
            there = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"checkpoint_path={str(self.folder)!r} cannot be used ({error}); give another") from error
        now = json.loads(json.dumps(job, default=str))
        for name in now:
            if there.get(name) != now[name]:
                raise ConfigError(
                    f"checkpoint_path={str(self.folder)!r} is of a job with {name}={there.get(name)!r}, not "
                    f"{now[name]!r}; give another folder, or the same arguments"
                )

    def parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))

    def done(self) -> set[bytes]:
        """Keys of the rows that are answered. A row that two files answer is taken out of the second: that happens
        where a batch was cut otherwise when it ran again."""
        found: set[bytes] = set()
        for path in self.parts():
            keys = pyarrow.parquet.read_table(path, columns=[KEY_COLUMN]).column(KEY_COLUMN).to_pylist()
            again = [key in found for key in keys]
            if all(again):
                path.unlink()
            elif any(again):
                table = pyarrow.parquet.read_table(path)
                self._replace_table(path, table.filter(pyarrow.array([not one for one in again])))
            found.update(keys)
        return found

    def read(self, keys: Sequence[bytes]) -> pyarrow.Table | None:
        """What an earlier run of the same batch answered, if it came so far."""
        path = self._path(keys)
        return pyarrow.parquet.read_table(path).drop_columns([KEY_COLUMN]) if path.exists() else None

    def write(self, keys: Sequence[bytes], table: pyarrow.Table) -> None:
        column = pyarrow.array(keys, type=pyarrow.binary(16))
        self._replace_table(self._path(keys), table.append_column(KEY_COLUMN, column))

    def _path(self, keys: Sequence[bytes]) -> Path:
        name = hashlib.blake2b(b"".join(keys), digest_size=16).hexdigest()
        return self.folder / f"part-{name}.parquet"

    def _replace_table(self, path: Path, table: pyarrow.Table) -> None:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink)
        self._replace(path, sink.getvalue())

    def _replace(self, path: Path, content: Any) -> None:
        partial = self.folder / f".{path.name}.{uuid.uuid4().hex}"
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
