"""Sampling parameters, where vLLM has them."""

from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.structured.params import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
