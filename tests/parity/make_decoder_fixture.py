r"""Writes the parity fixture of a Llama or Qwen2 model: transformers' greedy tokens, and the second choice's distance.

    alias make_it="python -m tests.parity.make_decoder_fixture"
    make_it --model smollm2.gguf --output tests/fixtures/smollm2_parity.json
    make_it --model smollm2.gguf --output tests/fixtures/smollm2_window_parity.json --sliding-window 64
    make_it --model qwen.gguf --output tests/fixtures/qwen2_parity.json
    make_it --model qwen.gguf --output tests/fixtures/qwen2_hybrid_parity.json --sliding-window 64 \
        --max-window-layers 12

Weights, tokenizer and model owe nothing to lamella (`gguf_oracle`, `published_tokenizers`). With --sliding-window a
Llama file runs as a Mistral model, and a Qwen2 file slides from layer --max-window-layers on.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.gguf_oracle import load_oracle_model
from tests.helpers.published_tokenizers import published_tokenizer, read_fields
from tests.parity.decoder_prompts import full_prompts, windowed_prompts
from tests.parity.make_fixture import MAX_TOKENS, check_against_one_shot, greedy, sha256_of, write_fixture

_BATCH_LENGTHS = (0, 256, 1024, 1 << 20)  # tokens


def window_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments change in the model's config."""
    if arguments.sliding_window is None:
        return {}
    window = {"sliding_window": arguments.sliding_window}
    if arguments.max_window_layers is None:
        return window
    return {**window, "use_sliding_window": True, "max_window_layers": arguments.max_window_layers}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a parity fixture of a Llama or Qwen2 model from transformers.")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--sliding-window", type=int, help="keys that a windowed layer sees, the query's own included")
    parser.add_argument("--max-window-layers", type=int, help="Qwen2: the first layer with a window")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    start = time.monotonic()

    def log(message: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {message}", flush=True)

    changes = window_changes(arguments)
    tokenizer = published_tokenizer(read_fields(arguments.model))
    model = load_oracle_model(arguments.model, **changes)
    log(f"{type(model).__name__} loaded, layers {getattr(model.config, 'layer_types', 'of one kind')}, {changes}")
    prompts = windowed_prompts(tokenizer) if changes else full_prompts(tokenizer)
    ids = {}
    for prompt in prompts:
        before = [tokenizer.bos_token_id] if prompt.begins_with_bos else []
        ids[prompt.name] = before + tokenizer(prompt.text, add_special_tokens=False)["input_ids"]

    # Prompts of about one length run as one batch, for decoding one row costs nearly as much. The one-shot check
    # below, which has neither cache nor padding, covers all but the longest, which runs alone.
    answers = {}
    for low, high in itertools.pairwise(_BATCH_LENGTHS):
        batch = [name for name, token_ids in ids.items() if low <= len(token_ids) < high]
        if batch:
            answers |= zip(batch, greedy(model, [ids[name] for name in batch], MAX_TOKENS), strict=True)
            log(f"{', '.join(batch)} done, {sum(len(ids[name]) for name in batch)} tokens")
    cases = []
    for prompt in prompts:
        name, answer = prompt.name, answers[prompt.name]
        log(f"{name}: least gap {min(answer.gaps):.6f}, {tokenizer.decode(answer.token_ids)[:60]!r}")
        if len(ids[name]) < _BATCH_LENGTHS[-2]:
            log(f"  one-shot check: {check_against_one_shot(model, name, ids[name], answer)}")
        # The texts of longer prompts are rebuilt by name.
        text_entry = {"text": prompt.text} if len(ids[name]) < _BATCH_LENGTHS[1] else {}
        cases.append({"name": name, **text_entry, "prompt_token_ids": ids[name], **answer._asdict()})
    header = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "model_sha256": sha256_of(arguments.model),
        "config_changes": changes,
        "max_tokens": MAX_TOKENS,
    }
    write_fixture(arguments.output, header, cases)
    log(f"wrote {len(cases)} cases to {arguments.output}")


if __name__ == "__main__":
    main()
