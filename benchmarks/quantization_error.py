"""KL divergence and top-1 agreement of quantised weights with float32, over the states of given texts.

python benchmarks/quantization_error.py --text docs/kv_cache.md --text docs/cpu.md
"""

from __future__ import annotations

from pathlib import Path

import click

from lamella.benchmark.quantization_error import measure_quantization


@click.command()
@click.option("--model", default="demo:gemma-3-270m", show_default=True)
@click.option(
    "--text", "paths", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True, required=True
)
@click.option("--quantization", "quantizations", multiple=True, default=("int8", "w8a8"), show_default=True)
@click.option(
    "--states", "states_per_text", type=click.IntRange(min=1), default=32, show_default=True, help="of a text"
)
@click.option("--max-model-len", type=click.IntRange(min=2), default=1024, show_default=True)
def main(
    model: str, paths: tuple[Path, ...], quantizations: tuple[str, ...], states_per_text: int, max_model_len: int
) -> None:
    texts = [path.read_text(encoding="utf-8") for path in paths]
    print("| quantization | states | KL, nats | same most likely token |")
    print("|---|---|---|---|")
    for one in measure_quantization(
        model,
        texts,
        quantizations,
        states_per_text=states_per_text,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=1 << 28,
    ):
        print(f"| {one.quantization} | {one.num_states} | {one.kl:.4f} | {one.agreement:.3f} |")


if __name__ == "__main__":
    main()
