"""The `lamella` command."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lamella import LLM, LoRARequest, SamplingParams, __version__
from lamella.argument_checks import nearest_name
from lamella.batch_files.run import BatchFiles, run_batch
from lamella.benchmark.backends import BACKENDS
from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.latency import LatencyArgs, run_latency
from lamella.benchmark.throughput import ThroughputArgs, run_throughput
from lamella.cli_chat import Conversation, run_chat
from lamella.cli_models import model_rows, models_table
from lamella.cli_options import FieldOptions, GroupedCommand, GroupedOption, Number, Refusal, with_flags
from lamella.cli_prompts import placed_prompts, with_place
from lamella.engine.config import EngineConfig
from lamella.engine.offline_requests import check_lookahead
from lamella.errors import LamellaError
from lamella.model_executor.weights.cache_folder import default_cache_dir
from lamella.model_executor.weights.cache_listing import CACHE_KINDS, cache_report, clear_cache, list_cache
from lamella.observability.arena_picture import draw_arena
from lamella.output_path import check_output_path
from lamella.planner.model_specs import model_specs
from lamella.planner.plan import PlanOptions, plan_memory
from lamella.planner.plot import plot_plan
from lamella.plot_path import check_plot_path

INPUT_GROUP = "Prompts and output"
SAMPLING_GROUPS = {
    "How long the output is, and how it ends": ["max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"],
    "How tokens are chosen": [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "logit_bias",
        "allowed_token_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words",
        "bad_words_ids",
        "structured_outputs",
        "seed",
        "n",
    ],
    "What the output holds": [
        "skip_special_tokens",
        "include_stop_str_in_output",
        "detokenize",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_start",
    ],
}
ENGINE_GROUPS = {
    "The model": [
        "model",
        "tokenizer",
        "load_format",
        "model_impl",
        "dtype",
        "quantization",
        "device",
        "cache_dir",
        "seed",
    ],
    "Memory and how much runs at once": [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "kv_cache_memory_fraction",
        "gpu_memory_utilization",
        "kv_cache_dtype",
    ],
    "Reuse of what prompts have in common": [
        "enable_prefix_caching",
        "scheduling_policy",
        "retention",
        "retention_grid_tokens",
        "windowed_replay",
        "max_pinned_bytes",
    ],
    "How sliding and full layers share memory": [
        "page_size",
        "swa_eviction_interval",
        "disable_hybrid_kv_cache",
        "kv_split",
        "swa_full_tokens_ratio",
    ],
    "Adapters": ["enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"],
    "Speed and checks": [
        "attention_backend",
        "speculative_config",
        "structured_outputs_config",
        "async_scheduling",
        "enforce_eager",
        "check_invariants",
    ],
    "A view inside": ["disable_log_stats", "profile"],
    "Several processes": [
        "tensor_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "distributed_timeout_seconds",
        "ray_actor_options",
    ],
}
engine_options = FieldOptions(EngineConfig, groups=ENGINE_GROUPS, shown_defaults={"scheduling_policy": "prefix"})
sampling_options = FieldOptions(
    SamplingParams,
    renamed={"seed": "sampling_seed"},
    omitted=["output_kind", "logits_processors"],
    groups=SAMPLING_GROUPS,
)
dataset_options = FieldOptions(DatasetOptions, groups={"What is sent": list(DatasetOptions.__dataclass_fields__)})
# What the planner and the engine call what `plan` is given.
PLAN_FLAGS = {
    "model": "--model",
    "memory_bytes": "--memory",
    "kv_cache_memory_bytes": "--memory",
    "context_tokens": "--context",
    "max_model_len": "--context",
    "page_tokens": "--page-size",
    "page_size": "--page-size",
    "chunk_tokens": "--max-num-batched-tokens",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "interval_tokens": "--swa-eviction-interval",
    "swa_eviction_interval": "--swa-eviction-interval",
    "ratios": "--ratio",
    "mean_tokens": "--mean-length",
    "num_draft_tokens": "--num-speculative-tokens",
    "swa_full_tokens_ratio": "--ratio",
    "plot": "--plot",
}
BATCH_FLAGS = {
    **sampling_options.flags,
    **engine_options.flags,
    "input": "--input",
    "output": "--output",
    "lookahead_prompts": "--lookahead-prompts",
}
THROUGHPUT_FLAGS = {
    "num_prompts": "--num-prompts",
    "num_warmups": "--num-warmups",
    "temperature": "--temperature",
    "n": "--n",
    "backend": "--backend",
    "async_engine": "--async-engine",
    "hf_max_batch_size": "--hf-max-batch-size",
    "output_json": "--output-json",
    "plot": "--plot",
}
BENCH_FLAGS = {**engine_options.flags, **dataset_options.flags, **THROUGHPUT_FLAGS}

LATENCY_FLAGS = {
    "input_len": "--input-len",
    "output_len": "--output-len",
    "batch_size": "--batch-size",
    "n": "--n",
    "num_iters_warmup": "--num-iters-warmup",
    "num_iters": "--num-iters",
    "output_json": "--output-json",
}

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
SIZE = Number(int, words=(), optional=False, as_bytes=True)
WHOLE = Number(int, words=(), optional=False, as_bytes=False)
REAL = Number(float, words=(), optional=False, as_bytes=False)


class Interruption(click.ClickException):
    """Ctrl-C ended the command; the exit code is a shell's for it."""

    exit_code = 130


