"""Which sampler goes with a device."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from lamella.model_executor.sampling.sampler import Sampler

if TYPE_CHECKING:
    from lamella.model_executor.sampling.device.device_sampler import DeviceSampler


def choose_sampler(device: torch.device) -> Sampler | DeviceSampler:
    """DeviceSampler on CUDA and ROCm where triton is installed, else Sampler, which decides on the host."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lamella.model_executor.sampling.device.device_sampler import DeviceSampler

        return DeviceSampler()
    return Sampler()
