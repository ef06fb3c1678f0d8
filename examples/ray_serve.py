"""A streaming service of several engines on Ray Serve, in which prompts that begin alike go to the same engine.

    pip install ".[ray]"
    python examples/ray_serve.py [--model demo:gemma-3-270m] [--engines 2] [--port 8000]
    curl -N localhost:8000/generate -d '{"prompt": "Once upon a time", "max_tokens": 32}'

The answer is one JSON object a line: {"text": ...} for what is new, then {"engine": ..., "num_cached_tokens": ...}, or
{"error": ...}. A body has prompt and sampling parameters. Whoever disconnects has the request's memory freed. It
listens on this machine alone, and has no keys and no TLS.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lamella import AsyncEngine, LamellaError, RequestOutputKind
from lamella.distributed.prefix_routing import PrefixRouter
from lamella.ray import connect

KEY_BYTES = 256  # prompts that begin with the same so many are alike


@serve.deployment(max_ongoing_requests=1000)
class ServedEngine:
    """One engine. Several of them are deployments of their own, so that the router says which."""

    def __init__(self, model: str, engine_arguments: dict[str, Any]) -> None:
        self._engine = AsyncEngine(model=model, **engine_arguments)

    async def generate(self, prompt: Any, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """What is new of the text, part by part; then how much of the prompt was cached. An error ends it."""
        try:
            default = self._engine.get_default_sampling_params()
            params = dataclasses.replace(default, **{**given, "output_kind": RequestOutputKind.DELTA})
            async for output in self._engine.generate(prompt, params):
                if output.error is not None:
                    raise output.error
                yield {"text": output.outputs[0].text}
            yield {"num_cached_tokens": output.num_cached_tokens}
        except (LamellaError, TypeError) as error:
            yield {"error": str(error)}


@serve.deployment(max_ongoing_requests=1000)
class PrefixIngress:
    """Takes requests and hands each to the engine that prompts like it went to, unless that has too much to do."""

    def __init__(self, *engines: Any) -> None:
        self._engines = [engine.options(stream=True) for engine in engines]
        self._router = PrefixRouter(len(engines), key_tokens=KEY_BYTES)
        self._loads = [0.0] * len(engines)

    async def __call__(self, request: Request) -> Response:
        try:
            body = await request.json()
            prompt = body.pop("prompt")
            beginning = list(prompt.encode()) if isinstance(prompt, str) else [int(token) for token in prompt]
            key = self._router.key(beginning)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return JSONResponse({"error": "the body must be a JSON object with a prompt"}, 400)
        return StreamingResponse(self._lines(key, prompt, body), media_type="application/x-ndjson")

    async def _lines(self, key: int, prompt: Any, given: dict[str, Any]) -> AsyncIterator[str]:
        index = self._router.choose(key, self._loads)
        self._loads[index] += 1
        answers = self._engines[index].generate.remote(prompt, given)
        try:
            async for answer in answers:
                if "num_cached_tokens" in answer:
                    answer = {"engine": index, **answer}
                yield json.dumps(answer, ensure_ascii=False) + "\n"
        finally:
            self._loads[index] -= 1
            answers.cancel()  # where the client went away; else it has ended


def start(model: str, num_engines: int, port: int, engine_arguments: dict[str, Any]) -> None:
    """Serve under http://127.0.0.1:port/generate until `serve.shutdown()`."""
    connect()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"ray_actor_options": {"num_cpus": 0.5}}
    engines = [
        ServedEngine.options(name=f"engine-{index}", **options).bind(model, engine_arguments)
        for index in range(num_engines)
    ]
    router = PrefixIngress.options(ray_actor_options={"num_cpus": 0.1}).bind(*engines)
    serve.run(router, name="lamella", route_prefix="/generate")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model by several engines on Ray Serve.")
    parser.add_argument("--model", default="demo:gemma-3-270m")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", type=json.loads, default={}, help="engine arguments: '{\"max_model_len\": 2048}'")
    options = parser.parse_args()
    start(options.model, options.engines, options.port, {"max_model_len": 2048, **options.engine})
    print(f"http://127.0.0.1:{options.port}/generate", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
