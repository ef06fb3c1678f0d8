"""`lamella run-batch`: the rows of one file, answered in another."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.batch_files.input_rows import InputRow, digest, input_rows, require_different_ids
from lamella.batch_files.output_rows import OutputRows
from lamella.batch_files.parquet_files import require_pyarrow, write_parquet
from lamella.batch_files.row_requests import RequestMaker, RowRequest
from lamella.engine.llm import LLM
from lamella.engine.lora_request import LoRARequest
from lamella.engine.outputs import RequestOutput
from lamella.errors import ConfigError, LamellaError
from lamella.model_executor.progress import Progress
from lamella.output_path import check_output_path


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where rows are read and answers are written. Raises ConfigError, before a model is loaded, where that cannot be.

    overwrites: begin anew where there is output already; otherwise what it answers is not run again.
    """

    input_path: Path
    output_path: Path
    overwrites: bool = False

    def __post_init__(self) -> None:
        source, target = self.input_path, self.output_path
        if not source.exists():
            raise ConfigError(f"input={str(source)!r} does not exist; give a .jsonl or .parquet file")
        if source.is_dir():
            raise ConfigError(f"input={str(source)!r} is a folder; give a .jsonl or .parquet file in it")
        if target.is_dir():
            raise ConfigError(f"output={str(target)!r} is a folder; give a file in it")
        for name, path in (("input", source), ("output", target)):
            if path.exists() and not path.is_file():
                raise ConfigError(
                    f"{name}={str(path)!r} is a pipe or a device, which cannot be read twice; give a file"
                )
        check_output_path("output", target)
        for path in {target, self.rows_path}:
            if path.exists() and os.path.samefile(source, path):
                raise ConfigError(f"output={str(target)!r} is the input; give another file")
        if target.suffix == ".gz":
            raise ConfigError(f"output={str(target)!r}: rows are appended, which gzip cannot; give a .jsonl file")
        if self.is_parquet:
            require_pyarrow(target)
        if self.is_parquet and target.exists() and not self.overwrites:
            raise ConfigError(f"output={str(target)!r} is complete already; give another file, or --overwrite")
        if source.suffix == ".parquet":
            require_pyarrow(source)

    @property
    def is_parquet(self) -> bool:
        return self.output_path.suffix == ".parquet"

    @property
    def rows_path(self) -> Path:
        """Where rows are appended: a Parquet file is made of them at the end."""
        return self.output_path.with_name(f"{self.output_path.name}.rows.jsonl") if self.is_parquet else (
            self.output_path
        )  # fmt: skip


@dataclass(slots=True)
class BatchSummary:
    """What a run did. num_there: rows that an earlier run had answered. seconds: of this run, loading left out."""

    num_rows: int
    num_there: int = 0
    num_answered: int = 0
    num_errors: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: float = 0.0

    @property
    def num_written(self) -> int:
        return self.num_there + self.num_answered + self.num_errors

    def add(self, output: RequestOutput) -> None:
        self.num_answered += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_generated_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    @property
    def rates(self) -> str:
        seconds = max(self.seconds, 1e-9)
        num_in, num_out = self.num_prompt_tokens / seconds, self.num_generated_tokens / seconds
        return f"{num_in:,.1f} prompt and {num_out:,.1f} output tok/s"

    def report(self) -> str:
        there = f", {self.num_there:,} were there before" if self.num_there else ""
        return (
            f"{self.num_written:,} of {self.num_rows:,} rows are written: {self.num_answered:,} answered, "
            f"{self.num_errors:,} errors{there}\n"
            f"{self.num_prompt_tokens:,} prompt tokens, {self.num_cached_tokens:,} of them cached; "
            f"{self.num_generated_tokens:,} tokens generated\n"
            f"{self.seconds:.1f} s, {self.rates}"
        )


