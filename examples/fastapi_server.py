"""An OpenAI-compatible service around an AsyncEngine: an example to start from, and no server product.

    pip install ".[serve]"
    python examples/fastapi_server.py [--model demo:gemma-3-270m] [--port 8000]

It answers /v1/completions and /v1/chat/completions, streaming or not, and /v1/models, /health and /metrics. Whoever
disconnects has the request's memory freed within a step. It has no keys and no TLS, and listens on this machine alone
unless `--host` says otherwise: put what has them in front of it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from lamella import AsyncEngine, EngineClosedError, RequestError, RequestOutput, RequestOutputKind, SamplingParams

DRAIN_SECONDS = 30
# Of OpenAI's parameters, those that change nothing here.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")


class RefusalError(Exception):
    """An answer with an HTTP status and an error in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"error": {"message": message, "type": kind, "param": None, "code": code}}


def refusal_of(error: BaseException) -> RefusalError:
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, (RequestError, TypeError)):  # TypeError: a parameter of an unknown name
        return RefusalError(400, str(error))
    if isinstance(error, EngineClosedError):
        return RefusalError(503, str(error), "server_error")
    return RefusalError(500, str(error), "server_error")


class Call(NamedTuple):
    """What a body asks for. prompts: of several completions, or the one conversation of a chat."""

    is_chat: bool
    prompts: list[Any]
    params: SamplingParams
    streams: bool
    includes_usage: bool


