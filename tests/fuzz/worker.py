"""A process that loads mutants one after another and says what it found.

Reads "begin", when the base folder is there, and then numbers from its standard input. Writes one JSON object a line:
what it is about to try, so that a crash has a name; that loading is over, with the seconds it took; and the verdict.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine
from lamella.engine.model_setup import LoadedEngine, load_engine
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import CapacityError, ModelLoadError, RequestError
from tests.fuzz import families, oracle, planted
from tests.fuzz.mutations import FAMILY_FORMATS, Mutant, make_mutant, remove_mutant

MAX_GROWTH_BYTES = 1 << 30
MAX_DIFFERENCE = 1e-3  # of log-probabilities; rounding makes less than 1e-4


class Checker:
    """Loads mutants of the models in `base` and compares each with what other readers find.

    say: takes what is to be told. faults: number -> the fault of `planted.py` to commit there.
    """

    def __init__(self, base: Path, scratch: Path, say: Callable[..., None], faults: Mapping[int, str]) -> None:
        self._base, self._scratch, self._say, self._faults = base, scratch, say, faults
        # What is loaded at the first use is no growth.
        for name in ("hf", "gguf/model.gguf"):
            self._load(base / name, "hf")
        for name in FAMILY_FORMATS:
            mutant = Mutant(-1, name, base / name, "not changed")
            problem = self._wrong(mutant, self._load(model_path(name, base / name), name))
            assert problem is None, f"{name}, not changed: {problem}"
        self._gguf_fields = oracle.GgufFile(base / "gguf" / "model.gguf").tokenizer_fields()
        self._gguf_ids = oracle.gguf_ids(base / "gguf" / "model.gguf")
        self._folder_answers = {name: read(base / "hf") for name, read in _FOLDER_READERS.items()}

    def check(self, number: int) -> None:
        mutant = make_mutant(self._base, number, self._scratch / str(number))
        self._say(number=number, trying=mutant.note)
        loaded, refusal, problem = None, None, None
        fault = self._faults.get(number, "")
        started = time.perf_counter()
        limit = data_bytes() + MAX_GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        try:
            if fault in planted.BEFORE:
                planted.BEFORE[fault]()
            loaded = self._load(model_path(mutant.format, mutant.folder), mutant.format)
        except (ModelLoadError, CapacityError) as error:
            refusal = f"{type(error).__name__}: {error}"
        except BaseException as error:
            problem = f"raised {type(error).__name__}: {error!s:.300} at {where(error)}"
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._say(number=number, seconds=time.perf_counter() - started)
        if loaded is not None:
            if fault in planted.AFTER:
                planted.AFTER[fault](loaded)
            problem = self._wrong(mutant, loaded)
        self._say(number=number, outcome="loaded" if loaded else "refused" if refusal else "raised", problem=problem,
                  refusal=refusal)  # fmt: skip
        remove_mutant(mutant)

    def _load(self, path: Path, kind: str) -> LoadedEngine:
        try:
            return load_engine(self._config(path, kind))
        finally:
            shutil.rmtree(self._scratch / "cache", ignore_errors=True)

    def _config(self, path: Path, kind: str) -> EngineConfig:
        return EngineConfig(
            model=str(path),
            # Variants that native layers have not are compared where whole answers are, and refused where configs are.
            model_impl="auto" if kind in FAMILY_FORMATS else "native",
            kv_cache_memory_bytes=4 << 20,
            max_model_len="auto",
            attention_backend="torch",
            device="cpu",
            cache_dir=str(self._scratch / "cache"),
        )

    def _wrong(self, mutant: Mutant, loaded: LoadedEngine) -> str | None:
        """What of a loaded model is not what other readers find in the same files."""
        try:
            if mutant.format in FAMILY_FORMATS:
                return _different_scores(
                    mutant, loaded, self._config(model_path(mutant.format, mutant.folder), mutant.format)
                )
            return self._first_difference(mutant, loaded)
        except Exception as error:
            return f"loaded, but another reader refuses: {type(error).__name__}: {error!s:.200} at {where(error)}"

    def _first_difference(self, mutant: Mutant, loaded: LoadedEngine) -> str | None:
        tokenizer = loaded.tokenizer
        answers = self._gguf_answers(mutant) if mutant.format == "gguf" else self._answers(mutant)
        for name, value in answers["sampling"].items():
            if getattr(loaded.default_params, name) != value:
                return f"{name} is {getattr(loaded.default_params, name)}, wanted {value}"
        return (
            _different_config(loaded.model_config, answers["config"])
            or _different_ends(loaded, answers["ends"])
            or _different_weights(loaded, answers["weights"])
            or _different_tokens(tokenizer, answers["ids"])
            or _different_chat(tokenizer, answers["chat"])
        )

    def _answers(self, mutant: Mutant) -> dict[str, Any]:
        """What other readers find in the mutant's folder; files that were not changed were read before."""
        changed = _BEARS_ON[mutant.format]
        return {**self._folder_answers, **{name: _FOLDER_READERS[name](mutant.folder) for name in changed}}

    def _gguf_answers(self, mutant: Mutant) -> dict[str, Any]:
        path = mutant.folder / "model.gguf"
        file = oracle.GgufFile(path)
        same_text = file.tokenizer_fields() == self._gguf_fields
        return {
            "config": file.config(),
            "ends": file.end_tokens(),
            "weights": file.weights(),
            "sampling": {},
            "ids": self._gguf_ids if same_text else oracle.gguf_ids(path),
            "chat": None,
        }