def run_batch(
    files: BatchFiles,
    open_llm: Callable[[], LLM],
    *,
    defaults: Mapping[str, Any],
    model_name: str,
    lora_request: LoRARequest | None = None,
    lookahead_prompts: int = 4096,
    shows_progress: bool = True,
    tell: Callable[[BatchSummary], None] = lambda summary: None,
) -> BatchSummary:
    """Answer each row of the input that the output does not answer yet, and write each answer as it comes.

    open_llm: called once, after the files were looked at, and not at all where no row is left. defaults: sampling
    parameters of rows that do not say otherwise. tell: is given what was done when rows are written no more, whatever
    ends the run. Input is read row by row; of each row that is not being run, 16 bytes are kept.
    """
    known = require_different_ids(files.input_path)
    summary = BatchSummary(len(known))
    with OutputRows(files.rows_path, known, overwrites=files.overwrites) as rows:
        summary.num_there = len(rows.done)
        if summary.num_there < summary.num_rows:
            with open_llm() as llm:
                maker = RequestMaker(llm, model_name, defaults, names_lines=files.is_parquet)
                writer = _Writer(files, maker, rows, summary, shows_progress)
                try:
                    writer.run(llm, lora_request, lookahead_prompts)
                finally:
                    writer.close()
                    tell(summary)
        else:
            tell(summary)
        if files.is_parquet:
            write_parquet(files.rows_path, files.output_path, lambda row: int(row["line"]))
    if files.is_parquet:
        files.rows_path.unlink()
    return summary


class _Writer:
    """Hands rows to a stream as it takes them, and writes its outputs."""

    def __init__(
        self, files: BatchFiles, maker: RequestMaker, rows: OutputRows, summary: BatchSummary, shows_progress: bool
    ) -> None:
        self._files, self._maker, self._rows, self._summary = files, maker, rows, summary
        self._progress = Progress("Rows", summary.num_rows, "row") if shows_progress else None
        self._start_seconds = time.monotonic()
        self._requests: dict[int, RowRequest] = {}  # by index of the stream
        self._params: deque[Any] = deque()  # of prompts that the stream takes

    def run(self, llm: LLM, lora_request: LoRARequest | None, lookahead_prompts: int) -> None:
        with llm.stream(
            self._prompts(),
            iter(self._params.popleft, None),
            lora_request=lora_request,
            on_error="return",
            lookahead_prompts=lookahead_prompts,
        ) as outputs:
            for output in outputs:
                assert output.index is not None
                self._write(self._requests.pop(output.index), output)

    def close(self) -> None:
        self._tell()
        if self._progress is not None:
            self._progress.close()

    def _prompts(self) -> Iterator[Any]:
        index = 0
        for row in input_rows(self._files.input_path):
            if digest(row.key) in self._rows.done:
                continue
            try:
                request = self._maker.make(row)
            except LamellaError as error:
                self._write_error(row, error, code="invalid_request")
                continue
            self._requests[index] = request
            self._params.append(request.params)
            index += 1
            yield request.prompt

    def _write(self, request: RowRequest, output: RequestOutput) -> None:
        if output.error is not None:
            self._write_error(request.row, output.error, code="request_failed" if output.outputs else "invalid_request")
            return
        self._rows.write(request.answer(output))
        self._summary.add(output)
        self._tell()

    def _write_error(self, row: InputRow, error: LamellaError, *, code: str) -> None:
        self._rows.write(self._maker.error_row(row, error, code=code))
        self._summary.num_errors += 1
        self._tell()

    def _tell(self) -> None:
        summary = self._summary
        summary.seconds = time.monotonic() - self._start_seconds
        if self._progress is None or not self._progress.is_due:
            return
        num_new = summary.num_written - summary.num_there
        left = summary.seconds * (summary.num_rows - summary.num_written) / max(1, num_new)
        note = f"{summary.num_written:,} of {summary.num_rows:,}, {summary.rates}, {_duration(left)} left"
        self._progress.show(summary.num_written, note)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
