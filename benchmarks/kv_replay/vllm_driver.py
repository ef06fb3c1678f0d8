"""vLLM's v1 scheduler and KV cache manager on a job of `vllm_process`, without a model.

    python vllm_driver.py JOB.json ANSWER.json

Run by an interpreter that has vLLM (0.32 is known to work) and nothing of lamella: only the neighbouring
closed_loop.py is read. Scheduling is synchronous, first come first served.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

SMALLEST_CHUNK = 16
HASH_NAME = "sha256"


class TooSmallError(Exception):
    """vLLM does not start with so little memory."""


@dataclass(frozen=True)
class Turn:
    id: str
    session: str
    prompt: list
    output: list


def build_scheduler(job, chunk_tokens):
    """(scheduler, hash block size). Raises TooSmallError where vLLM says that the memory is."""
    with tempfile.TemporaryDirectory() as folder:
        # Only for its limits: the layers come from the job.
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": len(job["layers"]),
            "vocab_size": 200_000, "max_position_embeddings": job["max_model_len"], "torch_dtype": "bfloat16",
        }  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model_config = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=job["max_model_len"]
        )
    cache_options = {} if job["retention"] == "default" else {"prefix_cache_retention_interval": job["retention"]}
    cache_config = CacheConfig(
        block_size=job["page_tokens"],
        enable_prefix_caching=True,
        prefix_caching_hash_algo=HASH_NAME,
        **cache_options,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=job["max_num_seqs"],
        max_num_batched_tokens=chunk_tokens,
        max_model_len=job["max_model_len"],
        enable_chunked_prefill=True,
        async_scheduling=False,
        is_encoder_decoder=False,
        disable_hybrid_kv_cache_manager=False,
    )
    vllm_config = VllmConfig(model_config=model_config, cache_config=cache_config, scheduler_config=scheduler_config)
    specs = {f"layer.{index}": layer_spec(layer, job["page_tokens"]) for index, layer in enumerate(job["layers"])}
    resolve_kv_cache_layout(vllm_config, [[layout.name for layout in KVCacheLayout]], specs.values())
    try:
        per_worker = get_kv_cache_configs(vllm_config, [specs], [job["budget_bytes"]])
    except ValueError as error:
        raise TooSmallError(str(error)) from error
    kv_config = generate_scheduler_kv_cache_config(per_worker)
    vllm_config.cache_config.num_gpu_blocks = kv_config.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_config, vllm_config)
    scheduler = Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    return scheduler, hash_block_size


def layer_spec(layer, page_tokens):
    shape = {
        "block_size": page_tokens,
        "num_kv_heads": layer["num_kv_heads"],
        "head_size": layer["k_dim"],
        "head_size_v": layer["v_dim"],
        "dtype": torch.bfloat16,
    }
    if layer["window_tokens"] is None:
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(sliding_window=layer["window_tokens"], **shape)


def largest_chunk_scheduler(job):
    """The scheduler with the job's chunk, or the largest half, quarter, ... of it that vLLM starts with."""
    chunk, reason = job["max_num_batched_tokens"], None
    while chunk >= max(SMALLEST_CHUNK, job["max_num_seqs"]):
        try:
            return (*build_scheduler(job, chunk), chunk)
        except TooSmallError as error:
            reason, chunk = reason or str(error), chunk // 2
    raise TooSmallError(f"with chunks of {job['max_num_batched_tokens']} tokens and of every fraction of it: {reason}")


