"""The `lamella` command."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lamella import LLM, SamplingParams, __version__
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.throughput import ThroughputArgs, run_throughput
from lamella.cli_options import FieldOptions, Number
from lamella.engine.config import EngineConfig
from lamella.errors import LamellaError
from lamella.model_executor.cache_folder import default_cache_dir
from lamella.model_executor.cache_listing import CACHE_KINDS, cache_report, clear_cache, list_cache
from lamella.planner.model_specs import model_specs
from lamella.planner.plan import PlanOptions, make_plan
from lamella.planner.plot import plot_plan

engine_options = FieldOptions(EngineConfig)
sampling_options = FieldOptions(SamplingParams, renamed={"seed": "sampling_seed"}, omitted=["output_kind"])
dataset_options = FieldOptions(DatasetOptions)

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
SIZE = Number(int, words=(), optional=False, as_bytes=True)


class Refusal(click.ClickException):
    """Shown as one line, without a traceback."""

    exit_code = 2


class OneLineErrors(click.Group):
    """Turns errors that lamella raises on purpose into one line on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LamellaError as error:
            raise Refusal(" ".join(str(error).split())) from error


# Names may be typed as in Python, too: --max_model_len, prefix_repetition.
@click.group(
    cls=OneLineErrors,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(__version__, prog_name="lamella")
def cli() -> None:
    """Run language models whose layers mix sliding-window and full attention."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")


@cli.command()
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be given several times.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='More prompts, one a line; in a .jsonl file as JSON: a string, a list of token ids, or {"prompt": ...}.',
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@sampling_options
@engine_options
@click.pass_context
def generate(ctx: click.Context, prompts: tuple[str, ...], prompts_file: Path | None, as_json: bool, **_: Any) -> None:
    """Complete prompts."""
    all_prompts: list[Any] = [*prompts, *(_read_prompts(prompts_file) if prompts_file else ())]
    if not all_prompts:
        raise click.UsageError("there is no prompt; give --prompt or --prompts-file")
    params = SamplingParams(**sampling_options.given(ctx))
    with LLM(**engine_options.given(ctx)) as llm:
        for output in llm.generate(all_prompts, params):
            click.echo(json.dumps(_output_json(output), ensure_ascii=False) if as_json else _output_text(output))


@cli.command()
@click.option("--model", required=True, help="Folder, config.json, .gguf file or name of a published model.")
@click.option("--memory", type=SIZE, required=True, help='KV memory, weights not counted: "80GiB".')
@click.option("--context", type=int, required=True, help="Prompt and output of one request, in tokens.")
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens per KV page.")
@click.option(
    "--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True, help="Of K and V."
)
@click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Most tokens in one step.")
@click.option("--swa-eviction-interval", type=int, help="Tokens that leave a window before decode frees them.")
@click.option("--ratio", "ratios", type=float, multiple=True, help="Fixed pools to compare with; may be repeated.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Also draw requests against context into this PNG.")
def plan(
    model: str,
    memory: int,
    context: int,
    page_size: int,
    dtype: str,
    max_num_batched_tokens: int,
    swa_eviction_interval: int | None,
    ratios: tuple[float, ...],
    plot: str | None,
) -> None:
    """Say how many requests a KV memory holds, without loading weights."""
    options = PlanOptions(
        memory_bytes=memory,
        context_tokens=context,
        page_tokens=page_size,
        chunk_tokens=max_num_batched_tokens,
        interval_tokens=swa_eviction_interval,
        ratios=ratios or None,
    )
    made = make_plan(model, model_specs(model, DTYPE_BYTES[dtype]), options)
    click.echo(made.report())
    if plot is not None:
        plot_plan(made, plot)


@cli.group()
def bench() -> None:
    """Measure."""


@bench.command()
@dataset_options
@click.option("--num-prompts", type=int, default=1000, show_default=True, help="Requests to send.")
@click.option("--num-warmups", type=int, default=0, show_default=True, help="Requests to run before the clock starts.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy.")
@click.option("--output-json", type=click.Path(dir_okay=False), help="Also write the figures to this file.")
@engine_options
@click.pass_context
def throughput(
    ctx: click.Context, num_prompts: int, num_warmups: int, temperature: float, output_json: str | None, **_: Any
) -> None:
    """Send all requests at once and report tokens per second of generation."""
    args = ThroughputArgs(
        engine_args=engine_options.given(ctx),
        dataset=DatasetOptions(**dataset_options.given(ctx)),
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        temperature=temperature,
        output_json=output_json,
    )
    click.echo(run_throughput(args, LLM).report())


@cli.group(name="cache", invoke_without_command=True)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to look in, where engines were given one.  [default: $XDG_CACHE_HOME/lamella or ~/.cache/lamella]",
)
@click.pass_context
def cache(ctx: click.Context, cache_dir: Path | None) -> None:
    """List the converted copies of models that are kept on disk, or clear them."""
    ctx.obj = cache_dir or default_cache_dir()
    if ctx.invoked_subcommand is None:
        click.echo(cache_report(ctx.obj, list_cache(ctx.obj), now=time.time()))


@cache.command()
@click.option("--model", help="Only of models whose path or file name has this in it.")
@click.option("--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Only what was made longer ago.")
@click.option("--kind", type=click.Choice(CACHE_KINDS), help="Only of this kind.")
@click.pass_obj
def clear(cache_dir: Path, model: str | None, older_than: float | None, kind: str | None) -> None:
    """Remove copies; they are made again when they are needed. What a process has mapped stays readable for it."""
    now = time.time()
    chosen = [
        entry
        for entry in list_cache(cache_dir)
        if (model is None or model in entry.model)
        and (older_than is None or entry.age_days(now) > older_than)
        and (kind is None or kind == entry.kind)
    ]
    removed = clear_cache(cache_dir, chosen)
    click.echo(f"removed {len(removed)} of {cache_dir}: {sum(entry.num_bytes for entry in removed) / 1e9:.2f} GB")


def _read_prompts(path: Path) -> list[Any]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise click.UsageError(
            f"{path} has a line that is not JSON ({error}); one JSON value a line is needed"
        ) from None


def _output_text(output: Any) -> str:
    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    return "\n".join(
        f"Prompt: {prompt!r}\nCompletion: {completion.text!r}"
        + (f"\nError: {completion.stop_reason}" if completion.finish_reason == "error" else "")
        for completion in output.outputs
    )


def _output_json(output: Any) -> dict[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments` (by default the process's own) and exit."""
    cli(arguments, prog_name="lamella")
