"""Experts on the CPU: how fast their weights are read for one token, and a whole model of GPT-OSS's shape.

    python benchmarks/benchmark_experts.py decode --threads 2 --folder FOLDER
    python benchmarks/benchmark_experts.py layers --threads 2 --kind float32 --kind int8 --kind MXFP4
    python benchmarks/benchmark_experts.py model --threads 2 --transformers

All figures of the first two are the bytes of the weights that were active, each counted once for a step, divided by the
time in expert layers, beside what memory can be read at in the same run; both take turns. With one thread it is the
processor's time that counts, so other processes matter less. `decode` is one request of a model with random weights and
about a thousand million parameters, whose steps of one token the engine runs; the layers count their time themselves.
Models of all kinds take turns, step by step. `layers` times expert layers alone, each with weights of its own, one
after the other, for tokens whose experts vary. `model` runs prompts and decodes of such a model through the engine.
"""

from __future__ import annotations

import gc
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
from lamella.native.library import NativeLibrary, load_library
from lamella.native.linear import pack_weight
from lamella.native.mlp import Gate

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, NUM_LAYERS = 1024, 1024, 32, 4, 8
BYTES_PER_WEIGHT = {"float32": 4.0, "int8": 1.0, "w8a8": 1.0, "MXFP4": 17 / 32}
EXPERT_WEIGHTS = 3 * HIDDEN * WIDTH
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
        blocks[..., 0] = torch.randint(118, 121, blocks.shape[:2], dtype=torch.uint8, generator=generator)
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
                num_bytes = num_active * EXPERT_WEIGHTS * BYTES_PER_WEIGHT[kind]
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


class Decode:
    """One request of a model, in steps of one token."""

    def __init__(self, folder: Path, kind: str, prompt_tokens: int, num_steps: int) -> None:
        from lamella import LLM, SamplingParams

        before = {id(each) for each in gc.get_objects() if type(each) is Experts}
        self.kind = kind
        self.llm = LLM(
            str(folder / ("mxfp4" if kind == "MXFP4" else "floats")),
            dtype="float32",
            quantization={"float32": "none", "MXFP4": None}.get(kind, kind),
            max_num_seqs=4,
            max_model_len=2048,
            kv_cache_memory_bytes=2**27,
            cache_dir=folder / "cache",
        )
        layers = [each for each in gc.get_objects() if type(each) is Experts and id(each) not in before]
        if len(layers) != NUM_LAYERS:
            raise click.ClickException(f"{len(layers)} layers have experts; {NUM_LAYERS} should")
        ids = np.random.default_rng(0).integers(2, MODEL["vocab_size"], prompt_tokens).tolist()
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=num_steps + 1, ignore_eos=True, detokenize=False)
        self.llm.engine.add_request("one", {"prompt_token_ids": ids}, params)
        self.llm.engine.step()  # the prompt, which goes through all experts: what is mapped is in memory now
        self._meters = [each.measure() for each in layers]
        self.passes = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64)
        self.seconds: list[float] = []
        self.step_seconds: list[float] = []
        self.rates: list[float] = []
        self.reads: list[float] = []
        self.num_bytes = 0.0

    def step(self, library: NativeLibrary) -> None:
        peaks = Peaks(library)
        peaks.measure()
        for meter in self._meters:
            meter.zero_()
        start = clock()
        self.llm.engine.step()
        self.step_seconds.append(clock() - start)
        peaks.measure()
        meters = torch.stack(self._meters)
        self.passes += meters[:, 2:]
        num_bytes = int(meters[:, 2:].sum()) * EXPERT_WEIGHTS * BYTES_PER_WEIGHT[self.kind]
        self.num_bytes += num_bytes
        self.seconds.append(int(meters[:, 1 if torch.get_num_threads() == 1 else 0].sum()) / 1e9)
        self.rates.append(num_bytes / self.seconds[-1] / 1e9)
        self.reads.append(peaks.gigabytes_per_second)

    def row(self) -> str:
        shares = [rate / read for rate, read in zip(self.rates, self.reads, strict=True)]
        quartiles = statistics.quantiles(shares, n=4)
        return (
            f"| {self.kind} | {torch.get_num_threads()} | {self.num_bytes / len(self.rates) / 1e6:.0f} | "
            f"{self.num_bytes / 1e9:.1f} | {(self.passes > 0).double().mean():.0%} | "
            f"{statistics.median(self.step_seconds) * 1e3:.1f} | "
            f"{statistics.median(self.seconds) * 1e3:.1f} | {statistics.median(self.rates):.1f} | "
            f"{statistics.median(self.reads):.1f} | "
            f"{statistics.median(shares):.0%} ({quartiles[0]:.0%} to {quartiles[2]:.0%}) | "
            f"{max(self.rates) / max(self.reads):.0%} |"
        )


@main.command("decode")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(list(BYTES_PER_WEIGHT)), default=list(BYTES_PER_WEIGHT)
)
@click.option("--threads", type=int, default=1)
@click.option("--steps", type=int, default=24)
@click.option("--prompt", type=int, default=512, help="tokens")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="where the models are, or are written; else a temporary one"
)
def decode_command(kinds: tuple[str, ...], threads: int, steps: int, prompt: int, folder: Path | None) -> None:
    torch.set_num_threads(threads)
    library = load_library()
    if library is None:
        raise click.ClickException("there are no native kernels for this processor")
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        if not (folder / "floats" / "config.json").exists():
            write_model(folder / "floats")
        if not (folder / "mxfp4" / "config.json").exists():
            write_mxfp4(folder / "floats", folder / "mxfp4")
        runs = [Decode(folder, kind, prompt, steps) for kind in kinds]
        for _ in range(steps):
            for run in runs:
                run.step(library)
        click.echo(
            "| kind | threads | active, MB a step | GB in all | experts used | step, ms | in experts, ms | GB/s "
            "| read, GB/s | share, median (quartiles) | best ÷ best |\n|---|---|---|---|---|---|---|---|---|---|---|"
        )
        for run in runs:
            click.echo(run.row())
            run.llm.close()


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


def write_mxfp4(floats: Path, folder: Path) -> None:
    """The model in `floats` with random MXFP4 blocks in place of its experts' weights."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(floats / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 121, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((floats / name).read_bytes())


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
