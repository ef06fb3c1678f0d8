"""Sampling parameters, where vLLM has them."""

from lamella.engine.beam_search import BeamSearchParams
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.structured.params import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
