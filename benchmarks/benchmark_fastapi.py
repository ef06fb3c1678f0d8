"""The FastAPI example under load, over HTTP on loopback: many streams at once, of which a share leaves early.

    python benchmarks/benchmark_fastapi.py --model demo:smollm2-135m --streams 200 --seconds 120

The service is a process of its own. Each of the clients asks, reads its stream, and asks again; those that leave do so
after a random number of events, by closing the connection. At the end nothing may be left in the engine. Prints times
to the first event and between events, as percentiles, and the service's memory over time. Exits with 1 where there was
an error, or a page or request was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "fastapi_server.py"
PERCENTILES = (50, 90, 99)


class Results:
    def __init__(self) -> None:
        self.first_seconds: list[float] = []
        self.between_seconds: list[float] = []
        self.num_whole = 0
        self.num_left = 0
        self.errors: list[str] = []


async def one_stream(client: httpx.AsyncClient, draw: random.Random, options, results: Results) -> None:
    words = [draw.choice(("sea", "ship", "wind", "rain", "light", "house")) for _ in range(options.input_words)]
    body = {
        "prompt": " ".join(words), "max_tokens": options.output_len, "ignore_eos": True, "stream": True,
        "seed": draw.randrange(2**31),
    }  # fmt: skip
    leaves_after = draw.randrange(options.output_len) if draw.random() < options.leave_share else None
    num_events, last = 0, time.perf_counter()
    if leaves_after == 0:  # before the first event
        try:
            async with asyncio.timeout(draw.random()):
                await client.post("/v1/completions", json=body)
        except TimeoutError:
            results.num_left += 1
        else:
            results.num_whole += 1
        return
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            results.errors.append(f"{response.status_code}: {await response.aread()!r}")
            return
        async for line in response.aiter_lines():
            if not line:
                continue
            event = line.removeprefix("data: ")
            if event == "[DONE]":
                results.num_whole += 1
                return
            if "error" in json.loads(event):
                results.errors.append(event)
                return
            now = time.perf_counter()
            (results.between_seconds if num_events else results.first_seconds).append(now - last)
            last = now
            num_events += 1
            if num_events == leaves_after:
                results.num_left += 1
                return
    results.errors.append("a stream ended without its last event")


async def client_loop(client: httpx.AsyncClient, index: int, options, results: Results, end: float) -> None:
    draw = random.Random(index)
    while time.perf_counter() < end:
        try:
            await one_stream(client, draw, options, results)
        except httpx.HTTPError as error:
            results.errors.append(repr(error))


LEFT_BY_NOBODY = ("lamella:kv_group_pages_owned", "lamella:num_requests_running", "lamella:num_requests_waiting{")


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def left_behind(client: httpx.AsyncClient) -> dict[str, float]:
    """What should be 0 once everybody has left."""
    found: dict[str, float] = {}
    for _ in range(100):
        now = await figures(client)
        found = {name: number for name, number in now.items() if name.startswith(LEFT_BY_NOBODY)}
        if not any(found.values()):
            break
        await asyncio.sleep(0.1)
    return found


async def measure(url: str, pid: int, options) -> int:
    results = Results()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.streams)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client,
        httpx.AsyncClient(base_url=url) as other,
    ):
        begin = time.perf_counter()
        end = begin + options.seconds
        loops = [asyncio.create_task(client_loop(client, one, options, results, end)) for one in range(options.streams)]
        memory = []
        while time.perf_counter() < end:
            memory.append((time.perf_counter() - begin, resident_mib(pid)))
            await asyncio.sleep(options.seconds / 12)
        # Time is up: whoever is still reading leaves, too.
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        left = await left_behind(other)
        num_tokens = sum(
            number
            for name, number in (await figures(other)).items()
            if name.startswith("lamella:generation_tokens_total{")
        )
    memory.append((time.perf_counter() - begin, resident_mib(pid)))
    print(f"{results.num_whole} streams read to the end, {results.num_left} left early, {len(results.errors)} errors")
    for error in results.errors[:5]:
        print(f"  {error}")
    print(f"generated {num_tokens:.0f} tokens, {num_tokens / (memory[-1][0]):.0f} a second")
    for name, seconds in (("first event", results.first_seconds), ("between events", results.between_seconds)):
        if seconds:
            values = ", ".join(f"p{one} {np.percentile(seconds, one) * 1000:.0f} ms" for one in PERCENTILES)
            print(f"{name}: {values}, most {max(seconds) * 1000:.0f} ms ({len(seconds)})")
    print("resident MiB of the service: " + ", ".join(f"{at:.0f} s {mib:.0f}" for at, mib in memory))
    print(f"left in the engine: {left}")
    return 1 if results.errors or any(left.values()) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Load the FastAPI example with streams of which some leave early.")
    parser.add_argument("--model", default="demo:smollm2-135m")
    parser.add_argument("--streams", type=int, default=200, help="clients at once")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--leave-share", type=float, default=0.5, help="of streams whose client leaves early")
    parser.add_argument("--input-words", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument(
        "--engine", default='{"max_num_seqs": 200, "max_model_len": 512}', help="engine arguments, JSON"
    )
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(EXAMPLE), "--model", options.model, "--port", str(port), "--engine", options.engine]
    service = subprocess.Popen(command)
    try:
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                if service.poll() is not None:
                    raise SystemExit("the service did not start") from None
                time.sleep(0.1)
        status = asyncio.run(measure(url, service.pid, options))
    finally:
        service.terminate()
        service.wait(60)
    print(f"the service ended with {service.returncode}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
