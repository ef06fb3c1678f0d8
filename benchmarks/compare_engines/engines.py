"""How each engine is started: interpreter, driver, environment and settings."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_engines.preload import find_preload, given_preload
from lamella.errors import ConfigError
from lamella.model_executor.weights.gguf_header import read_gguf_header

DRIVERS = Path(__file__).with_name("drivers")
PACKAGE_ROOT = Path(__file__).parents[2]
QUANTIZATIONS = ("none", "int8", "w8a8", "gguf")
LLAMA_CPP_CACHES = ("split", "unified")
FP32 = "fp32"


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """One line of the tables. precision: FP32, or what the weights are reduced to. settings: for the driver.
    environment: variables that are set for it; None unsets one."""

    name: str
    precision: str
    command: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)

    def told_settings(self) -> dict[str, Any]:
        """What a report says: settings, and the variables that matter to speed."""
        variables = {name: value for name, value in self.environment.items() if value and name != "PYTHONPATH"}
        return {**self.settings, **variables}

    def full_environment(self) -> dict[str, str]:
        merged = {**os.environ, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the command line says of engines.

    model: folder in Hugging Face layout; lamella takes whatever it can load. max_model_len: tokens of the longest
    request. interpreters: engine -> program. quantizations: a lamella each, of QUANTIZATIONS; empty: one that is given
    no such argument. kv_cache_gib: KV memory for engines that are told how much. vllm_preload: None looks for it.
    llama_cpp_caches: a llama.cpp each, of LLAMA_CPP_CACHES: a buffer for each sequence unless they share a prefix, or
    one for all.
    """

    model: str
    num_threads: int
    max_model_len: int
    interpreters: Mapping[str, str | None] = field(default_factory=dict)
    quantizations: tuple[str, ...] = ()
    kv_cache_gib: int = 4
    gguf: str | None = None
    openvino_model: str | None = None
    vllm_preload: str | None = None
    llama_cpp_caches: tuple[str, ...] = ("split",)


def engine_setups(names: str, options: EngineOptions) -> list[EngineSetup]:
    """The setups of `names`, comma-separated, in their order; lamella is there once per quantization.

    Raises ConfigError for an engine that is not known, or that lacks its interpreter or its model.
    """
    setups = []
    for name in dict.fromkeys(names.split(",")):
        if name not in _MAKERS:
            raise ConfigError(f"engine {name!r} is not known; choose of {', '.join(_MAKERS)}")
        setups += _MAKERS[name](options)
    return setups


def _lamella(options: EngineOptions) -> list[EngineSetup]:
    return [_own_setup("lamella", options.model, options, quantization) for quantization in _quantizations(options)]


def _lamella_gguf(options: EngineOptions) -> list[EngineSetup]:
    gguf = _required(options.gguf, "lamella-gguf", "gguf", "a .gguf file")
    return [_own_setup("lamella-gguf", gguf, options, quantization) for quantization in _quantizations(options)]


def _quantizations(options: EngineOptions) -> tuple[str | None, ...]:
    for quantization in options.quantizations:
        if quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization {quantization!r} is not known; choose of {', '.join(QUANTIZATIONS)}")
    return tuple(dict.fromkeys(options.quantizations)) or (None,)


def _own_setup(name: str, model: str, options: EngineOptions, quantization: str | None) -> EngineSetup:
    is_reduced = quantization not in (None, "none")
    settings = _settings(options, model=model)
    if quantization is not None:
        settings["quantization"] = quantization
    return EngineSetup(
        name=f"{name}-{quantization}" if is_reduced else name,
        precision=str(quantization) if is_reduced else FP32,
        command=(sys.executable, str(DRIVERS / "lamella_driver.py")),
        settings=settings,
        # This lamella, whether it is installed there or not.
        environment={**_thread_variables(options), "PYTHONPATH": str(PACKAGE_ROOT)},
    )


def _vllm(options: EngineOptions) -> list[EngineSetup]:
    python = _interpreter("vllm", options)
    model = _hf_folder("vllm", options)
    preload = find_preload(Path(python)) if options.vllm_preload is None else given_preload(options.vllm_preload)
    variables: dict[str, str | None] = {
        **_foreign_variables(options),
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.num_threads - 1}" if options.num_threads > 1 else "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if preload.paths:
        variables["LD_PRELOAD"] = ":".join(map(str, preload.paths))
    command = (python, str(DRIVERS / "vllm_driver.py"))
    settings = {**_settings(options, model=model), "preloaded": preload.describe()}
    return [EngineSetup("vllm", FP32, command, settings, variables)]


def _transformers(options: EngineOptions) -> list[EngineSetup]:
    # A dependency of lamella, so its own interpreter will do.
    python = _interpreter("transformers", options, default=sys.executable)
    settings = _settings(options, model=_hf_folder("transformers", options))
    command = (python, str(DRIVERS / "transformers_driver.py"))
    return [EngineSetup("transformers", FP32, command, settings, _foreign_variables(options))]


