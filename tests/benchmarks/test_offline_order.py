"""The offline order's benchmark, on a workload small enough to say what must come out."""

from click.testing import CliRunner

from benchmarks.benchmark_offline_order import main
from kv_replay.systems import Limits
from offline_order import PrefixGroups, run_orders


def test_all_that_sorted_prompts_find_is_found_shuffled():
    """One at a time, no windows to speak of: 2 of 3 find 48 of 64 tokens, half of all."""
    groups = PrefixGroups(
        num_groups=12, num_members=3, prefix_tokens=48, suffix_tokens=16, output_tokens=1, memory_prompts=3,
        layout="gpt-oss-20b", limits=Limits(max_num_seqs=1, max_num_batched_tokens=64),
    )  # fmt: skip
    by_arrival, shuffled, by_prefix = run_orders(groups)
    assert (by_arrival.policy, shuffled.policy, by_prefix.policy) == ("fcfs", "fcfs", "prefix")
    assert (by_arrival.arrival, shuffled.arrival, by_prefix.arrival) == ("sorted", "shuffled", "shuffled")
    assert by_arrival.hit_share == by_prefix.hit_share == 0.5
    assert shuffled.hit_share < 0.2


def test_the_command_prints_a_row_for_each_order():
    answer = CliRunner().invoke(main, ["--groups", "3", "--members", "2", "--max-num-seqs", "1"])
    assert answer.exit_code == 0, answer.output
    assert [line.split(" | ")[:2] for line in answer.output.splitlines()[2:]] == [
        ["| fcfs", "sorted"],
        ["| fcfs", "shuffled"],
        ["| prefix", "shuffled"],
    ]
