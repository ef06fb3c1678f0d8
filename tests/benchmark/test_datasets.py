import csv
import gzip
import json
from collections import Counter

import pytest

from lamella.benchmark.dataset_options import DatasetOptions
from lamella.benchmark.datasets import (
    CustomDataset,
    PrefixRepetitionDataset,
    RandomDataset,
    ShareGPTDataset,
    SonnetDataset,
    TraceDataset,
)
from lamella.benchmark.requests import DrawContext, draw_requests
from lamella.errors import ConfigError

VOCAB_SIZE = 50_000


def one_token_per_word(text):
    return [len(word) for word in text.split()]


def draw(dataset, *, num_prompts=100, seed=0, max_model_len=100_000, vocab_size=VOCAB_SIZE):
    context = DrawContext(
        num_prompts=num_prompts,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        seed=seed,
        encode=one_token_per_word,
    )
    return draw_requests(dataset, context)


def prompts_of(drawn):
    return [request.prompt_token_ids for request in drawn.requests]


def shared_prefix_len(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class TestRandom:
    def test_lengths_are_exact(self):
        drawn = draw(RandomDataset(input_len=33, output_len=7, prefix_len=5), num_prompts=20)
        assert [len(prompt) for prompt in prompts_of(drawn)] == [38] * 20
        assert [request.output_len for request in drawn.requests] == [7] * 20

    def test_only_the_asked_for_prefix_is_shared(self):
        first, *others = prompts_of(draw(RandomDataset(input_len=40, prefix_len=6), num_prompts=8))
        assert [shared_prefix_len(first, other) for other in others] == [6] * 7

    def test_range_ratio_covers_exactly_the_documented_lengths(self):
        drawn = draw(RandomDataset(input_len=10, output_len=3, range_ratio=0.25), num_prompts=500)
        # 10 * 0.75 = 7.5 -> 7, 10 * 1.25 = 12.5 -> 13; 3 * 0.75 = 2.25 -> 2, 3 * 1.25 = 3.75 -> 4.
        assert {len(prompt) for prompt in prompts_of(drawn)} == set(range(7, 14))
        assert {request.output_len for request in drawn.requests} == {2, 3, 4}

    def test_tokens_use_the_whole_vocabulary_and_nothing_else(self):
        drawn = draw(RandomDataset(input_len=50), num_prompts=20, vocab_size=7)
        assert {token for prompt in prompts_of(drawn) for token in prompt} == set(range(7))

    def test_the_seed_decides(self):
        dataset = RandomDataset(input_len=20, range_ratio=0.5)
        assert draw(dataset, seed=3) == draw(dataset, seed=3)
        assert draw(dataset, seed=3) != draw(dataset, seed=4)

    def test_lengths_beyond_the_model_are_refused_with_the_numbers(self):
        dataset = RandomDataset(input_len=30, output_len=11)
        assert len(draw(dataset, max_model_len=41).requests) == 100
        with pytest.raises(ConfigError, match=r"30 tokens with 11 .* max_model_len=40"):
            draw(dataset, max_model_len=40)

    @pytest.mark.parametrize(
        "arguments",
        [{"input_len": 0}, {"output_len": 0}, {"prefix_len": -1}, {"range_ratio": 1.0}, {"range_ratio": -0.1}],
    )
    def test_impossible_lengths_are_refused(self, arguments):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))}="):
            RandomDataset(**arguments)