_FOLDER_READERS: dict[str, Any] = {
    "config": oracle.folder_config,
    "ends": oracle.folder_end_tokens,
    "sampling": oracle.folder_sampling,
    "weights": oracle.folder_weights,
    "ids": lambda folder: oracle.FolderTokenizer(folder).ids(),
    "chat": lambda folder: oracle.FolderTokenizer(folder).chat,
}
_BEARS_ON = {
    "config": ("config", "ends", "sampling"),
    "index": ("weights",),
    "safetensors": ("weights",),
    "tokenizer": ("ids", "chat"),
}


# What the oracle says once and layers say each for itself.
_OF_EVERY_LAYER: dict[str, Callable[[Any], Any]] = {
    "intermediate_size": lambda layer: layer.mlp.width,
    "num_heads": lambda layer: layer.attention.num_heads,
    "num_kv_heads": lambda layer: layer.attention.num_kv_heads,
    "head_dim": lambda layer: _same(layer.attention.k_dim, layer.attention.v_dim, layer.attention.rotary.dim),
    "query_scale": lambda layer: layer.attention.scale,
}


def _same(*values: int) -> Any:
    """The one value that all are, else all of them."""
    return values[0] if len(set(values)) == 1 else values


def _different_config(found: Any, wanted: dict[str, Any]) -> str | None:
    for name, value in wanted.items():
        if name == "layers":
            ours: Any = [_layer_fields(layer.attention) for layer in found.layers]
        elif name in _OF_EVERY_LAYER:
            each = {_OF_EVERY_LAYER[name](layer) for layer in found.layers}
            ours = next(iter(each)) if len(each) == 1 else each
        else:
            ours = getattr(found, name)
        if ours != value:
            return f"{name} is {ours}, wanted {value}"
    return None


def _layer_fields(attention: Any) -> tuple[Any, ...]:
    return attention.kind, attention.window_tokens, attention.rotary.theta, attention.rotary.position_divisor


def _different_ends(loaded: LoadedEngine, wanted: set[int]) -> str | None:
    found = set(loaded.model_config.eos_token_ids)
    # The tokenizer's own end token may have joined.
    if not wanted <= found <= wanted | {loaded.tokenizer.eos_token_id}:
        return f"end tokens are {found}, wanted {wanted}"
    return None


def _different_weights(loaded: LoadedEngine, wanted: dict[str, np.ndarray]) -> str | None:
    found = {name: tensor.float().numpy() for name, tensor in loaded.runner.model.model.tensors.items()}
    if found.keys() != wanted.keys():
        return f"parameters differ: {sorted(found.keys() ^ wanted.keys())[:5]}"
    for name, values in wanted.items():
        if values.shape != found[name].shape or not np.array_equal(values, found[name], equal_nan=True):
            return f"{name} has other values"
    return None


def model_path(kind: str, folder: Path) -> Path:
    return folder / "model.gguf" if "gguf" in kind else folder


class _Ready(Engine):
    """An engine of what was loaded before."""

    def __init__(self, config: EngineConfig, loaded: LoadedEngine) -> None:
        self._ready = loaded
        super().__init__(config)

    def _load(self, shows_progress: bool) -> LoadedEngine:
        return self._ready


def _different_scores(mutant: Mutant, loaded: LoadedEngine, config: EngineConfig) -> str | None:
    """Of the likeliest tokens after a prompt, and after one token more."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=8)
    engine = _Ready(config, loaded)
    try:
        engine.add_request("0", {"prompt_token_ids": families.PROMPT}, params)
    except (CapacityError, RequestError):
        return None  # a model of shorter texts or fewer tokens
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (completion,) = outputs[-1].outputs
    tokens = [*families.PROMPT, *completion.token_ids]
    if completion.finish_reason == "error":
        tokens.append(families.PROMPT[0])
    wanted = families.expected_scores(mutant.format, mutant.folder, tokens, max(1, len(completion.token_ids)))
    if completion.finish_reason == "error":
        return f"no token: {completion.stop_reason}" if torch.isfinite(wanted).all() else None
    for row, scores in zip(completion.logprobs, wanted, strict=True):
        for token, entry in row.items():
            score = float(scores[token])
            if not abs(entry.logprob - score) < MAX_DIFFERENCE * max(1.0, abs(score)):
                return f"the log-probability of {token} is {entry.logprob}, wanted {score}"
    return None


def _different_tokens(tokenizer: Any, wanted: list[list[int]]) -> str | None:
    for text, ids in zip(oracle.TEXTS, wanted, strict=True):
        found = list(tokenizer.encode(text))
        if found != ids:
            return f"tokens of {text!r:.30} are {found}, wanted {ids}"
    return None


def _different_chat(tokenizer: Any, theirs: Any) -> str | None:
    if theirs is None:
        return None
    for messages in oracle.MESSAGES:
        try:
            found = tokenizer.apply_chat_template(messages)
        except RequestError:
            continue
        wanted = theirs(messages)
        if wanted is not None and found != wanted:
            return f"chat is {found!r:.100}, wanted {wanted!r:.100}"
    return None


def where(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "lamella" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmData")


def main() -> None:
    # What libraries print must not come between.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    torch.set_num_threads(1)
    faults = {int(number): fault for number, fault in json.loads(sys.argv[3]).items()}
    sys.stdin.readline()
    checker = Checker(Path(sys.argv[1]), Path(sys.argv[2]), say, faults)
    say(ready=True)
    for line in sys.stdin:
        checker.check(int(line))


if __name__ == "__main__":
    main()
