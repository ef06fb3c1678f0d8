"""What a step launches, and the bytes that it would send to a device: two requests on the native kernels (Gemma 3
270M) and on Triton's in the interpreter (as many layers of each kind with the same windows, but narrow ones: neither
launches nor bytes depend on widths), counted on the CPU.

    python -m tests.pins.steps native    # or triton: JSON; in a process of its own, for the interpreter is a switch
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lamella import LLM, SamplingParams
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma
from tests.pins.places import DeviceTables, ModelRunner, NativeLibrary, PackedShape

BACKENDS = ("native", "triton")
PROMPT_LENGTHS = (34, 21)
ENGINE = {
    "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 32 * 2**20
}  # fmt: skip
COPIES = ("to_device", "_to_device")  # functions that bring an array of the host to a device
INT64_BYTES = 8


def measure(backend: str) -> dict[str, Any]:
    """What `main` prints."""
    environment = {name: value for name, value in os.environ.items() if name != "LAMELLA_NATIVE"}
    environment["TRITON_INTERPRET"] = "1" if backend == "triton" else "0"
    command = [sys.executable, "-m", "tests.pins.steps", backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def measure_all() -> dict[str, Any]:
    return {backend: measure(backend) for backend in BACKENDS}


class StepCounts(TorchDispatchMode):
    """Counts, within `with`, operations of torch that make or write a tensor, kernels, and bytes that `COPIES` take.
    kernels: by name, those of the native library and of Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.num_operations = self.num_copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += not func.is_view
        return result

    def to_json(self, plan: Any, changes: Any) -> dict[str, Any]:
        """packed_bytes: all arrays of the plan with what changed in the block tables, which go to a device in one
        copy."""
        return {
            "tokens": len(plan.token_ids),
            "requests": len(plan.seq_lens),
            "kernels": dict(sorted(self.kernels.items())),
            "num_kernels": self.kernels.total(),
            "num_torch_operations": self.num_operations,
            "packed_bytes": PackedShape.of(plan, changes).num_entries * INT64_BYTES,
            "other_copied_bytes": self.num_copied_bytes,
        }


class Watch:
    """Stands before the runner and all that launches, for the life of this process."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._counts: StepCounts | None = None
        self._tables: DeviceTables | None = None
        self._stand_before(NativeLibrary, "function", self._native)
        self._stand_before(ModelRunner, "launch", self._step)

    def watch_triton(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self._stand_before(InterpretedFunction, "run", self._triton)

    def watch_copies(self) -> None:
        """In every module that is there by now."""
        for module in [module for name, module in sys.modules.items() if name.startswith("lamella.")]:
            for name in COPIES:
                if hasattr(module, name):
                    self._stand_before(module, name, self._copy)

    def _stand_before(self, owner: Any, name: str, instead: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: instead(original, *args, **kwargs))

    def _changes(self, runner: Any, plan: Any) -> Any:
        """What the plan changes in tables that a device would have."""
        if self._tables is None:
            self._tables = DeviceTables(torch.device("cpu"), runner.layout)
            blocks = -(-ENGINE["max_model_len"] // runner.layout.page_tokens)
            self._tables.reserve(ENGINE["max_num_seqs"], [blocks] * len(plan.groups))
        changes = self._tables.changes(plan)
        self._tables.write(*(torch.from_numpy(array) for array in changes))
        return changes

    def _native(self, original: Any, library: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        function = original(library, name, *args, **kwargs)

        def counted(*arguments: Any) -> Any:
            if self._counts is not None:
                self._counts.kernels[name] += 1
            return function(*arguments)

        return counted

    def _triton(self, original: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if self._counts is not None:
            self._counts.kernels[kernel.fn.__name__] += 1
        with _disable_current_modes():
            return original(kernel, *args, **kwargs)

    def _copy(self, original: Any, array: Any, device: torch.device) -> Any:
        if self._counts is not None:
            self._counts.num_copied_bytes += array.nbytes
        return original(array, device)

    def _step(self, original: Any, runner: Any, plan: Any) -> Any:
        with StepCounts() as self._counts:
            launched = original(runner, plan)
        self.steps.append(self._counts.to_json(plan, self._changes(runner, plan)))
        self._counts = None
        return launched


def _model(backend: str, folder: str) -> str:
    if backend == "native":
        return "demo:gemma-3-270m"
    save_tiny_gemma(
        Path(folder), num_hidden_layers=18, sliding_window_pattern=6, sliding_window=512, num_key_value_heads=1
    )
    return folder


def main(backend: str) -> None:
    torch.set_num_threads(1)
    watch = Watch()
    if backend == "triton":
        watch.watch_triton()
    generator = np.random.default_rng(3)
    prompts = [generator.integers(6, VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with (
        TemporaryDirectory() as folder,
        LLM(_model(backend, folder), attention_backend=backend, device="cpu", dtype="float32", **ENGINE) as llm,
    ):
        assert llm.engine.attention_backend == backend
        watch.watch_copies()
        llm.generate(prompts, params, use_tqdm=False)
    prefill, decode = watch.steps
    assert (prefill["tokens"], decode["tokens"]) == (sum(PROMPT_LENGTHS), len(PROMPT_LENGTHS))
    print(json.dumps({"prefill": prefill, "decode": decode}))


if __name__ == "__main__":
    main(sys.argv[1])
