"""lamella: an LLM inference engine for models that mix sliding-window and full attention."""

from lamella.engine.async_engine import AsyncEngine
from lamella.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine, EngineStats
from lamella.engine.llm import LLM
from lamella.engine.lora_request import LoRARequest
from lamella.engine.offline_stream import OutputStream
from lamella.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from lamella.engine.prompts import Prompt as PromptType
from lamella.engine.prompts import TextPrompt, TokensPrompt
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.saved_prefixes import PrefixFile
from lamella.engine.scores import ScoreOutput
from lamella.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    EngineCrashedError,
    ForkedProcessError,
    InterruptedRequestError,
    InvariantError,
    LamellaError,
    ModelLoadError,
    PrefixFileError,
    RequestError,
    RequestFailedError,
    UnsupportedArgumentError,
)
from lamella.kv_cache.pinned_prefixes import PinnedPrefix

__version__ = "0.1.0"

# vLLM's names.
EngineArgs = EngineConfig
LLMEngine = Engine
AsyncEngineArgs = EngineConfig
AsyncLLMEngine = AsyncEngine

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineArgs",
    "EngineClosedError",
    "EngineConfig",
    "EngineCrashedError",
    "EngineStats",
    "ForkedProcessError",
    "InterruptedRequestError",
    "InvariantError",
    "LLMEngine",
    "LamellaError",
    "LoRARequest",
    "Logprob",
    "ModelLoadError",
    "OutputStream",
    "PinnedPrefix",
    "PrefixFile",
    "PrefixFileError",
    "PromptType",
    "RequestError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedArgumentError",
    "__version__",
]
