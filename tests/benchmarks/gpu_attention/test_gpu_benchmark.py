"""The GPU benchmark of attention, as far as a CPU can tell: its batches and counts, the kernels that run here too, the
comparison before a kernel is timed, the report."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attention_roofline import WORKLOADS, Workload
from gpu_attention.batches import NAMED_WORKLOADS, Batch, make_batch, needed_bytes
from gpu_attention.comparison import check_device, compare, relative_difference, run
from gpu_attention.peers import (
    OTHERS,
    OURS,
    Call,
    Peer,
    backend_call,
    flex_attention,
    torch_sdpa,
    triton,
)
from gpu_attention.report import Figure, markdown
from gpu_attention.timing import Ceilings
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.errors import ConfigError
from tests.helpers.triton_cases import make_spec

CPU = torch.device("cpu")
PAGE = 8
RULES = [("full", 0), ("window", 1), ("window", 9), ("chunk", 12)]
SIZES = {"decode": (3, 21, 1), "first decode": (2, 0, 1), "prefill": (2, 0, 13), "later prefill": (2, 17, 11)}


def make_work(rule: tuple[str, int], sizes: str, **shape: int) -> Workload:
    spec = make_spec(*rule, **({"num_kv_heads": 2, "k_dim": 16, "v_dim": 16} | shape))
    return Workload("a workload", spec, 4, *SIZES[sizes])


def sees(rule: tuple[str, int], query: int, key: int) -> bool:
    name, reach = rule
    if key > query:
        return False
    return {"full": True, "window": query - key < reach, "chunk": not reach or query // reach == key // reach}[name]


@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_counts_are_those_of_every_pair(rule: tuple[str, int], sizes: str) -> None:
    work = make_work(rule, sizes, k_dim=24, v_dim=16)
    num_requests, num_prior, num_new = SIZES[sizes]
    flops = 0
    moved = set()  # (request, what, position): a row of each KV head, or of each query head
    for request in range(num_requests):
        for query in range(num_prior, num_prior + num_new):
            moved.add((request, "query and output", query))
            for key in range(query + 1):
                if sees(rule, query, key):
                    flops += 4 * (2 * 24 + 2 * 16)  # four query heads: a product with K, one with V
                    moved.add((request, "K and V", key))
    num_bytes = sum((4 if what == "query and output" else 2) * (24 + 16) * 4 for _, what, _ in moved)
    assert work.num_flops == flops
    assert needed_bytes(work) == num_bytes


def test_the_roofline_and_the_benchmark_time_the_same_workloads() -> None:
    assert set(WORKLOADS) <= set(NAMED_WORKLOADS.values())
    assert len({work.name for work in NAMED_WORKLOADS.values()}) == len(NAMED_WORKLOADS) == 8
    for work in NAMED_WORKLOADS.values():
        assert needed_bytes(work) <= work.num_bytes  # which has decode's partial results, too


@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_batchs_dense_keys_are_those_in_its_pages(rule: tuple[str, int], sizes: str) -> None:
    work = make_work(rule, sizes)
    batch = make_batch(work, page_tokens=PAGE, dtype=torch.float32, device=CPU)
    keys, values = batch.visible_keys()
    num_requests, num_prior, num_new = SIZES[sizes]
    seen = sorted({k for q in range(num_prior, num_prior + num_new) for k in range(q + 1) if sees(rule, q, k)})
    assert keys.shape[:2] == values.shape[:2] == (num_requests, len(seen))
    pages_of_others: set[int] = set()
    for request in range(num_requests):
        table = batch.metadata.block_tables_host[request].tolist()
        assert not pages_of_others & set(table)
        pages_of_others |= set(table)
        for column, position in enumerate(seen):
            page = table[position // PAGE - seen[0] // PAGE]
            assert torch.equal(keys[request, column], batch.cache.keys[page, position % PAGE])
            assert torch.equal(values[request, column], batch.cache.values[page, position % PAGE])
    expected = [[sees(rule, q, k) for k in seen] for q in range(num_prior, num_prior + num_new)]
    assert batch.visible().tolist() == expected


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("prepare", [torch_sdpa, flex_attention])
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torchs_kernels_give_the_references_outputs(rule: tuple[str, int], sizes: str, prepare: Any) -> None:
    batch = make_batch(make_work(rule, sizes), page_tokens=PAGE, dtype=torch.float32, device=CPU)
    expected = backend_call(ReferenceBackend(), batch)()
    torch.testing.assert_close(prepare(batch)(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", ["decode", "later prefill"])
def test_our_kernels_do_too(sizes: str) -> None:
    batch = make_batch(make_work(("window", 9), sizes), page_tokens=PAGE, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(triton(batch)(), backend_call(ReferenceBackend(), batch)(), rtol=1e-5, atol=1e-5)


def reference(batch: Batch) -> Call:
    return backend_call(ReferenceBackend(), batch)


def one_key_short(batch: Batch) -> Call:
    """A window that is one key too short."""
    narrower = make_spec("window", 8, num_kv_heads=2)
    call = backend_call(TorchBackend(), batch)
    out = call()
    TorchBackend().prefill(
        type(batch.params)(narrower, batch.params.num_heads, batch.params.scale),
        batch.cache,
        batch.query,
        batch.metadata,
        out,
    )
    return lambda: out


def off_by(factor: float) -> Callable[[Batch], Call]:
    """The reference's outputs, all too large."""
    return lambda batch: lambda: factor * reference(batch)()