def call_of(body: Any, default: SamplingParams, model: str, *, is_chat: bool) -> Call:
    """Parameters have the same names in SamplingParams, but for a few; what that does not know is refused by it."""
    if not isinstance(body, dict):
        raise RefusalError(400, "the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    if body.pop("model", model) != model:
        raise RefusalError(404, f"this server runs the model {model!r}", code="model_not_found")
    name = "messages" if is_chat else "prompt"
    if name not in body:
        raise RefusalError(400, f"{name} is missing")
    given = body.pop(name)
    streams, stream_options = body.pop("stream", False), body.pop("stream_options", {})
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    elif is_chat:
        body.setdefault("max_tokens", None)  # an answer is as long as it likes
    response_format = body.pop("response_format", {"type": "text"})
    if response_format.get("type") == "json_schema":
        body["structured_outputs"] = {"json": response_format["json_schema"]["schema"]}
    elif response_format.get("type") == "json_object":
        body["structured_outputs"] = {"json_object": True}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    params = dataclasses.replace(default, **body, output_kind=kind)
    if params.logprobs is not None or params.prompt_logprobs is not None:
        raise RefusalError(400, "this example gives no log-probabilities")
    is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = given if is_list and not is_chat else [given]
    if streams and len(prompts) > 1:
        raise RefusalError(400, f"{len(prompts)} prompts: this example streams one at a time")
    return Call(is_chat, prompts, params, streams, bool(stream_options.get("include_usage")))


class Answer:
    """The form of OpenAI's answers."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        kind = "chat.completion" if call.is_chat else "text_completion"
        suffix = ".chunk" if call.is_chat and call.streams else ""
        prefix = "chatcmpl" if call.is_chat else "cmpl"
        self._common = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind + suffix, "created": int(time.time()), "model": model,
        }  # fmt: skip

    def choices(self, output: RequestOutput, first_index: int = 0, **more: Any) -> list[dict[str, Any]]:
        """One for each sample. A stream has those that something new came of."""
        found = []
        for sample in output.outputs:
            if self._call.streams and not (sample.token_ids or sample.finish_reason):
                continue
            content: dict[str, Any] = {"text": sample.text}
            if self._call.is_chat:
                content = {"delta" if self._call.streams else "message": {"content": sample.text, **more}}
            found.append({"index": first_index + sample.index, "finish_reason": sample.finish_reason, **content})
        return found

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {**self._common, "choices": choices, **({} if usage is None else {"usage": usage})}


def usage_of(outputs: list[RequestOutput], num_generated: int) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": cached,
    }  # fmt: skip


def check(output: RequestOutput) -> RequestOutput:
    """Raises what went wrong with a request that did not end by itself."""
    if output.error is not None:
        raise output.error
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise RefusalError(500, str(sample.stop_reason), "server_error")
        if sample.finish_reason == "abort":
            raise RefusalError(503, "the request was ended by the server", "server_error")
    return output


async def events(first: RequestOutput, stream: AsyncIterator[RequestOutput], call: Call, answer: Answer) -> Any:
    """Server-sent events. Where the client goes away, this is cancelled or dropped, and the stream with it."""

    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    output: RequestOutput | None = first
    num_generated = 0
    greeted: set[int] = set()
    try:
        while output is not None:
            for choice in answer.choices(check(output)):
                if call.is_chat and choice["index"] not in greeted:
                    greeted.add(choice["index"])
                    choice["delta"]["role"] = "assistant"
                yield event(answer.body([choice]))
            num_generated += sum(len(sample.token_ids) for sample in output.outputs)
            last, output = output, await anext(stream, None)
        if call.includes_usage:
            yield event(answer.body([], usage_of([last], num_generated)))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has been sent
        yield event(refusal_of(error).error)


async def first_outputs(streams: list[Any]) -> list[RequestOutput]:
    """Where one raises, all are left."""
    waits = [asyncio.ensure_future(anext(stream)) for stream in streams]
    try:
        return await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """What the work gives; it is cancelled when the client goes away before that."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusalError(499, "the client went away")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def build_app(engine: AsyncEngine, model: str, chat_template: str | None = None) -> FastAPI:
    """The service. The engine is drained and closed when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield
            await engine.drain(DRAIN_SECONDS)

    app = FastAPI(title="lamella", lifespan=lifespan)

    def begin(call: Call) -> list[Any]:
        if call.is_chat:
            return [engine.chat(call.prompts[0], call.params, chat_template=chat_template)]
        return [engine.generate(prompt, call.params) for prompt in call.prompts]

    async def respond(request: Request, *, is_chat: bool) -> Response:
        try:
            body = await request.json()
        except ValueError as error:
            raise RefusalError(400, f"the body is no JSON: {error}") from error
        call = call_of(body, engine.get_default_sampling_params(), model, is_chat=is_chat)
        answer = Answer(call, model)
        streams = begin(call)
        # The first output before the status: a prompt that is refused is no 200. Of what is not streamed, it is all.
        outputs = await unless_disconnected(request, first_outputs(streams))
        if call.streams:
            return StreamingResponse(
                events(check(outputs[0]), streams[0], call, answer), media_type="text/event-stream"
            )
        choices = [
            choice
            for index, output in enumerate(outputs)
            for choice in answer.choices(check(output), index * call.params.n, role="assistant")
        ]
        num_generated = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return JSONResponse(answer.body(choices, usage_of(outputs, num_generated)))

    @app.exception_handler(Exception)
    @app.exception_handler(RefusalError)
    @app.exception_handler(RequestError)
    @app.exception_handler(EngineClosedError)
    @app.exception_handler(TypeError)
    async def refuse(request: Request, error: Exception) -> Response:
        refusal = refusal_of(error)
        return JSONResponse(refusal.error, refusal.status)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await respond(request, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await respond(request, is_chat=True)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "lamella"}]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if engine.is_closed else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await engine.metrics_text())

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model over OpenAI's HTTP interface.")
    parser.add_argument("--model", default="demo:gemma-3-270m")
    parser.add_argument("--served-model-name", help="what clients call it; the default is the model as given")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--chat-template", help="a Jinja template, for a model that brings none")
    parser.add_argument("--engine", type=json.loads, default={}, help="engine arguments: '{\"max_model_len\": 2048}'")
    options = parser.parse_args()
    engine = AsyncEngine(model=options.model, **options.engine)
    app = build_app(engine, options.served_model_name or options.model, options.chat_template)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
