"""Every kernel on every workload: compared with ours first, then timed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch

from attention_roofline import Workload
from gpu_attention.batches import NAMED_WORKLOADS, make_batch, needed_bytes
from gpu_attention.peers import OTHERS, OURS, Call, Peer
from gpu_attention.report import Figure
from gpu_attention.timing import Ceilings, Timer
from lamella.errors import ConfigError

# Root of the mean squared difference, over that of the outputs: roundings to 16 bits make some tenths of a per cent;
# a window of 1,024 that is one key too short makes three per cent.
MAX_DIFFERENCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-3}


def check_device(device: torch.device) -> None:
    """Raises ConfigError where there is no such GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device}: torch {torch.__version__} sees no such GPU; kernels are timed on CUDA or ROCm "
            "devices, and --device cpu measures the CPU's backends"
        )


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Infinite where shapes differ or something is no number."""
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    expected = expected.double()
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def compare(
    work: Workload,
    ours: Peer,
    others: Sequence[Peer],
    *,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: Callable[[Call], float],
) -> list[Figure]:
    """One figure per kernel. A kernel that cannot do the workload, or gives other outputs than `ours`, is not timed,
    and its figure says why. `seconds` times a call."""
    batch = make_batch(work, page_tokens=page_tokens, dtype=dtype, device=device)

    def figure(peer: Peer, *, seconds: float | None = None, problem: str | None = None) -> Figure:
        return Figure(work.name, peer.name, needed_bytes(work), work.num_flops, seconds, problem)

    our_call = ours.prepare(batch)
    expected = our_call().clone()
    figures = [figure(ours, seconds=seconds(our_call))]
    for peer in others:
        try:
            call = peer.prepare(batch)
            difference = relative_difference(call(), expected)
            if difference > MAX_DIFFERENCE[dtype]:
                figures.append(figure(peer, problem=f"its outputs differ from {ours.name}'s by {difference:.1%}"))
            else:
                figures.append(figure(peer, seconds=seconds(call)))
        except Exception as error:  # a peer's failure is a finding, not the end of the run
            first_line = (str(error) or "no message").splitlines()[0]
            figures.append(figure(peer, problem=f"{type(error).__name__}: {first_line}"))
    return figures


def machine_line(device: torch.device) -> str:
    """Card, versions: what a figure depends on beside the code."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return (
        f"{properties.name}, {properties.total_memory >> 30} GiB; torch {torch.__version__}, {runtime}, triton "
        f"{triton.__version__}, Python {platform.python_version()}"
    )


def run(
    names: Sequence[str], *, page_tokens: int, dtype: torch.dtype, device: torch.device, num_repeats: int
) -> tuple[Ceilings, list[Figure], list[str]]:
    """(what the GPU reaches, a figure per kernel that is installed and workload, names of kernels that are not).

    names: of NAMED_WORKLOADS, none for all. Raises ConfigError for a name that is not one, for a dtype not of 16 bits,
    and where there is no GPU.
    """
    for name in names:
        if name not in NAMED_WORKLOADS:
            raise ConfigError(
                f"workload {name!r} is not one for GPUs; choose from {', '.join(NAMED_WORKLOADS)}, or leave it out "
                "for all"
            )
    if dtype.itemsize != 2:
        raise ConfigError(f"KV in {dtype}: the workloads for GPUs have 16 bits; choose bfloat16 or float16")
    check_device(device)
    timer = Timer(device, num_warmups=3, num_repeats=num_repeats)
    others = [peer for peer in OTHERS if not peer.is_missing]
    missing = [peer.name for peer in OTHERS if peer.is_missing]
    figures = []
    with torch.inference_mode():
        ceilings = timer.ceilings()
        for name in names or NAMED_WORKLOADS:
            figures += compare(
                NAMED_WORKLOADS[name],
                OURS,
                others,
                page_tokens=page_tokens,
                dtype=dtype,
                device=device,
                seconds=timer.seconds,
            )
            torch.cuda.empty_cache()
    return ceilings, figures, missing
