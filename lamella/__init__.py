"""lamella: an LLM inference engine for models that mix sliding-window and full attention."""

from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine, EngineStats
from lamella.engine.llm import LLM
from lamella.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    ForkedProcessError,
    InvariantError,
    LamellaError,
    ModelLoadError,
    RequestError,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "ForkedProcessError",
    "InvariantError",
    "LamellaError",
    "Logprob",
    "ModelLoadError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]
