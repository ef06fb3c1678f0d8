"""Writes the parity fixture: transformers' greedy tokens, and how close the second choice came.

    python -m tests.parity.make_fixture --model gemma-3-270m.gguf --output tests/fixtures/gemma_parity.json

Needs transformers, gguf and accelerate (transformers reads GGUF with it), and some minutes of two cores.
Weights are dequantised to float32 and nothing else is changed, so any engine that computes in float32 must
come to the same tokens wherever the gap between the two largest logits is wider than rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.parity.prompts import SHORT_PROMPTS, all_prompts

MAX_TOKENS = 48
NEAR_TIE = 2e-3  # logits
PAD_TOKEN_ID = 0
CHECKED_LONG_PROMPTS = ("story", "code_listing")


class Answer(NamedTuple):
    token_ids: list[int]
    gaps: list[float]


def load_oracle(model_path: Path) -> tuple[Any, Any]:
    """The tokenizer and the float32 model of a GGUF file."""
    folder, file_name = str(model_path.parent), model_path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file_name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file_name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return tokenizer, model.eval()


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """`max_tokens` argmax tokens after each prompt, end tokens included and passed over, and for each the
    largest logit minus the second largest. Prompts are padded on the left to one length."""
    longest = max(map(len, prompts))
    new_ids = torch.tensor([[PAD_TOKEN_ID] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, tokens, gaps = None, [], []
    for _ in range(max_tokens):
        output = model(
            new_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        top = output.logits[:, -1].topk(2)
        new_ids = top.indices[:, :1]
        tokens.append(new_ids[:, 0])
        gaps.append(top.values[:, 0] - top.values[:, 1])
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    columns = zip(torch.stack(tokens, 1).tolist(), torch.stack(gaps, 1).tolist(), strict=True)
    return [Answer(token_ids, [round(gap, 6) for gap in row]) for token_ids, row in columns]


@torch.inference_mode()
def one_shot(model: Any, prompt_token_ids: list[int], token_ids: list[int]) -> Answer:
    """The same as `greedy`, from one forward pass over prompt and answer: no cache, no padding."""
    whole = torch.tensor([prompt_token_ids + token_ids[:-1]])
    logits = model(whole, use_cache=False, logits_to_keep=len(token_ids)).logits[0]  # [num_tokens, vocab]
    top = logits.topk(2, dim=-1)
    return Answer(top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist())


def check_against_one_shot(model: Any, name: str, prompt_token_ids: list[int], answer: Answer) -> str:
    """Says how far the answer is from one without cache and padding; a difference at a wide gap ends the program."""
    again = one_shot(model, prompt_token_ids, answer.token_ids)
    differing = [i for i, pair in enumerate(zip(answer.token_ids, again.token_ids, strict=True)) if pair[0] != pair[1]]
    if any(answer.gaps[position] >= NEAR_TIE for position in differing):
        raise SystemExit(f"{name}: transformers contradicts itself at a wide gap (positions {differing}): no oracle")
    drift = max(abs(a - b) for a, b in zip(answer.gaps, again.gaps, strict=True))
    return f"other tokens at {differing or 'no position'}, gaps differ by {drift:.6f} at most"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_fixture(path: Path, header: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """JSON with one case per line, so that a diff shows which cases changed."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    head = "".join(f"{dump(key)}:{dump(value)},\n" for key, value in header.items())
    lines = ",\n".join(dump(case) for case in cases)
    path.write_text(f'{{{head}"cases":[\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the parity fixture from transformers.")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    start = time.monotonic()

    def log(message: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {message}", flush=True)

    tokenizer, model = load_oracle(arguments.model)
    log(f"model loaded, window {model.config.sliding_window}, layers {''.join(k[0] for k in model.config.layer_types)}")
    texts = all_prompts()
    ids = {name: tokenizer(text)["input_ids"] for name, text in texts.items()}
    without_bos = [name for name in ids if ids[name][:1] != [tokenizer.bos_token_id]]
    if without_bos:
        raise SystemExit(f"the tokenizer put no bos, which Gemma needs, before {without_bos}")

    # Short prompts run as one batch, for decoding one row costs nearly as much; the one-shot check below, which
    # has no padding, covers every one of them. Long ones run alone: the oracle's windows see no padding.
    short = list(SHORT_PROMPTS)
    answers = dict(zip(short, greedy(model, [ids[name] for name in short], MAX_TOKENS), strict=True))
    log(f"{len(short)} short prompts done")
    for name in (name for name in texts if name not in SHORT_PROMPTS):
        [answers[name]] = greedy(model, [ids[name]], MAX_TOKENS)
        log(f"{name} done, {len(ids[name])} tokens")
    cases = []
    for name, text in texts.items():
        answer = answers[name]
        log(f"{name}: least gap {min(answer.gaps):.6f}, {tokenizer.decode(answer.token_ids)[:60]!r}")
        if name in SHORT_PROMPTS or name in CHECKED_LONG_PROMPTS:
            log(f"  one-shot check: {check_against_one_shot(model, name, ids[name], answer)}")
        text_entry = {"text": text} if name in SHORT_PROMPTS else {}
        cases.append({"name": name, **text_entry, "prompt_token_ids": ids[name], **answer._asdict()})

    header = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "model_sha256": sha256_of(arguments.model),
        "max_tokens": MAX_TOKENS,
    }
    write_fixture(arguments.output, header, cases)
    log(f"wrote {len(cases)} cases to {arguments.output}")


if __name__ == "__main__":
    main()
