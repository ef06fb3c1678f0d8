"""What an actor of `Dataset.map_batches` runs: an engine that answers batch after batch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow

from lamella.argument_checks import shown
from lamella.batch_files.input_rows import InputRow
from lamella.batch_files.row_keys import SAMPLING_KEYS, refuse_absent
from lamella.batch_files.row_requests import RequestMaker, RowRequest, is_openai
from lamella.engine.llm import LLM
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import ConfigError, EngineClosedError, LamellaError, RequestError, WorkerLostError
from lamella.ray.batch_checkpoint import BatchCheckpoint
from lamella.ray.row_tables import answer_columns, data_rows, error_columns, table_of, with_answers

_MOST_TRIES = 3  # of a batch in one actor, whose engine has ended under it


class LamellaBatches:
    """Answers batches of rows: `dataset.map_batches(LamellaBatches, concurrency=2, batch_size=256,
    fn_constructor_kwargs={"model": model, "sampling_params": {"max_tokens": 64}})`.

    Rows have prompt, prompt_token_ids or messages, and sampling parameters, as plain rows of `lamella run-batch` do;
    batches may be in any of Ray's formats. The answer is a table of the same rows in the same order with three more
    columns: outputs (for each sample text, finish_reason, stop_reason, and token_ids with detokenize=False, logprobs if
    asked for), usage and error (code, message; null where all went well). A bad row is an error of that row alone.
    What a row is answered depends on it, on its custom_id and on the engine's seed, not on the actor or the batch.

    sampling_params: of rows that do not say otherwise, as SamplingParams or some of its fields by name.
    checkpoint_path: a folder for answers, in which a batch that was answered before is looked up. engine_arguments: as
    LLM takes them.
    Several threads may call: their batches then run together. Raises ConfigError, and what LLM raises.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        checkpoint_path: str | Path | None = None,
        **engine_arguments: Any,
    ) -> None:
        self._model, self._arguments = model, engine_arguments
        self._defaults = sampling_defaults(sampling_params)
        self._checkpoint = None if checkpoint_path is None else BatchCheckpoint(checkpoint_path)
        self._opening = threading.Lock()
        self._llm: LLM | None = None
        self._open_llm()

    def __call__(self, batch: Any) -> pyarrow.Table:
        table = table_of(batch)
        rows = data_rows(table)
        keys = [row.key for row in rows]
        if self._checkpoint is not None and rows:
            there = self._checkpoint.read(keys)
            if there is not None:
                return there
        found = with_answers(table, self._answers([row.row for row in rows]))
        if self._checkpoint is not None and rows:
            self._checkpoint.write(keys, found)
        return found

    def close(self) -> None:
        """Give the engine's memory back. Twice is fine."""
        if self._llm is not None:
            self._llm.close()

    def _open_llm(self) -> LLM:
        with self._opening:
            if self._llm is None or self._llm.engine.is_closed:
                self._llm = LLM(self._model, use_tqdm_on_load=False, **self._arguments)
            return self._llm

    def _answers(self, rows: Sequence[InputRow]) -> list[dict[str, Any]]:
        for attempt in range(1, _MOST_TRIES + 1):
            try:
                return self._answered_by(self._open_llm(), rows)
            except (EngineClosedError, WorkerLostError):
                if attempt == _MOST_TRIES:
                    raise
        raise AssertionError("unreachable")

    def _answered_by(self, llm: LLM, rows: Sequence[InputRow]) -> list[dict[str, Any]]:
        maker = RequestMaker(llm, self._model, self._defaults)
        answers: list[dict[str, Any]] = [{}] * len(rows)
        requests: list[tuple[int, RowRequest]] = []
        for index, row in enumerate(rows):
            try:
                if is_openai(row.value):
                    raise RequestError("method, url and body are of the OpenAI format, which `lamella run-batch` takes")
                requests.append((index, maker.make(row)))
            except LamellaError as error:
                answers[index] = error_columns("invalid_request", f"{row.place}: {error}")
        if not requests:
            return answers
        prompts, params = [one.prompt for _, one in requests], [one.params for _, one in requests]
        with llm.stream(prompts, params, on_error="return", lookahead_prompts=len(prompts)) as outputs:
            for output in outputs:
                assert output.index is not None
                index, request = requests[output.index]
                if output.error is None:
                    answers[index] = answer_columns(request.answer(output))
                else:
                    code = "request_failed" if output.outputs else "invalid_request"
                    answers[index] = error_columns(code, f"{request.row.place}: {output.error}")
        return answers


def sampling_defaults(given: SamplingParams | Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling parameters by name. A SamplingParams stands for all its fields, a mapping for those that it names.
    RequestError for what rows cannot be asked for."""
    if given is None:
        return {}
    if isinstance(given, SamplingParams):
        usual = SamplingParams()
        values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        for name in values.keys() - SAMPLING_KEYS:
            if values[name] != getattr(usual, name):
                refuse_absent(name, values[name])
        return {name: value for name, value in values.items() if name in SAMPLING_KEYS}
    if not isinstance(given, Mapping):
        raise ConfigError(f"sampling_params={shown(given)}: give a SamplingParams, or some of its fields by name")
    SamplingParams(**given)
    for name in given.keys() - SAMPLING_KEYS:
        refuse_absent(name, given[name])
    return {name: value for name, value in given.items() if name in SAMPLING_KEYS}