class TestPrefixRepetition:
    DATASET = PrefixRepetitionDataset(prefix_len=12, suffix_len=9, num_prefixes=4, output_len=5)

    def test_lengths_are_exact(self):
        drawn = draw(self.DATASET, num_prompts=10)
        assert [len(prompt) for prompt in prompts_of(drawn)] == [21] * 10
        assert [request.output_len for request in drawn.requests] == [5] * 10

    def test_each_prefix_is_used_by_an_equal_share(self):
        uses = Counter(tuple(prompt[:12]) for prompt in prompts_of(draw(self.DATASET, num_prompts=10)))
        assert sorted(uses.values()) == [2, 2, 3, 3]

    def test_suffixes_are_distinct(self):
        suffixes = {tuple(prompt[12:]) for prompt in prompts_of(draw(self.DATASET, num_prompts=10))}
        assert len(suffixes) == 10

    def test_prefixes_are_distinct_even_where_chance_would_repeat_them(self):
        dataset = PrefixRepetitionDataset(prefix_len=1, suffix_len=3, num_prefixes=6)
        prefixes = {prompt[0] for prompt in prompts_of(draw(dataset, num_prompts=6, vocab_size=6))}
        assert prefixes == set(range(6))

    def test_the_seed_decides(self):
        assert draw(self.DATASET, seed=3) == draw(self.DATASET, seed=3)
        assert draw(self.DATASET, seed=3) != draw(self.DATASET, seed=4)

    def test_more_prefixes_than_prompts_or_possibilities_are_refused(self):
        with pytest.raises(ConfigError, match="num_prompts=3 cannot use 4 prefixes"):
            draw(self.DATASET, num_prompts=3)
        with pytest.raises(ConfigError, match="no 5 distinct prefixes"):
            draw(PrefixRepetitionDataset(prefix_len=2, num_prefixes=5), vocab_size=2)


class TestShareGPT:
    @pytest.fixture
    def path(self, tmp_path):
        def chat(num_prompt_words, num_answer_words, *more):
            # Words of 1, 2, 3, ... letters, so that a prompt's tokens tell which chat it is from.
            question = (
                " ".join(["x" * num_prompt_words] * num_prompt_words)
                if num_prompt_words < 50
                else "y " * num_prompt_words
            )
            turns = [question, "answer " * num_answer_words, *more]
            return {"conversations": [{"from": "any", "value": turn} for turn in turns]}

        chats = [
            chat(3, 10),  # prompt too short
            chat(4, 4),  # smallest that is kept
            chat(5, 3),  # answer too short
            chat(6, 20, "a third turn"),
            chat(1024, 1024),  # largest that is kept
            chat(1025, 10),  # prompt too long
            chat(1024, 1025),  # total too long
            {"conversations": [{"from": "human", "value": "nobody answered this question"}]},
            {"conversations": []},
        ]
        path = tmp_path / "chats.json"
        path.write_text(json.dumps(chats), encoding="utf-8")
        return path

    @staticmethod
    def lengths(drawn):
        return sorted((len(request.prompt_token_ids), request.output_len) for request in drawn.requests)

    def test_filter(self, path):
        assert self.lengths(draw(ShareGPTDataset(path))) == [(4, 4), (6, 20), (1024, 1024)]

    def test_a_given_output_length_replaces_the_answers_and_may_be_short(self, path):
        drawn = draw(ShareGPTDataset(path, output_len=2))
        assert self.lengths(drawn) == [(4, 2), (5, 2), (6, 2), (1024, 2), (1024, 2)]

    def test_prompts_are_the_first_turn(self, path):
        assert [6] * 6 in prompts_of(draw(ShareGPTDataset(path)))

    def test_what_exceeds_the_model_is_counted(self, path):
        drawn = draw(ShareGPTDataset(path), max_model_len=26)
        assert self.lengths(drawn) == [(4, 4), (6, 20)]
        assert drawn.num_skipped == 1
        with pytest.raises(ConfigError, match=r"no usable request .3 were longer than max_model_len=7"):
            draw(ShareGPTDataset(path), max_model_len=7)

    def test_the_seed_decides_the_order(self, path):
        orders = {
            tuple(len(prompt) for prompt in prompts_of(draw(ShareGPTDataset(path), seed=seed))) for seed in range(30)
        }
        assert len(orders) == 6
        assert draw(ShareGPTDataset(path), seed=1) == draw(ShareGPTDataset(path), seed=1)

    def test_num_prompts_is_an_upper_limit(self, path):
        assert len(draw(ShareGPTDataset(path), num_prompts=2).requests) == 2

    @pytest.mark.parametrize(
        "text", ["not json", '{"conversations": []}', '[{"conversations": [{"text": 1}, {}]}]', "[1]"]
    )
    def test_other_files_are_refused(self, tmp_path, text):
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json, line 1 is no ShareGPT (file|chat)"):
            draw(ShareGPTDataset(path))


