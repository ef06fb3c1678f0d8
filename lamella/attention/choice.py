"""Which attention backend runs: the one asked for, or the fastest that the device and the KV's layout allow.

A backend is imported when it is chosen: some need what is not installed everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from lamella.attention.contract import AttentionBackend
from lamella.errors import ConfigError
from lamella.kv_cache.spec import KVCacheSpec

logger = logging.getLogger(__name__)

BACKEND_NAMES = ("auto", "native", "triton", "xformers", "torch", "reference")


def choose_backend(
    name: str,
    device: torch.device,
    *,
    specs: Sequence[KVCacheSpec] = (),
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest that runs on `device` and can keep KV of `specs` in `dtype`
    and pages of `page_tokens`; the log says which and why.

    Raises ConfigError for a name that is not known, and for "native", "triton" and "xformers" where these cannot be
    used.
    """
    if name not in BACKEND_NAMES:
        raise ConfigError(f"attention_backend={name!r} is not known; choose one of {', '.join(BACKEND_NAMES)}")
    backend: AttentionBackend
    if name == "reference":
        from lamella.attention.reference import ReferenceBackend

        backend, reason = ReferenceBackend(), "asked for"
    elif name == "torch":
        backend, reason = _torch_backend(), "asked for"
    elif name == "xformers":
        problem = _xformers_problem(device) or _triton_problem(device, specs)
        if problem is not None:
            raise ConfigError(f"attention_backend='xformers' cannot be used: {problem}; 'auto' and 'torch' work")
        backend, reason = _xformers_backend(), "asked for"
    elif name == "triton" or device.type != "cpu":
        if name == "native":
            raise ConfigError(f"attention_backend='native' runs on the CPU, not on {device}; choose 'torch' or 'auto'")
        problem = _triton_problem(device, specs)
        if problem is None:
            backend, reason = _triton_backend(), f"for {device}"
        elif name == "triton":
            raise ConfigError(f"attention_backend='triton' cannot be used: {problem}; 'auto' and 'torch' work")
        else:
            backend, reason = _torch_backend(), f"not triton: {problem}"
    else:
        from lamella.attention.native_backend import NativeBackend, native_supports
        from lamella.native.attention import attention_kernels

        kernels = attention_kernels()
        problems = [native_supports(spec, dtype, page_tokens) for spec in specs]
        problem = next(filter(None, problems), None)
        if kernels is None:
            problem = (
                "there are no native kernels for this processor (they are compiled at installation, and "
                "LAMELLA_NATIVE=0 switches them off)"
            )
        if kernels is not None and problem is None:
            backend, reason = NativeBackend(kernels), f"kernels {kernels.path.name}"
        elif name == "native":
            raise ConfigError(f"attention_backend='native' cannot be used: {problem}; 'torch' and 'auto' work")
        else:
            backend, reason = _torch_backend(), f"not native: {problem}"
    logger.info("attention backend: %s (asked for %r on %s; %s)", backend.name, name, device, reason)
    return backend


def _torch_backend() -> AttentionBackend:
    from lamella.attention.torch_backend import TorchBackend

    return TorchBackend()


def _triton_problem(device: torch.device, specs: Sequence[KVCacheSpec]) -> str | None:
    """Why the triton kernels cannot run on `device` or keep KV of `specs`; None if they can."""
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        return (
            "without a GPU its kernels run only in Triton's interpreter, which is for tests; for that, set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    if device.type not in ("cpu", "cuda"):
        return f"its kernels run on CUDA and ROCm devices, not on {device}"
    from lamella.attention.triton.shapes import unsupported

    return next(filter(None, map(unsupported, specs)), None)


def _triton_backend() -> AttentionBackend:
    from lamella.attention.triton.backend import TritonBackend

    return TritonBackend()


def _xformers_problem(device: torch.device) -> str | None:
    """Why xformers cannot be used on `device`; None if it can. (What its masks cannot express, Triton's kernels do.)"""
    if device.type != "cuda":
        return f"its operators run on CUDA devices, not on {device}"
    try:
        import xformers.ops  # noqa: F401
    except ImportError as error:
        return f"xformers cannot be imported ({error}); pip install '.[xformers]' in a clone brings it"
    return None


def _xformers_backend() -> AttentionBackend:
    from lamella.attention.xformers_backend import XformersBackend

    return XformersBackend()
