"""From a row of a batch file to what the engine is asked, and to the row that answers it."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any, Protocol

from lamella.argument_checks import WholeRange, shown, truth_value
from lamella.batch_files.answers import chat_body, completion_body, logprob_rows
from lamella.batch_files.input_rows import InputRow
from lamella.batch_files.row_keys import (
    ABSENT_FIELDS,
    CACHE_KEYS,
    CHAT_KEYS,
    PROMPT_KEYS,
    SAMPLING_KEYS,
    refuse_absent,
    sampling_values,
)
from lamella.engine.llm import LLM
from lamella.engine.outputs import RequestOutput
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import LamellaError, RequestError

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
OPENAI_KEYS = ("custom_id", "method", "url", "body")
# What a plain row's answer adds to it.
ANSWER_KEYS = ("line", "outputs", "usage", "error")
_TOP_LOGPROBS = WholeRange(0, 20, "0 to 20")


class RowRequest(Protocol):
    """A row that can be run."""

    @property
    def row(self) -> InputRow: ...

    @property
    def prompt(self) -> Any: ...

    @property
    def params(self) -> SamplingParams: ...

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The row to write for a request that went right."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMaker:
    """defaults: sampling parameters of rows that do not say otherwise, over the model's own. names_lines: answers to
    rows of the OpenAI format have their line, too."""

    llm: LLM
    model_name: str
    defaults: Mapping[str, Any]
    names_lines: bool = False

    def make(self, row: InputRow) -> RowRequest:
        """RequestError for what is wrong in the row."""
        if row.error is not None:
            raise RequestError(row.error)
        try:
            return _OpenAIRequest.of(row, self) if is_openai(row.value) else _PlainRequest.of(row, self)
        except (TypeError, AttributeError, OverflowError) as error:  # JSON may hold any value at any place
            raise RequestError(f"the row cannot be read: {error}") from error

    def error_row(self, row: InputRow, error: LamellaError | str, *, code: str) -> dict[str, Any]:
        message = f"{row.place}: {error}"
        if is_openai(row.value) or row.error is not None:
            head = _openai_head(row, with_line=self.names_lines)
            return {**head, "response": None, "error": {"code": code, "message": message}}
        carried = {name: value for name, value in row.value.items() if name not in ANSWER_KEYS}
        return {**carried, "line": row.line, "outputs": [], "usage": None, "error": {"code": code, "message": message}}

    def params(self, row: InputRow, values: Mapping[str, Any], **defaults: Any) -> SamplingParams:
        """The row's parameters. A seed that nobody gave follows from the engine's and the row's id, so that a row is
        answered alike whenever it runs."""
        given = {**defaults, **self.defaults, **values}
        params = dataclasses.replace(self.llm.get_default_sampling_params(), **given)
        if params.seed is None and not params.is_greedy:
            text = f"{self.llm.engine.config.seed}\0{row.key}".encode("utf-8", "surrogatepass")
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            params = dataclasses.replace(params, seed=seed)
        return params

    def chat_prompt(self, given: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise RequestError(
                f'messages={shown(messages)}: must be a non-empty list of {{"role": ..., "content": ...}}'
            )
        rest = {name: given[name] for name in CHAT_KEYS[1:] if given.get(name) is not None}
        (prompt,) = self.llm.chat_prompts(messages, **{**rest, **arguments})
        made: dict[str, Any] = {**prompt}
        if given.get("cache_salt") is not None:
            made["cache_salt"] = given["cache_salt"]
        return made


def is_openai(value: Mapping[str, Any]) -> bool:
    return any(name in value for name in ("method", "url", "body"))


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenAIRequest:
    row: InputRow
    prompt: Any
    params: SamplingParams
    is_chat: bool
    maker: RequestMaker

    @classmethod
    def of(cls, row: InputRow, maker: RequestMaker) -> _OpenAIRequest:
        value = row.value
        unknown = [name for name in value if name not in OPENAI_KEYS and value[name] is not None]
        if unknown:
            raise RequestError(f"{unknown[0]}: a row of this format has {', '.join(OPENAI_KEYS)} and no other key")
        url, method, body = value.get("url"), value.get("method", "POST"), value.get("body")
        if url not in (CHAT_URL, COMPLETIONS_URL):
            raise RequestError(f"url={shown(url)} is not here; give {CHAT_URL} or {COMPLETIONS_URL}")
        if method != "POST":
            raise RequestError(f'method={shown(method)}: must be "POST"')
        if not isinstance(body, dict):
            raise RequestError(f"body={shown(body)}: must be an object")
        if not isinstance(body.get("model", ""), str):
            raise RequestError(f"model={shown(body['model'])}: must be a string")
        if url == CHAT_URL:
            return cls(row, *_chat(body, row, maker), True, maker)
        return cls(row, *_completion(body, row, maker), False, maker)

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        digest = _short_digest(self.row)
        make = chat_body if self.is_chat else completion_body
        body = make(output, self.params, digest, self.maker.model_name, int(time.time()))
        response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
        return {**_openai_head(self.row, with_line=self.maker.names_lines), "response": response, "error": None}


def _chat(body: Mapping[str, Any], row: InputRow, maker: RequestMaker) -> tuple[Any, SamplingParams]:
    own = (*CHAT_KEYS, "model", "cache_salt", "max_completion_tokens", "max_tokens", "logprobs", "top_logprobs",
           "response_format")  # fmt: skip
    values = sampling_values(body, dict.fromkeys(own))
    longest, longest_of_old = body.get("max_completion_tokens"), body.get("max_tokens")
    if None not in (longest, longest_of_old) and longest != longest_of_old:
        raise RequestError(f"max_completion_tokens={shown(longest)} and max_tokens={shown(longest_of_old)}: give one")
    if (longest := longest if longest is not None else longest_of_old) is not None:
        values["max_tokens"] = longest
    wants = body.get("logprobs") is not None and truth_value("logprobs", body["logprobs"], RequestError)
    if (top := body.get("top_logprobs")) is not None and not wants:
        raise RequestError(f"top_logprobs={shown(top)} needs logprobs to be true")
    if wants:
        values["logprobs"] = _TOP_LOGPROBS.check("top_logprobs", top or 0, RequestError)
    if (form := _structured(body.get("response_format"))) is not None:
        values["structured_outputs"] = form
    arguments = {"tools": None} if body.get("tool_choice") == "none" else {}
    return maker.chat_prompt(body, **arguments), maker.params(row, values, max_tokens=None)


def _completion(body: Mapping[str, Any], row: InputRow, maker: RequestMaker) -> tuple[Any, SamplingParams]:
    own = (*PROMPT_KEYS, *CACHE_KEYS, "model", "response_format")
    values = sampling_values(body, dict.fromkeys(own))
    if (form := _structured(body.get("response_format"))) is not None:
        values["structured_outputs"] = form
    return _prompt(body), maker.params(row, values)


@dataclasses.dataclass(frozen=True, slots=True)
class _PlainRequest:
    row: InputRow
    prompt: Any
    params: SamplingParams
    maker: RequestMaker

    @classmethod
    def of(cls, row: InputRow, maker: RequestMaker) -> _PlainRequest:
        """Keys that are no prompt and no sampling parameter are the caller's own."""
        value = row.value
        for name in ANSWER_KEYS:
            if name in value:
                raise RequestError(f"{name}: answers have this key; give the row's another name")
        for name in ABSENT_FIELDS:
            refuse_absent(name, value.get(name))
        nested = value.get("sampling_params")
        if nested is not None and not isinstance(nested, dict):
            raise RequestError(f"sampling_params={shown(nested)}: must be an object")
        values = {name: value[name] for name in value if name in SAMPLING_KEYS and value[name] is not None}
        values |= sampling_values(nested or {}, {})
        is_chat = value.get("messages") is not None
        if is_chat == any(value.get(name) is not None for name in PROMPT_KEYS):
            raise RequestError(
                f"the row has the keys {shown(sorted(value))}: give it one of prompt, prompt_token_ids and messages"
            )
        prompt = maker.chat_prompt(value) if is_chat else _prompt(value)
        return cls(row, prompt, maker.params(row, values), maker)

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        outputs = [
            {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                **({} if self.params.detokenize else {"token_ids": list(completion.token_ids)}),
                **({} if completion.logprobs is None else {"logprobs": logprob_rows(completion, self.params)}),
            }
            for completion in output.outputs
        ]
        num_generated = sum(len(completion.token_ids) for completion in output.outputs)
        usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": num_generated}
        return {**self.row.value, "line": self.row.line, "outputs": outputs, "usage": usage, "error": None}


