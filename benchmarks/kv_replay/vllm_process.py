"""vLLM's own scheduler on the same workload, in another interpreter: nothing of it is imported here."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kv_replay.drive import FIRST_TOKEN, PROMPT_OUTPUT_TOKENS, SIBLING_TOKENS, decode_output_tokens
from kv_replay.results import Measurements, Outcome, PromptCost, Refusal
from kv_replay.systems import Limits, System
from kv_replay.traces import TraceRequest, token_ids
from lamella.errors import ConfigError, LamellaError
from lamella.kv_cache.spec import KVCacheSpec, SlidingWindowSpec

DRIVER = Path(__file__).with_name("vllm_driver.py")


def replay(
    python: str | None,
    system: System,
    specs: Sequence[KVCacheSpec],
    limits: Limits,
    requests: Sequence[TraceRequest],
    *,
    num_sessions: int,
    budget_bytes: int,
    max_model_len: int,
) -> Outcome:
    """The workload of `drive.replay`. Raises ConfigError without `python`."""
    turns = []
    for request in requests:
        prompt, output = token_ids(request)
        turns.append(
            {"id": request.request_id, "session": request.session, "prompt": prompt.tolist(), "output": output.tolist()}
        )
    job = _job(system, specs, limits, budget_bytes, max_model_len)
    return _run(python, {**job, "turns": turns, "num_sessions": num_sessions})


def decode_only(
    python: str | None,
    system: System,
    specs: Sequence[KVCacheSpec],
    limits: Limits,
    *,
    num_requests: int,
    context_tokens: int,
    num_steps: int,
    budget_bytes: int,
    max_model_len: int,
) -> Outcome:
    """The workload of `drive.decode_only`; the driver draws its prompts itself."""
    decode = {
        "num_requests": num_requests,
        "context_tokens": context_tokens,
        "num_steps": num_steps,
        "num_output_tokens": decode_output_tokens(num_requests, num_steps),
    }
    return _run(python, {**_job(system, specs, limits, budget_bytes, max_model_len), "decode_only": decode})


def prompt_cost(
    python: str | None,
    system: System,
    specs: Sequence[KVCacheSpec],
    limits: Limits,
    *,
    num_prompt_tokens: int,
    num_prompts: int,
    num_siblings: int,
    budget_bytes: int,
    max_model_len: int,
) -> Outcome:
    """The workload of `drive.prompt_cost`; the driver draws its prompts itself."""
    sizes = {
        "num_prompt_tokens": num_prompt_tokens,
        "num_prompts": num_prompts,
        "num_siblings": num_siblings,
        "num_sibling_tokens": SIBLING_TOKENS,
        "first_token": FIRST_TOKEN,
        "num_output_tokens": PROMPT_OUTPUT_TOKENS,
    }
    return _run(python, {**_job(system, specs, limits, budget_bytes, max_model_len), "prompt_cost": sizes})


def _job(
    system: System, specs: Sequence[KVCacheSpec], limits: Limits, budget_bytes: int, max_model_len: int
) -> dict[str, Any]:
    layers = [
        {
            "window_tokens": spec.window_tokens if isinstance(spec, SlidingWindowSpec) else None,
            "num_kv_heads": spec.num_kv_heads,
            "k_dim": spec.k_dim,
            "v_dim": spec.v_dim,
        }
        for spec in specs
    ]
    return {
        "layers": layers,
        "page_tokens": limits.page_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "budget_bytes": budget_bytes,
        "max_model_len": max_model_len,
        "retention": None if system.kind == "vllm-dense" else "default" if system.value is None else int(system.value),
    }


def _run(python: str | None, job: dict[str, Any]) -> Outcome:
    if python is None:
        raise ConfigError("system 'vllm' runs in another interpreter; give the one that has vLLM as vllm_python")
    with tempfile.TemporaryDirectory() as folder:
        job_file, answer_file = Path(folder) / "job.json", Path(folder) / "answer.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        command = [python, str(DRIVER), str(job_file), str(answer_file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"vllm_python={python!r} cannot be started: {error}") from error
        if done.returncode or not answer_file.is_file():
            raise LamellaError(f"the vLLM driver failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        answer = json.loads(answer_file.read_text(encoding="utf-8"))
    if "refused" in answer:
        return Refusal(answer["refused"])
    if "prompt_seconds" in answer:
        return PromptCost.of([tuple(seconds) for seconds in answer["prompt_seconds"]])
    return Measurements(**answer)
