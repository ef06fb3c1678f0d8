"""What a prompt costs where there are many: processor time of a tiny model's whole runs, with prefix cache and without.

    OMP_NUM_THREADS=1 python benchmarks/benchmark_many_prompts.py --prompts 500 --prompts 20000 --rounds 5 \\
        --shared-tokens 1 --shared-tokens 24 --policy fcfs --policy prefix

All prompts are different but for their first tokens: 1 of them is a BOS token, 24 a system prompt that ends inside a
block. The model has random weights and next to nothing to compute, so that what is measured is the work around it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer, models

from lamella import LLM, SamplingParams
from lamella.engine.scheduling.waiting_queue import SCHEDULING_POLICIES
from markdown_tables import table

PROMPT_TOKENS = 38
PAGE_TOKENS = 16
VOCAB_SIZE = 1000
NUM_LAYERS = 6
NUM_KV_HEADS, HEAD_DIM = 2, 16


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--prompts", "counts", type=click.IntRange(min=1), multiple=True, default=(500, 20_000))
@click.option("--shared-tokens", "shares", type=click.IntRange(0, PROMPT_TOKENS - 2), multiple=True, default=(1, 24),
              help="first tokens that all prompts have in common")  # fmt: skip
@click.option("--policy", "policies", type=click.Choice(SCHEDULING_POLICIES), multiple=True,
              default=SCHEDULING_POLICIES)  # fmt: skip
@click.option("--memory-share", type=click.FloatRange(min=0, min_open=True), default=0.1,
              help="KV memory over what all prompts together would take")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="runs of each, in turns; the median counts")
def main(counts, shares, policies, memory_share, rounds) -> None:
    seconds: dict[tuple[int, str, int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        for round_index in range(rounds):
            for shared in shares:
                for policy in policies:
                    for count in counts:
                        prompts = different_prompts(count, shared, seed=round_index)
                        for cached in (False, True):
                            run = seconds.setdefault((shared, policy, count, cached), [])
                            run.append(run_once(folder, prompts, policy, memory_share, cached=cached))
                            click.echo(f"{shared} {policy} {count} cache={cached}: {run[-1]:.2f} s", err=True)
    columns = ("shared tokens", "order", "prompts", "µs each without cache", "with", "with ÷ without",
               f"with ÷ with {min(counts):,} prompts")  # fmt: skip
    rows = []
    for shared in shares:
        for policy in policies:
            for count in counts:
                without, cached = (
                    statistics.median(seconds[shared, policy, count, one]) / count for one in (False, True)
                )
                fewest = statistics.median(seconds[shared, policy, min(counts), True]) / min(counts)
                micros, ratios = (1e6 * without, 1e6 * cached), (cached / without, cached / fewest)
                figures = [*(f"{one:.0f}" for one in micros), *(f"{one:.2f}" for one in ratios)]
                rows.append([f"{shared}", policy, f"{count:,}", *figures])
    click.echo(table(columns, rows))


def different_prompts(count: int, shared: int, *, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, VOCAB_SIZE, (count, PROMPT_TOKENS))
    prompts[:, :shared] = prompts[0, :shared]
    assert len(np.unique(prompts, axis=0)) == count
    return prompts.tolist()


def run_once(folder: str, prompts: list[list[int]], policy: str, memory_share: float, *, cached: bool) -> float:
    """Processor seconds from the first prompt to the last output. One token each."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    blocks = -(-(PROMPT_TOKENS + 1) // PAGE_TOKENS)
    prompt_bytes = blocks * PAGE_TOKENS * NUM_LAYERS * NUM_KV_HEADS * 2 * HEAD_DIM * 4
    with LLM(
        folder,
        load_format="dummy",
        scheduling_policy=policy,
        max_model_len=4 * PAGE_TOKENS,
        enable_prefix_caching=cached,
        kv_cache_memory_bytes=int(len(prompts) * prompt_bytes * memory_share),
    ) as llm:
        start = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - start


def write_tiny_model(folder: Path) -> None:
    """A Gemma 3 of six layers, two of them with full attention, and a tokenizer that knows its tokens by number."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 512,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"<{index}>": index for index in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


if __name__ == "__main__":
    main()
