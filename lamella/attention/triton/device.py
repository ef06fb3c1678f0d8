"""The device that kernels run on."""

from __future__ import annotations

import functools

import torch
import triton

PROGRAMS_PER_PROCESSOR = 4


@functools.cache
def device_arch(device: torch.device) -> str:
    """ "sm_90", "gfx942", ...; "default" where kernels are interpreted."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return "default"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def default_programs(device: torch.device) -> int:
    """How many programs fill the device."""
    if device.type != "cuda":
        return PROGRAMS_PER_PROCESSOR
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
