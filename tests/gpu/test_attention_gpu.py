"""The attention kernels as compiled for the GPU at hand: bf16 products, real launches, no waiting for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_roofline import Workload
from gpu_attention.comparison import compare
from gpu_attention.peers import OTHERS, OURS
from gpu_attention.tile_choice import Trial
from gpu_attention.tile_trials import try_tiles
from gpu_attention.timing import Timer
from lamella import LLM, SamplingParams
from lamella.attention.contract import attend
from lamella.attention.triton.backend import TritonBackend
from tests.helpers.attention_cases import AttentionCase, Ragged, forget_memo, make_case, make_metadata
from tests.helpers.pairwise import pairwise
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.helpers.triton_cases import assert_like_reference, make_spec, on_device
from tests.helpers.triton_factors import FACTORS, check, label

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_every_pair_of_choices(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("rule", [("full", 0), ("window", 1024), ("chunk", 512)], ids=str)
def test_tiles_of_the_table_over_long_contexts(rule: tuple[str, int], head_dim: int, dtype: torch.dtype) -> None:
    spec = make_spec(*rule, num_kv_heads=2, k_dim=head_dim, v_dim=head_dim, itemsize_bytes=dtype.itemsize)
    requests = [Ragged(3000), Ragged(1023), Ragged(5), Ragged(2000, 150), Ragged(0, 70)]
    case = make_case(spec, requests, num_heads=8, page_tokens=16, dtype=dtype, with_sinks=True)
    assert_like_reference(case, TritonBackend())


def decode_alone(case: AttentionCase, requests: list[int]) -> torch.Tensor:
    """Outputs of some of the decode requests, over the arena as it is."""
    host = case.metadata
    metadata = make_metadata(
        page_tokens=host.page_tokens,
        num_decodes=len(requests),
        query_start=np.arange(len(requests) + 1),
        seq_lens=host.seq_lens_host[requests],
        first_blocks=host.first_blocks_host[requests],
        first_keys=host.first_keys_host[requests],
        block_tables=host.block_tables_host[requests],
        slot_mapping=np.full(len(requests), -1),
    )
    moved = on_device(dataclasses.replace(case, metadata=metadata, query=case.query[requests]))
    backend = TritonBackend()
    out = torch.empty_like(moved.query)
    backend.decode(moved.params, moved.cache(backend, moved.arena), moved.query, moved.metadata, out)
    return out.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", [("full", 0), ("window", 700)], ids=str)
def test_a_decoded_request_does_not_depend_on_the_batch(rule: tuple[str, int], dtype: torch.dtype) -> None:
    """Bit for bit, in batches whose launches differ."""
    spec = make_spec(*rule, num_kv_heads=2, k_dim=128, v_dim=128, itemsize_bytes=2)
    contexts = [4000, 17, 900, 2047, *range(100, 160)]
    case = make_case(spec, [Ragged(context) for context in contexts], num_heads=8, page_tokens=16, dtype=dtype)
    moved = on_device(case)
    together, arena = moved.run(TritonBackend())
    case = dataclasses.replace(case, arena=arena.cpu())
    for requests in ([0], [3], [2, 0], list(range(len(contexts)))[::-1]):
        assert torch.equal(decode_alone(case, requests), together.cpu()[requests])


@pytest.mark.parametrize("rule", [("full", 0), ("window", 33), ("chunk", 64)], ids=str)
def test_a_call_does_not_wait_for_the_device(rule: tuple[str, int], request: pytest.FixtureRequest) -> None:
    spec = make_spec(*rule, num_kv_heads=2, k_dim=64, v_dim=64, itemsize_bytes=2)
    requests = [Ragged(100), Ragged(31), Ragged(50, 9), Ragged(0, 20)]
    case = on_device(make_case(spec, requests, num_heads=4, page_tokens=16, dtype=torch.bfloat16, with_sinks=True))
    backend = TritonBackend()
    cache = case.cache(backend, case.arena)
    metadata = case.metadata

    def step() -> torch.Tensor:
        forget_memo(metadata)
        return attend(backend, case.params, cache, case.query, case.new_keys, case.new_values, metadata)

    expected = step()  # compiles
    request.getfixturevalue("no_waiting")
    actual = step()
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual, expected)


def generate(folder: Path, **arguments: Any) -> list[list[int]]:
    generator = np.random.default_rng(5)
    prompts = [generator.integers(6, 320, size=size).tolist() for size in (3, 40, 17, 90)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(
        str(folder),
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=2**21,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        check_invariants=True,
        **arguments,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_an_engines_greedy_tokens_are_the_references(tmp_path: Path) -> None:
    save_tiny_gemma(tmp_path, num_hidden_layers=3)
    expected = generate(tmp_path, attention_backend="reference", device="cpu")
    assert len({tuple(tokens) for tokens in expected}) == 4
    assert generate(tmp_path, attention_backend="triton", device="cuda") == expected


def test_the_benchmark_times_what_is_installed() -> None:
    """Torch's kernels always are; all that are must agree with ours."""
    spec = make_spec("window", 256, num_kv_heads=2, k_dim=64, v_dim=64, itemsize_bytes=2)
    others = [peer for peer in OTHERS if not peer.is_missing]
    timer = Timer(CUDA, num_warmups=1, num_repeats=3)
    for work in (Workload("decode", spec, 8, 4, 1000, 1), Workload("prefill", spec, 8, 2, 500, 300)):
        figures = compare(work, OURS, others, page_tokens=16, dtype=torch.bfloat16, device=CUDA, seconds=timer.seconds)
        assert [figure.peer for figure in figures] == ["triton", *(peer.name for peer in others)]
        assert [figure.problem for figure in figures] == [None] * len(figures)
        assert all(figure.seconds is not None and 1e-7 < figure.seconds < 1 for figure in figures)


def test_tiles_are_tried() -> None:
    from lamella.attention.triton.backend import device_arch
    from lamella.attention.triton.tuning import Tile

    fine, odd = Tile(64, 32, 4, 2), Tile(64, 48, 4, 1)  # tiles have powers of two
    trials = try_tiles(
        "prefill",
        [fine, odd],
        head_dim=64,
        itemsize_bytes=2,
        target=device_arch(CUDA),
        timer=Timer(CUDA, num_warmups=1, num_repeats=2),
    )
    assert trials[0] == Trial(fine, trials[0].seconds)
    assert len(trials[0].seconds) == 2
    assert min(trials[0].seconds) > 0
    assert trials[1].problem is not None