def unable(batch: Batch) -> Call:
    raise NotImplementedError("takes no such heads\nand more lines")


def fails_when_called(batch: Batch) -> Call:
    def call() -> torch.Tensor:
        raise RuntimeError

    return call


def test_only_kernels_with_our_outputs_are_timed() -> None:
    work = make_work(("window", 9), "later prefill")
    others = [
        Peer("good", "torch", torch_sdpa),
        Peer("rounded", "torch", off_by(1.0005)),
        Peer("off", "torch", off_by(1.002)),
        Peer("short", "torch", one_key_short),
        Peer("unable", "torch", unable),
        Peer("failing", "torch", fails_when_called),
    ]
    timed = []

    def seconds(call: Call) -> float:
        timed.append(call())
        return float(len(timed))

    ours = Peer("ours", "torch", reference)
    figures = compare(work, ours, others, page_tokens=PAGE, dtype=torch.float32, device=CPU, seconds=seconds)
    assert len(timed) == 3
    assert [(figure.peer, figure.seconds) for figure in figures] == [
        ("ours", 1.0),
        ("good", 2.0),
        ("rounded", 3.0),
        ("off", None),
        ("short", None),
        ("unable", None),
        ("failing", None),
    ]
    problems = [figure.problem or "" for figure in figures]
    assert problems[:4] == ["", "", "", "its outputs differ from ours's by 0.2%"]
    assert problems[4].startswith("its outputs differ from ours's by ")
    assert problems[5:] == ["NotImplementedError: takes no such heads", "RuntimeError: no message"]
    assert {(figure.num_bytes, figure.num_flops) for figure in figures} == {(needed_bytes(work), work.num_flops)}


def test_relative_difference() -> None:
    expected = torch.tensor([3.0, -4.0])
    assert relative_difference(expected, expected) == 0
    assert relative_difference(torch.tensor([3.0, -3.0]), expected) == pytest.approx(0.2)
    assert relative_difference(torch.tensor([3.0, float("nan")]), expected) == float("inf")
    assert relative_difference(torch.tensor([3.0]), expected) == float("inf")


def test_the_report() -> None:
    counts = {"num_bytes": 48_000_000, "num_flops": 3_000_000_000}
    figures = [
        Figure("decode", "triton", **counts, seconds=20e-6),
        Figure("decode", "other", **counts, seconds=1.5e-3),
        Figure("decode", "third", **counts, problem="ValueError: no"),
    ]
    assert markdown("A card", Ceilings(4e12, 6e14), figures, ["flash-attn", "xformers"]) == (
        "A card\n"
        "\n"
        "Ceilings, measured in the same run: a copy moves 4,000 GB/s, a bf16 matrix product does 600 TFLOP/s.\n"
        "\n"
        "| workload | kernel | µs | GB/s | of a copy | TFLOP/s | of a product |\n"
        "|---|---|---|---|---|---|---|\n"
        "| decode | triton | 20.0 | 2,400 | 60% | 150.0 | 25% |\n"
        "| decode | other | 1,500.0 | 32 | 1% | 2.0 | 0% |\n"
        "\n"
        "Not timed:\n"
        "\n"
        "- third, decode: ValueError: no\n"
        "\n"
        "Not installed: flash-attn, xformers."
    )


def test_which_kernels_are_installed() -> None:
    assert not OURS.is_missing
    assert Peer("none", "lamella_has_no_such_module", unable).is_missing
    assert {"torch SDPA", "FlexAttention", "xformers", "flash-attn", "FlashInfer", "vLLM flash-attn"} == {
        peer.name for peer in OTHERS
    }


def test_what_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options: dict[str, Any] = {"page_tokens": 16, "device": torch.device("cuda"), "num_repeats": 1}
    with pytest.raises(ConfigError, match="sees no such GPU"):
        run([], dtype=torch.bfloat16, **options)
    with pytest.raises(ConfigError, match="'decode-64-window' is not one for GPUs; choose from gemma-27b-decode-w"):
        run(["decode-64-window"], dtype=torch.bfloat16, **options)
    with pytest.raises(ConfigError, match="choose bfloat16 or float16"):
        run([], dtype=torch.float32, **options)
    with pytest.raises(ConfigError, match="--device cpu measures"):
        check_device(torch.device("mps"))


def test_the_scripts_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script = Path(__file__).parents[3] / "benchmarks" / "benchmark_attention.py"
    main = runpy.run_path(str(script))["main"]
    for arguments, message in (
        (["--device", "cuda"], "Error: --device cuda: torch"),
        (["--device", "gpu"], "Error: --device 'gpu' is not a device"),
        (["--workload", "llama-8b-prefill-full"], "is not one for the CPU; choose from decode-64-window"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        assert message in result.output