def _prompt(given: Mapping[str, Any]) -> Any:
    """One prompt as the engine takes it. A list of one prompt is that prompt; "prompt" may hold token ids."""
    made = {name: given[name] for name in (*PROMPT_KEYS, *CACHE_KEYS) if given.get(name) is not None}
    prompt = made.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = made["prompt"] = prompt[0]
    if isinstance(prompt, list) and any(isinstance(one, (str, list)) for one in prompt):
        raise RequestError(f"prompt={shown(prompt)} is more than one prompt: give each a row of its own")
    if isinstance(prompt, list):
        if "prompt_token_ids" in made:
            raise RequestError("prompt and prompt_token_ids both hold token ids: give one")
        made["prompt_token_ids"] = made.pop("prompt")
    return made


def _structured(response_format: Any) -> dict[str, Any] | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            return {"json": schema["schema"]}
    raise RequestError(
        f'response_format={shown(response_format)}: must be {{"type": "text"}}, {{"type": "json_object"}} or '
        '{"type": "json_schema", "json_schema": {"schema": ...}}'
    )


def _openai_head(row: InputRow, *, with_line: bool) -> dict[str, Any]:
    head = {"id": f"batch_req_{_short_digest(row)}", "custom_id": row.custom_id}
    return head if row.custom_id is not None and not with_line else {**head, "line": row.line}


def _short_digest(row: InputRow) -> str:
    return hashlib.blake2b(row.key.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
