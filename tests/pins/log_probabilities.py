"""Tokens and log-probabilities of six prompts on Gemma 3 270M, to the bit, on the native kernels.

Bits follow from the build (an instruction set), not from the number of threads or the batch. torch, too, has code for
each instruction set, which does not give the same frequencies of the rotary embedding. So each build is measured in a
process that is told its instruction set before it imports torch, and an AVX-512 machine measures AVX2 as well.

    python -m tests.pins.log_probabilities none    # or int8, w8a8, gguf: JSON, of the build of this process
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from lamella import LLM, SamplingParams
from tests.parity.harness import load_cases
from tests.pins.places import native_build, native_builds_here
from tests.pins.stored import load, require_equal

# torch's name of an instruction set for each build of the native kernels, as its environment variable spells it
TORCH_NAMES = {"avx2": "avx2", "avx512": "avx512", "neon": "default"}
QUANTIZATIONS = ("none", "int8", "w8a8", "gguf")
NUM_THREADS = (1, 2)
CHUNK_TOKENS = 128
ENGINE = {
    "max_model_len": 1024,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 * 2**20,
    "enable_prefix_caching": False,  # or the second run would compute nothing
}
MAX_TOKENS = 8
NUM_TOP = 4
UNICODE = "Ἀρχὴ ἥμισυ παντός — 🙂🙃 Ünïcødé, हर साल, 봄이 오면 마을 사람들은"
CHAT = "<start_of_turn>user\nWhere does the river go?<end_of_turn>\n<start_of_turn>model\n"


def measure(build: str, quantization: str) -> dict[str, Any]:
    """What `main` prints in a process that runs `build`."""
    environment = {name: value for name, value in os.environ.items() if name != "LAMELLA_NATIVE"}
    environment["ATEN_CPU_CAPABILITY"] = TORCH_NAMES[build]
    command = [sys.executable, "-m", "tests.pins.log_probabilities", quantization]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"with the {build} build: {done.stderr}"
    measured: dict[str, Any] = json.loads(done.stdout)
    found = measured.pop("build")
    assert found == build, (
        f"the {build} build is not there, {found} runs instead; `python lamella/native/build.py` makes it"
    )
    return measured


def main(quantization: str) -> None:
    ids = {case.name: list(case.prompt_token_ids) for case in load_cases()}
    prompts = {
        "two tokens": ids["one_word"],
        "one chunk": ids["arithmetic"],
        "several chunks": ids["inventory"][: 2 * CHUNK_TOKENS + 21],
        "longer than a window of 512": ids["story"][:540],
        "chat": CHAT,
        "unicode": UNICODE,
    }
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
    found: dict[str, Any] = {"build": native_build()}
    asked_for = None if quantization == "none" else quantization
    with LLM("demo:gemma-3-270m", quantization=asked_for, **ENGINE) as llm:
        assert llm.engine.attention_backend == "native"
        for num_threads in NUM_THREADS:
            torch.set_num_threads(num_threads)
            outputs = llm.generate(list(prompts.values()), params, use_tqdm=False)
            found[f"threads {num_threads}"] = {
                name: _bits(output) for name, output in zip(prompts, outputs, strict=True)
            }
    print(json.dumps(found))


def _bits(output: Any) -> dict[str, Any]:
    """logprobs: float32, in hexadecimal, of the tokens. top_sha256: of the likeliest tokens and theirs, in order."""
    (completion,) = output.outputs
    digest = hashlib.sha256()
    for entries in completion.logprobs:
        for token_id, entry in entries.items():
            digest.update(f"{token_id} {_hexadecimal(entry.logprob)} {entry.rank}\n".encode())
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": " ".join(
            _hexadecimal(entries[token_id].logprob)
            for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True)
        ),
        "top_sha256": digest.hexdigest(),
    }


def _hexadecimal(value: float) -> str:
    return np.array(value, dtype=">f4").tobytes().hex()


def of_all_threads(measured: dict[str, Any]) -> dict[str, Any]:
    """The bits that every number of threads gives. Raises AssertionError where they differ."""
    first, *others = (measured[f"threads {num_threads}"] for num_threads in NUM_THREADS)
    for other in others:
        require_equal("log_probabilities", first, other)
    return first


def measure_all() -> dict[str, Any]:
    """What is pinned, with the builds that this processor runs measured anew."""
    pinned = load("log_probabilities")
    for build in native_builds_here():
        pinned[build] = {name: of_all_threads(measure(build, name)) for name in QUANTIZATIONS}
    return pinned


if __name__ == "__main__":
    main(sys.argv[1])
