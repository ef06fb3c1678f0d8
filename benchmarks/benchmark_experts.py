"""Experts on the CPU: how fast their weights are read for one token, and a whole model of GPT-OSS's shape.

    python benchmarks/benchmark_experts.py layers --threads 2 --kind float32 --kind int8 --kind MXFP4
    python benchmarks/benchmark_experts.py model --threads 2 --transformers

`layers` times expert layers alone, each with weights of its own, one after the other as in a decode step, for tokens
whose experts vary. Its figure is the bytes of the weights that were active, each counted once for a step, divided by
the time in the layers, beside what memory can be read at in the same run; both take turns. With one thread it is the
processor's time that counts, so other processes matter less. `model` writes a model with random weights and about a
thousand million parameters to a folder, and runs prompts and decodes through the engine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmark_linear import Peaks, clock
from lamella.native.experts import Experts, RoutingRule, route
from lamella.native.gguf_linear import pack_gguf
from lamella.native.int8 import quantize_int8
from lamella.native.layer_linear import LinearLayer, Weight
from lamella.native.library import load_library
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, NUM_LAYERS = 1024, 1024, 32, 4, 8
BYTES_PER_WEIGHT = {"float32": 4.0, "int8": 1.0, "w8a8": 1.0, "MXFP4": 17 / 32}
GPT_OSS = Gate("silu", 7.0, False, 1.702, 1.0)
MODEL = {
    "vocab_size": 32768,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@click.group(help=__doc__)
def main() -> None:
    pass


def stored(kind: str, num_out: int, num_in: int, generator: torch.Generator) -> Weight:
    if kind == "MXFP4":
        blocks = torch.randint(0, 256, (num_out, num_in // 32, 17), dtype=torch.uint8, generator=generator)
        blocks[..., 0] = 120  # 2^-7
        return pack_gguf(blocks.flatten(1).numpy(), kind)
    weight = torch.randn(num_out, num_in, generator=generator) * num_in**-0.5
    return pack_weight(weight) if kind == "float32" else quantize_int8(weight)


def made_layers(kind: str) -> list[tuple[LinearLayer, Experts]]:
    """(router, experts) of each layer."""
    generator, layers = torch.Generator().manual_seed(0), []
    rule = RoutingRule("softmax", NUM_EXPERTS, TOP_K, is_renormalised=True)
    for _ in range(NUM_LAYERS):
        router = LinearLayer([pack_weight(torch.randn(NUM_EXPERTS, HIDDEN, generator=generator))])

        def linears(num_out: int, num_in: int) -> list[LinearLayer]:
            return [
                LinearLayer([stored(kind, num_out, num_in, generator)], int8_activations=kind == "w8a8")
                for _ in range(NUM_EXPERTS)
            ]

        layers.append((router, Experts(router, rule, linears(2 * WIDTH, HIDDEN), linears(HIDDEN, WIDTH), GPT_OSS)))
    return layers


@main.command("layers")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(BYTES_PER_WEIGHT)), default=["float32"])
@click.option("--tokens", "token_counts", multiple=True, type=int, default=[1], help="tokens of a step")
@click.option("--threads", type=int, default=1)
@click.option("--steps", type=int, default=15)
def layers_command(kinds: tuple[str, ...], token_counts: tuple[int, ...], threads: int, steps: int) -> None:
    torch.set_num_threads(threads)
    library = load_library()
    if library is None:
        raise click.ClickException("there are no native kernels for this processor")
    click.echo("| kind | tokens | active weights, MB | ms | GB/s | read, GB/s | share, median | best ÷ best |")
    click.echo("|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        layers, rule = made_layers(kind), RoutingRule("softmax", NUM_EXPERTS, TOP_K)
        for num_tokens in token_counts:
            generator, shares, rates, reads, seconds = torch.Generator().manual_seed(1), [], [], [], []
            for _ in range(steps):
                inputs = [torch.randn(num_tokens, HIDDEN, generator=generator) for _ in layers]
                chosen = [route(router(x), rule)[0] for (router, _), x in zip(layers, inputs, strict=True)]
                num_active = sum(len(ids.unique()) for ids in chosen)
                num_bytes = num_active * 3 * HIDDEN * WIDTH * BYTES_PER_WEIGHT[kind]
                peaks = Peaks(library)
                peaks.measure()
                start = clock()
                for (_, experts), x in zip(layers, inputs, strict=True):
                    experts(x)
                seconds.append(clock() - start)
                peaks.measure()
                rates.append(num_bytes / seconds[-1] / 1e9)
                reads.append(peaks.gigabytes_per_second)
                shares.append(rates[-1] / reads[-1])
            click.echo(
                f"| {kind} | {num_tokens} | {num_bytes / 1e6:.0f} | {statistics.median(seconds) * 1e3:.1f} | "
                f"{statistics.median(rates):.1f} | {statistics.median(reads):.1f} | {statistics.median(shares):.0%} | "
                f"{max(rates) / max(reads):.0%} |"
            )


@main.command("model")
@click.option("--threads", type=int, default=1)
@click.option("--quantization", type=click.Choice(["none", "int8", "w8a8"]), default="none")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="where the model is, or is written; else a temporary one"
)
@click.option("--prompt", type=int, default=512, help="tokens")
@click.option("--output", type=int, default=32, help="tokens")
@click.option("--transformers", "with_transformers", is_flag=True, help="its own figures beside ours")
def model_command(
    threads: int, quantization: str, folder: Path | None, prompt: int, output: int, with_transformers: bool
) -> None:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        if not (folder / "config.json").exists():
            write_model(folder)
        click.echo("| engine | prompt, tokens/s | decode of one request, tokens/s |\n|---|---|---|")
        for name, run in engines(folder, quantization, with_transformers):
            run(prompt, 2)  # weights that are mapped are read from the disk
            first, whole = (min(run(prompt, tokens) for _ in range(2)) for tokens in (1, output + 1))
            decode = f"{output / (whole - first):.1f}" if whole > first else "lost in noise"
            click.echo(f"| {name} | {prompt / first:.0f} | {decode} |")


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**MODEL, dtype="bfloat16")).to(torch.bfloat16)
    click.echo(f"{sum(each.numel() for each in model.parameters()) / 1e6:.0f} million parameters", err=True)
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(MODEL["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))


def engines(folder: Path, quantization: str, with_transformers: bool) -> Iterator[tuple[str, Any]]:
    """(name, seconds that a prompt and its output take)."""
    from lamella import LLM, SamplingParams

    generator = np.random.default_rng(0)
    arguments: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**27}
    with LLM(str(folder), dtype="float32", quantization=quantization, max_num_seqs=4, **arguments) as llm:

        def ours(prompt: int, output: int) -> float:
            ids = generator.integers(2, MODEL["vocab_size"], prompt).tolist()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate([ids], params, use_tqdm=False)
            return time.perf_counter() - start

        ours(16, 2)
        yield f"lamella, {quantization}", ours
    if not with_transformers:
        return
    from transformers import GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def theirs(prompt: int, output: int) -> float:
        ids = torch.from_numpy(generator.integers(2, MODEL["vocab_size"], (1, prompt)))
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=output, min_new_tokens=output, do_sample=False)
        return time.perf_counter() - start

    theirs(16, 2)
    yield "transformers, float32", theirs


if __name__ == "__main__":
    main()
