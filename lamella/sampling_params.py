"""Sampling parameters, where vLLM has them."""

from lamella.engine.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["RequestOutputKind", "SamplingParams"]