class TestMooncakeTrace:
    ROWS = (
        {"timestamp": 0, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1300, "output_length": 30, "hash_ids": [0, 1, 3]},
        {"timestamp": 5, "input_length": 512, "output_length": 1, "hash_ids": [0]},
        {"timestamp": 9, "input_length": 2048, "output_length": 40, "hash_ids": [4, 1, 2, 5]},
    )

    @pytest.fixture
    def path(self, tmp_path):
        return write_jsonl(tmp_path / "trace.jsonl", self.ROWS)

    def test_lengths_and_order_are_the_traces(self, path):
        drawn = draw(TraceDataset(path))
        assert [(len(r.prompt_token_ids), r.output_len) for r in drawn.requests] == [
            (1500, 20),
            (1300, 30),
            (512, 1),
            (2048, 40),
        ]
        assert drawn.num_skipped == 0

    def test_k_shared_ids_are_k_times_512_shared_tokens(self, path):
        a, b, c, d = prompts_of(draw(TraceDataset(path)))
        assert shared_prefix_len(a, b) == 2 * 512
        assert shared_prefix_len(a, c) == shared_prefix_len(b, c) == 512
        assert shared_prefix_len(a, d) == 0

    def test_an_id_means_the_same_tokens_at_any_place(self, path):
        a, b, _, d = prompts_of(draw(TraceDataset(path)))
        assert a[512:1024] == b[512:1024] == d[512:1024]
        assert a[1024:1500] == d[1024:1500]

    def test_gzip_is_read_alike(self, path, tmp_path):
        zipped = tmp_path / "trace.jsonl.gz"
        zipped.write_bytes(gzip.compress(path.read_bytes()))
        assert draw(TraceDataset(zipped)) == draw(TraceDataset(path))

    def test_tokens_lie_in_the_vocabulary_and_depend_on_the_seed(self, path):
        drawn = draw(TraceDataset(path), vocab_size=11, seed=1)
        assert {token for prompt in prompts_of(drawn) for token in prompt} == set(range(11))
        assert drawn == draw(TraceDataset(path), vocab_size=11, seed=1)
        assert drawn != draw(TraceDataset(path), vocab_size=11, seed=2)

    def test_scale_shrinks_lengths_and_sharing_alike(self, path):
        drawn = draw(TraceDataset(path, scale=0.1))
        # 512 * 0.1 = 51.2 -> 51 tokens an id.
        assert [(len(r.prompt_token_ids), r.output_len) for r in drawn.requests] == [
            (150, 2),
            (130, 3),
            (51, 1),
            (204, 4),
        ]
        a, b, c, _ = prompts_of(drawn)
        assert (shared_prefix_len(a, b), shared_prefix_len(a, c)) == (102, 51)

    def test_tokens_that_no_id_covers_are_shared_with_nobody(self, tmp_path):
        row = {"input_length": 600, "output_length": 1, "hash_ids": [7]}
        one, other = prompts_of(draw(TraceDataset(write_jsonl(tmp_path / "t.jsonl", [row, row]))))
        assert len(one) == len(other) == 600
        assert shared_prefix_len(one, other) == 512

    def test_requests_beyond_the_model_are_skipped_and_counted(self, path):
        drawn = draw(TraceDataset(path), max_model_len=1519)
        assert [len(prompt) for prompt in prompts_of(drawn)] == [1300, 512]
        assert drawn.num_skipped == 2

    def test_output_len_replaces_the_recorded_one(self, path):
        drawn = draw(TraceDataset(path, output_len=9), num_prompts=3)
        assert [request.output_len for request in drawn.requests] == [9, 9, 9]

    @pytest.mark.parametrize(
        "line",
        ["{", '{"input_length": 5, "output_length": 1}', '{"input_length": 5, "output_length": 1, "hash_ids": [-1]}'],
    )
    def test_a_broken_line_is_refused_with_its_number(self, path, line):
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(ConfigError, match=r"trace\.jsonl, line 5"):
            draw(TraceDataset(path))