class OneLineErrors(click.Group):
    """Turns errors that lamella raises on purpose into one line on stderr and exit code 2, and names the command that
    a mistyped one is like."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if "did you mean" in error.format_message().lower():  # not every version of click says it
                raise
            raise click.UsageError(
                error.format_message() + nearest_name(args[0], self.list_commands(ctx)), ctx
            ) from None

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


@cli.command(cls=GroupedCommand, flags={**sampling_options.flags, **engine_options.flags})
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="A prompt; may be given several times.",
    cls=GroupedOption,
    group=INPUT_GROUP,
)
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='More prompts, one a line; in a .jsonl file as JSON: a string, a list of token ids, or {"prompt": ...}.',
    cls=GroupedOption,
    group=INPUT_GROUP,
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object a line.", cls=GroupedOption, group=INPUT_GROUP
)
@click.option(
    "--lora",
    metavar="NAME=FOLDER",
    help="A LoRA adapter, as PEFT saves one, for all prompts; enables adapters.",
    cls=GroupedOption,
    group="Adapters",
)
@sampling_options
@engine_options
@click.pass_context
def generate(
    ctx: click.Context,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    as_json: bool,
    lora: str | None,
    **_: Any,
) -> None:
    """Complete prompts."""
    placed = placed_prompts(prompts, prompts_file)
    if not placed:
        raise click.UsageError("there is no prompt; give --prompt or --prompts-file")
    try:
        params = SamplingParams(**sampling_options.given(ctx))
    except LamellaError as error:  # caught here, since its --seed is not the engine's
        raise Refusal(with_flags(str(error), sampling_options.flags)) from error
    engine_arguments, adapter = engine_options.given(ctx), None if lora is None else _adapter(lora)
    if adapter is not None:
        engine_arguments["enable_lora"] = True
    with LLM(**engine_arguments) as llm:
        try:
            outputs = llm.generate([prompt for prompt, _ in placed], params, lora_request=adapter)
        except LamellaError as error:
            raise type(error)(with_place(error, placed)) from error
        for output in outputs:
            click.echo(json.dumps(_output_json(output), ensure_ascii=False) if as_json else _output_text(output))


@cli.command(cls=GroupedCommand, flags={**sampling_options.flags, **engine_options.flags})
@click.option("--system-prompt", help="What the conversation begins with.", cls=GroupedOption, group="The conversation")
@sampling_options
@engine_options
@click.pass_context
def chat(ctx: click.Context, system_prompt: str | None, **_: Any) -> None:
    """Talk with a model: in a terminal, or one message a line from standard input. /help lists commands."""
    given = sampling_options.given(ctx)
    if given.get("n", 1) != 1:
        raise click.UsageError(f"--n {given['n']}: a conversation goes on with one answer; leave it out")
    try:
        SamplingParams(**given)
    except LamellaError as error:
        raise Refusal(with_flags(str(error), sampling_options.flags)) from error
    with LLM(**engine_options.given(ctx)) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), **{"max_tokens": None, **given})
        run_chat(Conversation(llm, params, system_prompt), sys.stdin, sys.stdout)


def _adapter(lora: str) -> LoRARequest:
    name, is_given, folder = lora.partition("=")
    if not (name and is_given and folder):
        raise click.UsageError(f"--lora {lora!r}: give NAME=FOLDER")
    return LoRARequest(name, 1, folder)


@cli.command(name="run-batch", cls=GroupedCommand, flags=BATCH_FLAGS)
@click.option(
    "-i",
    "--input",
    "input_path",
    type=click.Path(path_type=Path),
    required=True,
    help="Rows to answer, as JSON lines (.jsonl, .jsonl.gz) or Parquet: the OpenAI batch format, or rows with a prompt "
    "or messages.",
    cls=GroupedOption,
    group=INPUT_GROUP,
)
@click.option(
    "-o",
    "--output",
    "output_path",
    type=click.Path(path_type=Path),
    required=True,
    help="Where answers are appended as they come; rows that it answers already are not run again.",
    cls=GroupedOption,
    group=INPUT_GROUP,
)
@click.option(
    "--overwrite", is_flag=True, help="Begin anew where there is output already.", cls=GroupedOption, group=INPUT_GROUP
)
@click.option(
    "--lookahead-prompts",
    type=WHOLE,
    default=4096,
    show_default=True,
    help="Most rows that are read before they are answered.",
    cls=GroupedOption,
    group=INPUT_GROUP,
)
@click.option(
    "--lora",
    metavar="NAME=FOLDER",
    help="A LoRA adapter, as PEFT saves one, for all rows; enables adapters.",
    cls=GroupedOption,
    group="Adapters",
)
@sampling_options
@engine_options
@click.pass_context
def run_batch_command(
    ctx: click.Context,
    input_path: Path,
    output_path: Path,
    overwrite: bool,
    lookahead_prompts: int,
    lora: str | None,
    **_: Any,
) -> None:
    """Answer the rows of a file in another. Sampling flags hold for rows that do not say otherwise. The same command
    goes on where an earlier one was interrupted or killed."""
    files = BatchFiles(input_path, output_path, overwrite)
    check_lookahead(lookahead_prompts)
    defaults = sampling_options.given(ctx)
    try:
        SamplingParams(**defaults)
    except LamellaError as error:  # caught here, since its --seed is not the engine's
        raise Refusal(with_flags(str(error), sampling_options.flags)) from error
    engine_arguments, adapter = engine_options.given(ctx), None if lora is None else _adapter(lora)
    if adapter is not None:
        engine_arguments["enable_lora"] = True
    try:
        run_batch(
            files,
            lambda: LLM(**engine_arguments),
            defaults=defaults,
            model_name=engine_arguments["model"],
            lora_request=adapter,
            lookahead_prompts=lookahead_prompts,
            tell=lambda summary: click.echo(summary.report(), err=True),
        )
    except KeyboardInterrupt:
        raise Interruption("interrupted; the same command goes on where this one ended") from None


@cli.command(cls=GroupedCommand, flags=PLAN_FLAGS)
@click.option("--model", required=True, help="Folder, config.json, .gguf file or name of a published model.")
@click.option("--memory", type=SIZE, required=True, help='KV memory, weights not counted: "80GiB".')
@click.option("--context", type=WHOLE, required=True, help="Prompt and output of one request, in tokens.")
@click.option("--page-size", type=WHOLE, default=16, show_default=True, help="Tokens per KV page.")
@click.option(
    "--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True, help="Of K and V."
)
@click.option("--max-num-batched-tokens", type=WHOLE, default=2048, show_default=True, help="Most tokens in one step.")
@click.option("--swa-eviction-interval", type=WHOLE, help="Tokens that leave a window before decode frees them.")
@click.option("--ratio", "ratios", type=REAL, multiple=True, help="Fixed pools to compare with; may be repeated.")
@click.option("--mean-length", type=WHOLE, help="Tokens of a request on average; all of --context unless given.")
@click.option(
    "--num-speculative-tokens", type=WHOLE, default=0, show_default=True, help="Most drafts of a request in a step."
)
@click.option("--plot", type=click.Path(), help="Also draw requests against context into this PNG.")
def plan(
    model: str,
    memory: int,
    context: int,
    page_size: int,
    dtype: str,
    max_num_batched_tokens: int,
    swa_eviction_interval: int | None,
    ratios: tuple[float, ...],
    mean_length: int | None,
    num_speculative_tokens: int,
    plot: str | None,
) -> None:
    """Say how many requests a KV memory holds, without loading weights."""
    check_plot_path(plot)  # before anything that takes time
    options = PlanOptions(
        memory_bytes=memory,
        context_tokens=context,
        page_tokens=page_size,
        chunk_tokens=max_num_batched_tokens,
        interval_tokens=swa_eviction_interval,
        ratios=ratios or None,
        mean_tokens=mean_length,
        num_draft_tokens=num_speculative_tokens,
    )
    made = plan_memory(model, model_specs(model, DTYPE_BYTES[dtype]), options)
    click.echo(with_flags(made.report(), PLAN_FLAGS))
    if plot is not None:
        plot_plan(made, plot)


@cli.group(cls=OneLineErrors)
def bench() -> None:
    """Measure."""


@bench.command(cls=GroupedCommand, flags=BENCH_FLAGS)
@dataset_options
@click.option("--num-prompts", type=WHOLE, default=1000, show_default=True, help="Requests to send.")
@click.option(
    "--num-warmups", type=WHOLE, default=0, show_default=True, help="Requests to run before the clock starts."
)
@click.option("--temperature", type=REAL, default=1.0, show_default=True, help="0 is greedy.")
@click.option("--n", type=WHOLE, default=1, show_default=True, help="Samples of each prompt.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="lamella",
    show_default=True,
    help="What runs them; hf is transformers.",
)
@click.option("--async-engine", is_flag=True, help="Run lamella's AsyncEngine, every request a task of its own.")
@click.option(
    "--hf-max-batch-size", type=WHOLE, default=16, show_default=True, help="Prompts at a time of transformers."
)
@click.option("--output-json", type=click.Path(), help="Also write the figures to this file.")
@click.option("--plot", type=click.Path(), help="Also draw the latencies into this PNG.")
@engine_options
@click.pass_context
def throughput(ctx: click.Context, **options: Any) -> None:
    """Send all requests at once and report tokens per second of generation."""
    args = ThroughputArgs(
        engine_args=engine_options.given(ctx),
        dataset=DatasetOptions(**dataset_options.given(ctx)),
        **{name: options[name] for name in THROUGHPUT_FLAGS},
    )
    click.echo(run_throughput(args, LLM).report())


@bench.command(cls=GroupedCommand, flags={**engine_options.flags, **LATENCY_FLAGS})
@click.option("--input-len", type=WHOLE, default=32, show_default=True, help="Tokens of each prompt.")
@click.option("--output-len", type=WHOLE, default=128, show_default=True, help="Tokens to generate for each.")
@click.option("--batch-size", type=WHOLE, default=8, show_default=True, help="Prompts at once.")
@click.option("--n", type=WHOLE, default=1, show_default=True, help="Samples of each prompt.")
@click.option("--num-iters-warmup", type=WHOLE, default=10, show_default=True, help="Batches without a clock.")
@click.option("--num-iters", type=WHOLE, default=30, show_default=True, help="Batches to measure.")
@click.option("--output-json", type=click.Path(), help="Also write the figures to this file.")
@engine_options
@click.pass_context
def latency(ctx: click.Context, **options: Any) -> None:
    """Run one batch again and again and report how long it takes."""
    own = {name: options[name] for name in LATENCY_FLAGS}
    click.echo(run_latency(LatencyArgs(engine_args=engine_options.given(ctx), **own), LLM).report())


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option("--native", is_flag=True, help="Only those that lamella's own layers run.")
def models(as_json: bool, native: bool) -> None:
    """List the architectures that run, and whose layers run them."""
    rows = [row for row in model_rows() if not native or row["backend"] == "native"]
    click.echo("\n".join(json.dumps(row) for row in rows) if as_json else models_table(rows))


@cli.command(name="trace-picture")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(), help="File for the page.  [default: the trace's name with .html]")
def trace_picture(trace: str, output: str | None) -> None:
    """Draw the KV memory over time, from a trace that --profile wrote, as one HTML page."""
    path = str(Path(trace).with_suffix(".html")) if output is None else output
    check_output_path("output", path)
    story = draw_arena(trace, path)
    click.echo(f"{path}: {len(story.requests)} requests, {len(story.hits)} prefix hits, {story.end / 1e6:.3f} s")


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
