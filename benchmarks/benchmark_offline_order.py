"""Shuffled prompts that share prefixes, all queued at once, by FCFS and by prefix, beside the same prompts sorted.

python benchmarks/benchmark_offline_order.py --groups 300 --members 4
python benchmarks/benchmark_offline_order.py --groups 60 --members 12
"""

from __future__ import annotations

import click

from kv_replay.layouts import LAYOUTS
from kv_replay.systems import Limits
from lamella.errors import LamellaError
from offline_order import PrefixGroups, order_report, run_orders


@click.command(context_settings={"show_default": True}, help=__doc__.splitlines()[0])
@click.option("--groups", type=click.IntRange(min=1), default=300, help="prefixes")
@click.option("--members", type=click.IntRange(min=1), default=4, help="prompts of each prefix")
@click.option("--prefix-len", type=click.IntRange(min=1), default=480, help="tokens")
@click.option("--suffix-len", type=click.IntRange(min=1), default=40, help="tokens")
@click.option("--output-len", type=click.IntRange(min=1), default=16, help="tokens")
@click.option("--memory-prompts", type=click.FloatRange(min=0, min_open=True), default=12.0,
              help="memory: full-attention KV of so many requests")  # fmt: skip
@click.option("--layout", type=click.Choice(LAYOUTS), default="gpt-oss-20b")
@click.option("--page-size", type=click.IntRange(min=1), default=16, help="tokens")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=16)
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=2048)
def main(groups, members, prefix_len, suffix_len, output_len, memory_prompts, layout, page_size, max_num_seqs,
         max_num_batched_tokens) -> None:  # fmt: skip
    limits = Limits(
        page_tokens=page_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )  # fmt: skip
    workload = PrefixGroups(
        num_groups=groups,
        num_members=members,
        prefix_tokens=prefix_len,
        suffix_tokens=suffix_len,
        output_tokens=output_len,
        memory_prompts=memory_prompts,
        layout=layout,
        limits=limits,
    )
    try:
        click.echo(order_report(run_orders(workload)))
    except LamellaError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