class TestAzureTrace:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "azure.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
            writer.writerows([["2023-11-16 18:15:46.68", 374, 44], ["2023-11-16 18:15:50.99", 396, 109]])
        return path

    def test_lengths_are_the_traces_and_nothing_is_shared(self, path):
        drawn = draw(TraceDataset(path))
        assert [(len(r.prompt_token_ids), r.output_len) for r in drawn.requests] == [(374, 44), (396, 109)]
        assert shared_prefix_len(*prompts_of(drawn)) == 0

    def test_other_columns_are_refused(self, path):
        path.write_text("time,tokens\n1,2\n")
        with pytest.raises(ConfigError, match="ContextTokens and GeneratedTokens"):
            draw(TraceDataset(path))

    def test_an_unknown_file_type_or_missing_file_is_refused(self, tmp_path):
        (tmp_path / "trace.parquet").write_text("")
        with pytest.raises(ConfigError, match="does not tell a trace format"):
            TraceDataset(tmp_path / "trace.parquet")
        with pytest.raises(ConfigError, match="is no file"):
            TraceDataset(tmp_path / "absent.jsonl")


class TestOptions:
    def test_defaults_are_vllms(self):
        assert DatasetOptions().dataset() == RandomDataset(
            input_len=1024, output_len=128, range_ratio=0.0, prefix_len=0
        )
        assert DatasetOptions(dataset_name="prefix-repetition").dataset() == PrefixRepetitionDataset(
            prefix_len=256, suffix_len=256, num_prefixes=10, output_len=128
        )

    def test_general_lengths_win_over_defaults(self):
        assert DatasetOptions(input_len=9, output_len=8).dataset() == RandomDataset(input_len=9, output_len=8)
        same = DatasetOptions(input_len=9, random_input_len=9, random_prefix_len=2).dataset()
        assert same == RandomDataset(input_len=9, prefix_len=2)

    @pytest.mark.parametrize(
        ("prefix_len", "suffix_len", "expected"),
        [(None, None, (20, 21)), (30, None, (30, 11)), (None, 40, (1, 40)), (30, 11, (30, 11))],
    )
    def test_input_len_of_prefix_repetition_is_prefix_and_suffix(self, prefix_len, suffix_len, expected):
        dataset = DatasetOptions(
            dataset_name="prefix-repetition",
            input_len=41,
            prefix_repetition_prefix_len=prefix_len,
            prefix_repetition_suffix_len=suffix_len,
        ).dataset()
        assert (dataset.prefix_len, dataset.suffix_len) == expected

    def test_sharegpt_and_trace_take_the_file_and_output_len(self, tmp_path):
        path = tmp_path / "some.jsonl"
        path.write_text("")
        options = {"dataset_path": str(path), "output_len": 5}
        assert DatasetOptions(dataset_name="sharegpt", **options).dataset() == ShareGPTDataset(path, output_len=5)
        assert DatasetOptions(dataset_name="trace", trace_scale=0.5, **options).dataset() == TraceDataset(
            path, scale=0.5, output_len=5
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"input_len": 5, "random_input_len": 6}, "--input-len 5 contradicts --random-input-len 6"),
            ({"output_len": 5, "random_output_len": 6}, "--output-len 5 contradicts --random-output-len 6"),
            ({"trace_scale": 0.5}, "--trace-scale has no effect with --dataset-name random"),
            ({"dataset_path": "x"}, "use --dataset-name sharegpt or sonnet or custom or trace"),
            ({"prefix_repetition_output_len": 3}, "--prefix-repetition-output-len has no effect"),
            ({"dataset_name": "trace"}, "give --dataset-path"),
            ({"dataset_name": "sharegpt", "dataset_path": "x", "input_len": 3}, "--input-len 3 contradicts"),
            ({"dataset_name": "trace", "dataset_path": "x", "random_input_len": 3}, "use --dataset-name random"),
            ({"dataset_name": "prefix-repetition", "input_len": 9, "prefix_repetition_prefix_len": 10}, "contradicts"),
            (
                {
                    "dataset_name": "prefix-repetition",
                    "input_len": 9,
                    "prefix_repetition_prefix_len": 4,
                    "prefix_repetition_suffix_len": 4,
                },
                "contradicts",
            ),
            (
                {"dataset_name": "prefix-repetition", "output_len": 9, "prefix_repetition_output_len": 4},
                "--output-len 9 contradicts --prefix-repetition-output-len 4",
            ),
            ({"dataset_name": "poems"}, "choose one of random, prefix-repetition, sharegpt, sonnet, custom, trace"),
            ({"dataset_name": "custom", "dataset_path": "x", "input_len": 3}, "--input-len 3 contradicts"),
            ({"dataset_name": "sonnet", "dataset_path": "x", "custom_output_len": 3}, "use --dataset-name custom"),
        ],
    )
    def test_contradictions_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            DatasetOptions(**options).dataset()


