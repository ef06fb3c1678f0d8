"""CUDA graphs against eager steps, and the memory that an engine takes of a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lamella import CapacityError, Engine, SamplingParams
from tests.helpers.graph_engine import GRAPH_STEPS, MAX_MODEL_LEN, CheckedReplays, make_engine, save_model, serve

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_equal_eager_steps(folder: Path, dtype: str) -> None:
    """Bit for bit. In float32 the tokens are the reference's too, and those of an engine without graphs. (In bfloat16
    the products of a padded batch may be rounded otherwise than those of its requests alone.)"""
    with make_engine(folder, device="cuda", dtype=dtype) as engine:
        checked = CheckedReplays(engine.inspect().runner)
        tokens = serve(engine)
    assert checked.steps == GRAPH_STEPS
    if dtype == "float32":
        with make_engine(folder, "reference") as engine:
            assert serve(engine) == tokens
        with make_engine(folder, device="cuda", enforce_eager=True) as engine:
            assert engine.inspect().runner.graphs is None
            assert serve(engine) == tokens


def test_a_graph_step_waits_for_nothing(folder: Path) -> None:
    with make_engine(folder, device="cuda") as engine:
        loaded = engine.inspect()
        for request_id in "abc":
            engine.add_request(request_id, {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=9))
        engine.step()
        plan = loaded.scheduler.schedule()
        with torch.inference_mode():
            torch.cuda.set_sync_debug_mode("error")
            try:
                hidden = loaded.runner._run_graph(plan, loaded.runner.graphs.size_for(plan))
                loaded.runner.model.logits(hidden)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert hidden.isfinite().all()


def used_and_total_bytes() -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free, total


def test_memory_stays_within_utilization(folder: Path) -> None:
    """Of 256 MiB more than is in use, the arena gets what the step and the graphs leave, and serving takes no more.
    Compiled kernels and libraries stay, so the first engine only loads them."""
    arguments = {"model": str(folder), "device": "cuda", "max_model_len": MAX_MODEL_LEN, "page_size": 8}
    arguments |= {"max_num_seqs": 9, "max_num_batched_tokens": 40, "dtype": "float32"}
    with Engine(kv_cache_memory_bytes=2**21, **arguments) as engine:
        expected = serve(engine)
    used, total = used_and_total_bytes()
    utilization = (used + 2**28) / total
    with Engine(gpu_memory_utilization=utilization, **arguments) as engine:
        assert 2**26 < engine.inspect().runner.arena.numel() <= 2**28
        assert serve(engine) == expected
        assert used_and_total_bytes()[0] <= utilization * total
    with pytest.raises(CapacityError, match="nothing is left for the KV cache"):
        Engine(gpu_memory_utilization=used / total / 2, **arguments)