def _openvino(options: EngineOptions) -> list[EngineSetup]:
    python = _interpreter("openvino", options)
    model = _required(options.openvino_model, "openvino", "openvino_model", "a folder that optimum-cli has exported")
    graph = Path(model) / "openvino_model.xml"
    if not graph.is_file():
        raise ConfigError(
            f"openvino_model={model!r} holds no openvino_model.xml; write one with: optimum-cli export openvino "
            "--task text-generation-with-past --weight-format int8 --model HF_FOLDER OUT"
        )
    settings = _settings(options, model=model)
    command = (python, str(DRIVERS / "openvino_driver.py"))
    return [EngineSetup("openvino", _graph_precision(graph), command, settings, _foreign_variables(options))]


def _llama_cpp(options: EngineOptions) -> list[EngineSetup]:
    python = _interpreter("llama.cpp", options)
    gguf = _required(options.gguf, "llama.cpp", "gguf", "a .gguf file")
    for cache in options.llama_cpp_caches:
        if cache not in LLAMA_CPP_CACHES:
            raise ConfigError(f"llama_cpp_cache {cache!r} is not known; choose of {', '.join(LLAMA_CPP_CACHES)}")
    return [
        EngineSetup(
            name="llama.cpp" if cache == "split" else f"llama.cpp-{cache}",
            precision=_gguf_precision(Path(gguf)),
            command=(python, str(DRIVERS / "llama_cpp_driver.py")),
            settings={**_settings(options, model=gguf), "kv_unified": cache == "unified"},
            environment=_foreign_variables(options),
        )
        for cache in dict.fromkeys(options.llama_cpp_caches)
    ]


_MAKERS: dict[str, Callable[[EngineOptions], list[EngineSetup]]] = {
    "lamella": _lamella,
    "lamella-gguf": _lamella_gguf,
    "vllm": _vllm,
    "transformers": _transformers,
    "openvino": _openvino,
    "llama.cpp": _llama_cpp,
}
ENGINES = tuple(_MAKERS)


def _settings(options: EngineOptions, *, model: str) -> dict[str, Any]:
    return {
        "model": str(Path(model).absolute()) if Path(model).exists() else model,
        "num_threads": options.num_threads,
        "max_model_len": options.max_model_len,
        "kv_cache_bytes": options.kv_cache_gib << 30,
    }


def _thread_variables(options: EngineOptions) -> dict[str, str | None]:
    return {"OMP_NUM_THREADS": str(options.num_threads), "MKL_NUM_THREADS": str(options.num_threads)}


def _foreign_variables(options: EngineOptions) -> dict[str, str | None]:
    # What this interpreter finds on its path is not made for that one.
    return {**_thread_variables(options), "PYTHONPATH": None, "PYTHONHOME": None, "HF_HUB_OFFLINE": "1"}


def _interpreter(name: str, options: EngineOptions, default: str | None = None) -> str:
    option = name.replace(".", "_").replace("-", "_") + "_python"
    given = options.interpreters.get(name) or default
    if given is None:
        raise ConfigError(
            f"engine {name!r} runs in an interpreter of its own, and none is given; pass the one that has it as "
            f"--{option.replace('_', '-')}"
        )
    found = shutil.which(given)
    if found is None:
        raise ConfigError(f"{option}={given!r} is no program that can be run; pass an interpreter that has {name}")
    # Absolute but not resolved: a virtual environment's interpreter is a link out of it.
    return os.path.abspath(found)


def _hf_folder(name: str, options: EngineOptions) -> str:
    if not (Path(options.model) / "config.json").is_file():
        raise ConfigError(
            f"model={options.model!r} is no folder with a config.json, which engine {name!r} needs; write one with "
            "benchmarks/make_hf_folder.py, or leave the engine out"
        )
    return options.model


def _required(value: str | None, engine: str, option: str, what: str) -> str:
    if value is None:
        raise ConfigError(f"engine {engine!r} needs {what}; pass it as --{option.replace('_', '-')}")
    if not Path(value).exists():
        raise ConfigError(f"{option}={value!r} does not exist; pass {what}")
    return value


def _gguf_precision(path: Path) -> str:
    from gguf import LlamaFileType

    file_type = read_gguf_header(path).metadata.get("general.file_type", -1)
    try:
        name = LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "GGUF"
    return FP32 if name == "F32" else name


def _graph_precision(graph: Path) -> str:
    """The narrowest number that the graph's constants are stored in."""
    types = set(re.findall(r'element_type="(\w+)"', graph.read_text(encoding="utf-8")))
    for stored, name in ((("i4", "u4"), "int4"), (("i8", "u8"), "int8"), (("f16", "bf16"), "fp16")):
        if types.intersection(stored):
            return name
    return FP32