class TestSonnet:
    LINES = ("a a a", "bb bb", "ccc ccc ccc ccc", "dddd", "")

    def test_all_prompts_begin_with_the_first_lines_and_go_on_with_others(self, tmp_path):
        path = tmp_path / "sonnet.txt"
        path.write_text("\n".join(self.LINES) + "\n")
        drawn = draw(SonnetDataset(path, input_len=20, output_len=3, prefix_len=6), num_prompts=50)
        lines = [one_token_per_word(line) for line in self.LINES if line]
        prefix = lines[0] + lines[1]  # five tokens: a third line would be too many
        longest_falls_short = 0
        for prompt in prompts_of(drawn):
            assert prompt[:5] == prefix
            rest = prompt[5:]
            while rest:  # whole lines, whichever
                line = next(line for line in lines if rest[: len(line)] == line)
                rest = rest[len(line) :]
            assert len(prompt) <= 20
            longest_falls_short = max(longest_falls_short, 20 - len(prompt))
        assert longest_falls_short < 4
        assert len({tuple(prompt) for prompt in prompts_of(drawn)}) > 10
        assert prompts_of(draw(SonnetDataset(path, 20, 3, 6), num_prompts=50)) == prompts_of(drawn)

    def test_a_text_without_short_lines_is_refused(self, tmp_path):
        path = tmp_path / "sonnet.txt"
        path.write_text("a a a\n")
        with pytest.raises(ConfigError, match="no line of at most 2 tokens"):
            draw(SonnetDataset(path, input_len=2, output_len=3, prefix_len=0))


class TestCustom:
    def test_rows_in_order_with_their_own_lengths_and_long_ones_passed_over(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        rows = [{"prompt": "a b c"}, {"prompt": "a " * 50}, {"prompt": "d e", "output_tokens": 4, "extra": 1}]
        write_jsonl(path, rows)
        drawn = draw(CustomDataset(path, output_len=7), max_model_len=20)
        assert prompts_of(drawn) == [one_token_per_word("a b c"), one_token_per_word("d e")]
        assert [request.output_len for request in drawn.requests] == [7, 4]
        assert drawn.num_skipped == 1

    @pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": 3}, {"prompt": "a", "output_tokens": 0}, ["a"]])
    def test_other_rows_are_refused_with_their_line(self, tmp_path, row):
        path = tmp_path / "rows.jsonl"
        write_jsonl(path, [{"prompt": "fine"}, row])
        with pytest.raises(ConfigError, match=r"rows\.jsonl:2|rows\.jsonl, line 2"):
            draw(CustomDataset(path))