class Driver:
    """Steps the scheduler, answers with the outputs that the trace gives, and takes notes."""

    def __init__(self, job):
        self.job = job
        self.scheduler, hash_block_size, self.chunk_tokens = largest_chunk_scheduler(job)
        hash_fn = get_hash_fn_by_name(HASH_NAME)
        init_none_hash(hash_fn)
        self.block_hasher = get_request_block_hasher(hash_block_size, hash_fn)
        self.outputs = {}
        self.arrival_step = {}
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_computed_tokens = self.num_first_decodes = 0
        self.add_seconds = []  # per request
        self.step_seconds = []  # schedule and update, per step
        self.num_running, self.wait_steps = [], []
        self.windowed_bytes = self.ideal_bytes = 0
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        # One pool: a block is equally large whichever group it serves, and the budget is cut into blocks.
        self.block_bytes = job["budget_bytes"] // self.scheduler.kv_cache_config.num_blocks
        self.windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        self.peak_blocks = [0] * len(groups)

    def add(self, request_id, prompt, output):
        self.outputs[request_id] = output
        self.arrival_step[request_id] = len(self.step_seconds)
        start = time.perf_counter()
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=len(output), ignore_eos=True, temperature=0.0),
                pooling_params=None,
                block_hasher=self.block_hasher,  # hashes the prompt now
            )
        )
        self.add_seconds.append(time.perf_counter() - start)

    def step(self):
        """One step; the ids of the requests that it finished."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        seconds = time.perf_counter() - start
        self.num_preemptions += len(plan.preempted_req_ids or ())
        if not plan.total_num_scheduled_tokens:
            raise RuntimeError("the scheduler has requests and runs none of them")
        self.note(plan)
        answer = self.execute(plan)
        start = time.perf_counter()
        outputs = self.scheduler.update_from_output(plan, answer)
        finished = [
            one.request_id for group in outputs.values() for one in group.outputs if one.finish_reason is not None
        ]
        self.step_seconds.append((seconds, time.perf_counter() - start))
        for request_id in finished:
            self.num_first_decodes += len(self.outputs.pop(request_id)) - 1
        return finished

    def note(self, plan):
        requests = self.scheduler.requests
        self.num_running.append(len(self.scheduler.running))
        self.num_computed_tokens += plan.total_num_scheduled_tokens
        for request_id, num_new in plan.num_scheduled_tokens.items():
            arrival = self.arrival_step.pop(request_id, None)
            if arrival is not None:
                request = requests[request_id]
                self.wait_steps.append(len(self.step_seconds) - arrival)
                self.num_prompt_tokens += request.num_prompt_tokens
                self.num_cached_tokens += request.num_computed_tokens - num_new  # schedule() has advanced it
        if "turns" in self.job:
            self.note_memory(plan)

    def note_memory(self, plan):
        manager = self.scheduler.kv_cache_manager.coordinator
        null = manager.block_pool.null_block
        held = []
        for group in manager.single_type_managers:
            ids = {block.block_id for blocks in group.req_to_blocks.values() for block in blocks if block is not null}
            held.append(len(ids))
        self.peak_blocks = [max(pair) for pair in zip(self.peak_blocks, held, strict=True)]
        windowed = [layer for layer in self.job["layers"] if layer["window_tokens"] is not None]
        ideal = 0
        # schedule() has advanced num_computed_tokens by what it planned; a prefill's window is that of its chunk's
        # first token, as lamella's driver counts it.
        for request in self.scheduler.running:
            length = request.num_computed_tokens - plan.num_scheduled_tokens.get(request.request_id, 0) + 1
            ideal += sum(min(layer["window_tokens"], length) * token_bytes(layer) for layer in windowed)
        num_blocks = sum(count for count, window in zip(held, self.windows, strict=True) if window is not None)
        self.windowed_bytes += num_blocks * self.block_bytes
        self.ideal_bytes += ideal

    def execute(self, plan):
        """A token for each request that is through with what it knows: the next of its output."""
        request_ids = list(plan.num_scheduled_tokens)
        sampled = []
        for request_id in request_ids:
            request = self.scheduler.requests[request_id]
            is_done = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.outputs[request_id][request.num_output_tokens]] if is_done else [])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    def measurements(self):
        host_us = [1e6 * sum(seconds) for seconds in self.step_seconds]
        num_decoding = sum(max(0, request.num_output_tokens - 1) for request in self.scheduler.running)
        knows_memory = "turns" in self.job
        peak_bytes = {}
        for index, (count, window) in enumerate(zip(self.peak_blocks, self.windows, strict=True)):
            peak_bytes[f"{'full' if window is None else f'sliding_{window}'}.{index}"] = count * self.block_bytes
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "hit_share": self.num_cached_tokens / max(1, self.num_prompt_tokens),
            "prefill_tokens_computed": self.num_computed_tokens - self.num_first_decodes - num_decoding,
            "steps": len(host_us),
            "mean_running": sum(self.num_running) / max(1, len(self.num_running)),
            "max_running": max(self.num_running, default=0),
            "preemptions": self.num_preemptions,
            "host_us_per_step_p50": statistics.median(host_us) if host_us else 0.0,
            "host_us_per_step_min": min(host_us, default=0.0),
            "host_us_per_step_mean": sum(host_us) / max(1, len(host_us)),
            "add_us_p50": 1e6 * statistics.median(self.add_seconds),
            "wait_steps_p50": statistics.median(self.wait_steps) if self.wait_steps else 0.0,
            "wait_steps_max": max(self.wait_steps, default=0),
            "chunk_tokens": self.chunk_tokens,
            "used_interval_tokens": None,
            "peak_bytes": peak_bytes if knows_memory else {},
            "unusable_bytes_share": None,
            "windowed_bytes_mean": self.windowed_bytes / max(1, len(host_us)) if knows_memory else None,
            "windowed_held_over_ideal": self.windowed_bytes / self.ideal_bytes if self.ideal_bytes else None,
        }


def token_bytes(layer):
    return layer["num_kv_heads"] * (layer["k_dim"] + layer["v_dim"]) * 2  # bf16


def replay(job):
    driver = Driver(job)
    loop = closed_loop().ClosedLoop([Turn(**turn) for turn in job["turns"]], job["num_sessions"])
    on_their_way = {}

    def arrive(turn):
        on_their_way[turn.id] = turn
        driver.add(turn.id, turn.prompt, turn.output)

    for turn in loop.start():
        arrive(turn)
    while on_their_way:
        for request_id in driver.step():
            following = loop.answer(on_their_way.pop(request_id))
            if following is not None:
                arrive(following)
    return driver.measurements()


def decode_only(job):
    sizes = job["decode_only"]
    driver = Driver(job)
    rng = np.random.default_rng(0)
    for index in range(sizes["num_requests"]):
        prompt, output = (
            rng.integers(0, 200_000, sizes[name], dtype=np.int32).tolist()
            for name in ("context_tokens", "num_output_tokens")
        )
        driver.add(f"r{index}", prompt, output)
    running = driver.scheduler.running
    while len(running) < sizes["num_requests"] or not all(request.num_output_tokens for request in running):
        driver.step()
        running = driver.scheduler.running
    driver.step_seconds.clear()
    driver.num_running.clear()
    for _ in range(sizes["num_steps"]):
        driver.step()
    return driver.measurements()


def prompt_cost(job):
    sizes = job["prompt_cost"]
    driver = Driver(job)
    rng = np.random.default_rng(0)
    seconds = []
    for index in range(sizes["num_siblings"]):
        rng_of_sibling = np.random.default_rng(index + 1)
        sibling = rng_of_sibling.integers(0, 200_000, sizes["num_sibling_tokens"], dtype=np.int32).tolist()
        sibling[0] = sizes["first_token"]
        driver.add(f"sibling {index}", sibling, [0] * sizes["num_output_tokens"])
        driver.step()
        driver.step()
    for index in range(sizes["num_prompts"]):
        prompt = rng.integers(0, 200_000, sizes["num_prompt_tokens"], dtype=np.int32).tolist()
        if sizes["num_siblings"]:
            prompt[0] = sizes["first_token"]
        driver.add(f"r{index}", prompt, [0] * sizes["num_output_tokens"])
        num_before = driver.num_computed_tokens
        driver.step()
        seconds.append((driver.add_seconds[-1], *driver.step_seconds[-1]))
        if driver.num_computed_tokens - num_before != len(prompt):
            raise TooSmallError(f"a prompt's {len(prompt)} tokens were not computed in one step")
        driver.step()
    return {"prompt_seconds": seconds}


def closed_loop():
    """The neighbouring module: its package is not importable here."""
    spec = importlib.util.spec_from_file_location("closed_loop", Path(__file__).with_name("closed_loop.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        run = replay if "turns" in job else decode_only if "decode_only" in job else prompt_cost
        answer = run(job)
    except TooSmallError as error:
        answer = {"refused": str(error)}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
