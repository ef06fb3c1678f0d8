"""A prefix that is computed once and loaded in another process: how long that takes, and whether its bits are the same.

    python benchmarks/benchmark_saved_prefix.py --model demo:gemma-3-270m --prefix-len 8192 --rounds 3

Each round begins a process that computes the prefix and saves it, then one that loads the file, answers a prompt that
begins with the prefix, forgets it, and computes the same anew.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from lamella import LLM, SamplingParams

_NUM_QUESTION_TOKENS = 16
_ANSWER = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--model", default="demo:gemma-3-270m")
@click.option("--prefix-len", type=click.IntRange(min=1), default=8192, help="tokens")
@click.option("--kv-mib", type=click.IntRange(min=1), default=600, help="KV memory")
@click.option("--quantization", help="as LLM takes it")
@click.option("--rounds", type=click.IntRange(min=1), default=3)
@click.option("--part", type=click.Choice(["save", "load"]), hidden=True)
@click.option("--folder", type=click.Path(), hidden=True)
def main(model: str, prefix_len: int, kv_mib: int, quantization: str | None, rounds: int, part: str | None,
         folder: str | None) -> None:  # fmt: skip
    if part is not None:
        llm = LLM(model, max_model_len=prefix_len + 64, kv_cache_memory_bytes=kv_mib << 20, quantization=quantization,
                  use_tqdm_on_load=False)  # fmt: skip
        click.echo(json.dumps({"save": _save, "load": _load}[part](llm, prefix_len, Path(folder or "."))))
        return
    arguments = [sys.executable, __file__, "--model", model, "--prefix-len", str(prefix_len), "--kv-mib", str(kv_mib)]
    arguments += ["--quantization", quantization] if quantization else []
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for _ in range(rounds):
            both: dict[str, Any] = {}
            for one in ("save", "load"):
                command = [*arguments, "--part", one, "--folder", place]
                both |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            figures.append(both)
    _report(figures, prefix_len)


def _report(figures: list[dict[str, Any]], prefix_len: int) -> None:
    def median(name: str) -> float:
        return statistics.median(one[name] for one in figures)

    ratios = [one["prefill_seconds"] / one["load_seconds"] for one in figures]
    last = figures[-1]
    click.echo(f"prefix: {prefix_len} tokens, {last['kv_bytes']:,} bytes of KV; file: {last['file_bytes']:,} bytes, "
               f"{last['file_bytes'] / last['kv_bytes']:.4f} x")  # fmt: skip
    click.echo(f"prefill: {median('prefill_seconds'):.2f} s; save: {median('save_seconds') * 1e3:.0f} ms; "
               f"load: {median('load_seconds') * 1e3:.0f} ms, checksums included")  # fmt: skip
    click.echo(f"prefill / load: {statistics.median(ratios):.0f}, least {min(ratios):.0f} of {len(ratios)} rounds")
    same = all(one["same_answers"] and one["same_kv"] and one["num_cached"] == prefix_len for one in figures)
    click.echo(f"the loading process found {last['num_cached']} tokens; same bits of KV and answers: {same}")


def _prompts(prefix_len: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """The prefix, and a prompt that begins with it."""
    tokens = np.random.default_rng(0).integers(10, vocab_size, prefix_len + _NUM_QUESTION_TOKENS).tolist()
    return tokens[:prefix_len], tokens


def _save(llm: LLM, prefix_len: int, folder: Path) -> dict[str, Any]:
    prefix, prompt = _prompts(prefix_len, llm.model_config.vocab_size)
    prefill_seconds, _ = _timed(lambda: llm.generate([prefix], _ONE_TOKEN, use_tqdm=False))
    save_seconds, told = _timed(lambda: llm.engine.save_prefix(folder / "prefix", prefix))
    (folder / "answer").write_text(json.dumps(_answer(llm, prompt)[1]))
    return {"prefill_seconds": prefill_seconds, "save_seconds": save_seconds, "kv_bytes": told.kv_bytes,
            "file_bytes": told.file_bytes}  # fmt: skip


def _load(llm: LLM, prefix_len: int, folder: Path) -> dict[str, Any]:
    prefix, prompt = _prompts(prefix_len, llm.model_config.vocab_size)
    load_seconds, _ = _timed(lambda: llm.load_prefix(folder / "prefix"))
    num_cached, answer = _answer(llm, prompt)
    llm.reset_prefix_cache()
    llm.save_prefix(folder / "anew", prefix)
    same_kv = (folder / "anew").read_bytes() == (folder / "prefix").read_bytes()
    same_answers = answer == json.loads((folder / "answer").read_text()) == _answer(llm, prompt)[1]
    return {"load_seconds": load_seconds, "num_cached": num_cached, "same_kv": same_kv, "same_answers": same_answers}


def _answer(llm: LLM, prompt: list[int]) -> tuple[int | None, list[Any]]:
    """How many tokens were cached, and each output token's log-probabilities, to the last bit."""
    output = llm.generate([prompt], _ANSWER, use_tqdm=False)[0]
    logprobs = output.outputs[0].logprobs or []
    return output.num_cached_tokens, [[[token, one.logprob] for token, one in step.items()] for step in logprobs]


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
