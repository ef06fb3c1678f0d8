"""`lamella run-batch` as it is called: what it writes for each kind of row, and that a killed run goes on."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from click.testing import CliRunner

import lamella.cli
from lamella import LLM, SamplingParams
from tests.helpers.batch_rows import ENGINE, by_id, kill_after_rows, mixed_rows, run_batch_process
from tests.helpers.tiny_gemma import save_tiny_gemma


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder):
    """What the rows' answers are compared with."""
    with LLM(folder, max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
        yield llm


def written(path, rows) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture
def answered(folder, tmp_path):
    """(rows, flags) -> the rows of the output, by line or id, and what the command said."""

    def run(rows, *flags, name="in.jsonl", exit_code=0):
        source, target = tmp_path / name, tmp_path / "out.jsonl"
        if rows is not None:
            written(source, rows)
        arguments = ["run-batch", "-i", str(source), "-o", str(target), "--model", folder, *ENGINE, *flags]
        result = CliRunner().invoke(lamella.cli.cli, arguments)
        assert result.exit_code == exit_code, result.output
        return (by_id(target) if target.exists() else {}), result.stderr

    return run


def one(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def test_openai_rows_are_answered_in_their_format(answered, folder, llm):
    messages = [{"role": "user", "content": "the cat"}]
    chat = {"model": "any", "messages": messages, "max_completion_tokens": 6, "temperature": 0,
            "logprobs": True, "top_logprobs": 2, "user": "me", "stream": False}  # fmt: skip
    text = {"model": "any", "prompt": "a window", "max_tokens": 5, "temperature": 0, "stop": "zzz", "echo": False}
    ids = {"prompt": [9, 8, 7], "temperature": 0}
    rows, told = answered(
        [
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": text},
            {"url": "/v1/completions", "body": ids},
        ]
    )
    wanted = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6, logprobs=2), use_tqdm=False)[0]
    row = rows["a"]
    assert set(row) == {"id", "custom_id", "response", "error"}
    assert (row["error"], row["response"]["status_code"]) == (None, 200)
    body = row["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", folder)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.outputs[0].text}
    assert choice["finish_reason"] == wanted.outputs[0].finish_reason
    num_in, num_out = len(wanted.prompt_token_ids), len(wanted.outputs[0].token_ids)
    assert body["usage"] == {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}
    for entry, token_id, ranked in zip(
        choice["logprobs"]["content"], wanted.outputs[0].token_ids, wanted.outputs[0].logprobs, strict=True
    ):
        assert (entry["token"], entry["logprob"]) == (ranked[token_id].decoded_token, ranked[token_id].logprob)
        best = sorted(ranked.values(), key=lambda one: one.rank)[:2]
        assert [one["logprob"] for one in entry["top_logprobs"]] == [one.logprob for one in best]
    body = rows["b"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == one(llm, "a window", temperature=0, max_tokens=5).outputs[0].text
    assert rows[3]["response"]["body"]["choices"][0]["text"] == one(llm, [9, 8, 7], temperature=0).outputs[0].text
    assert "3 of 3 rows are written: 3 answered, 0 errors\n" in told
    assert "tok/s" in told


def test_plain_rows_keep_what_they_bring_and_take_defaults_from_the_flags(answered, llm):
    rows, _ = answered(
        [
            {"prompt": "the cat", "label": {"gold": [1, 2]}, "user": "mine"},
            {"prompt_token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, "custom_id": "own"},
            {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3},
            {"prompt": "the cat", "temperature": 0.8, "n": 2, "seed": 11},
        ],
        *("--temperature", "0", "--max-tokens", "7"),
    )
    wanted = one(llm, "the cat", temperature=0, max_tokens=7)
    assert rows[1] == {
        "prompt": "the cat",
        "label": {"gold": [1, 2]},
        "user": "mine",
        "line": 1,
        "outputs": [{"text": wanted.outputs[0].text, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": len(wanted.prompt_token_ids), "completion_tokens": 7},
        "error": None,
    }
    assert rows["own"]["outputs"][0]["text"] == one(llm, [5, 6], temperature=0, max_tokens=2).outputs[0].text
    assert rows[3]["usage"]["completion_tokens"] == 3
    sampled = one(llm, "the cat", temperature=0.8, n=2, seed=11, max_tokens=7)
    assert [each["text"] for each in rows[4]["outputs"]] == [each.text for each in sampled.outputs]


def chat_row(**body):
    return {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}], **body}}


BAD = [
    ("{", "is not JSON"),
    ("[1]", "[1] is no row"),
    ('{"prompt": "a", "top_p": NaN}', "NaN is no number"),
    ({"prompt": "a", "temperature": 9}, "temperature=9 is out of range"),
    ({"prompt": "a", "structured_outputs": {"nothing": 1}}, "nothing"),
    ({"prompt": "a", "sampling_params": {"max_token": 2}}, "max_token=2: there is no such key; did you mean 'max_"),
    ({"prompt": "a", "prompt_logprobs": 2}, "prompt_logprobs=2 is not here"),
    ({"prompt": "a", "best_of": 3}, "best_of=3"),
    ({"text": "a"}, "give it one of prompt, prompt_token_ids and messages"),
    ({"prompt": "a", "messages": []}, "give it one of prompt, prompt_token_ids and messages"),
    ({"prompt": ["a", "b", ["c"]]}, "is more than one prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "a", "outputs": 1}, "outputs: answers have this key"),
    ({"prompt_token_ids": [999]}, "must lie in [0, 319]"),
    ({"prompt": "a " * 300}, "leaves no room for output"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": "hello"}, "messages='hello'"),
    ({"custom_id": 5, "prompt": "a"}, "custom_id=5: must be a string"),
    ({"url": "/v1/embeddings", "body": {}}, "url='/v1/embeddings' is not here"),
    ({"url": "/v1/completions", "body": {"prompt": "a"}, "method": "GET"}, "method='GET'"),
    ({"url": "/v1/completions", "body": {"prompt": "a"}, "extra": 1}, "extra: a row of this format has"),
    ({"url": "/v1/completions"}, "body=None"),
    (chat_row(stream=True), "stream=True is not here"),
    (chat_row(temprature=1), "temprature=1: there is no such key; did you mean 'temperature'"),
    (chat_row(max_tokens=3, max_completion_tokens=4), "give one"),
    (chat_row(top_logprobs=3), "needs logprobs"),
    (chat_row(response_format={"type": "yaml"}), "response_format="),
    (chat_row(chat_template_kwargs=[1]), "cannot be read"),
    (chat_row(tool_choice="required"), "tool_choice='required' is not here"),
]


def test_a_bad_row_is_one_error_row_with_file_and_line_and_the_others_are_answered(answered, llm, tmp_path):
    lines = []
    for row, _ in BAD:
        lines += [row, {"prompt": "the cat", "temperature": 0}]
    rows, told = answered(lines)
    wanted = one(llm, "the cat", temperature=0).outputs[0].text
    for index, (_, message) in enumerate(BAD):
        error = rows[2 * index + 1]["error"]
        assert error["message"].startswith(f"{tmp_path / 'in.jsonl'}, line {2 * index + 1}: "), error
        assert message in error["message"]
        assert error["code"] == "invalid_request"
        assert rows[2 * index + 2]["outputs"][0]["text"] == wanted
    assert len(rows) == 2 * len(BAD)
    assert f"{len(BAD)} answered, {len(BAD)} errors" in told


def test_values_that_ask_for_nothing_are_taken(answered):
    nothing = {"stream": False, "stream_options": None, "user": "u", "metadata": {"a": "b"}, "tools": None, "n": 1,
               "service_tier": "auto", "parallel_tool_calls": True, "modalities": ["text"], "store": False,
               "response_format": {"type": "text"}, "unheard_of": None, "tool_choice": "auto", "logit_bias": {},
               "best_of": 1, "max_tokens": 2}  # fmt: skip
    rows, _ = answered([chat_row(**nothing)])
    assert rows[1]["error"] is None


def test_a_form_and_a_bias_in_a_body(answered, llm):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    rows, _ = answered(
        [
            chat_row(response_format=form, max_tokens=9, temperature=0),
            chat_row(response_format={"type": "json_object"}, max_tokens=9, temperature=0),
            {"url": "/v1/completions", "body": {"prompt": "a", "logit_bias": {"33": 100}, "max_tokens": 3, "seed": 1}},
        ]
    )
    for line, wanted in ((1, {"json": schema}), (2, {"json_object": True})):
        params = SamplingParams(temperature=0, max_tokens=9, structured_outputs=wanted)
        (output,) = llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
        assert rows[line]["response"]["body"]["choices"][0]["message"]["content"] == output.outputs[0].text
        assert output.outputs[0].text.startswith("{")
    wanted = one(llm, "a", logit_bias={33: 100}, max_tokens=3, seed=1)
    assert wanted.outputs[0].token_ids == [33] * 3
    assert rows[3]["response"]["body"]["choices"][0]["text"] == wanted.outputs[0].text


def test_gzip_blank_lines_and_a_byte_order_mark(answered, tmp_path, llm):
    with gzip.open(tmp_path / "in.jsonl.gz", "wb") as file:
        file.write(b'\xef\xbb\xbf{"prompt": "the cat", "temperature": 0}\n\n  \n{"prompt": "a"}')
    rows, _ = answered(None, name="in.jsonl.gz")
    assert set(rows) == {1, 4}
    assert rows[1]["outputs"][0]["text"] == one(llm, "the cat", temperature=0).outputs[0].text


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("none.jsonl", "out.jsonl", "does not exist"),
        (".", "out.jsonl", "is a folder"),
        ("in.jsonl", ".", "is a folder"),
        ("in.jsonl", "in.jsonl", "is the input"),
        ("in.jsonl", "../link.jsonl", "is the input"),
        ("in.jsonl", "none/out.jsonl", "its folder does not exist"),
        ("in.jsonl", "out.jsonl.gz", "gzip cannot"),
        ("in.jsonl", "/dev/null", "is a pipe or a device"),
        ("/dev/null", "out.jsonl", "is a pipe or a device"),
        ("in.jsonl", "foreign.jsonl", "foreign.jsonl, line 1 answers a row that the input has not"),
        ("in.jsonl", "text.jsonl", "text.jsonl, line 2 is no row of an earlier run"),
        ("in.jsonl", "twice.jsonl", "twice.jsonl, line 2 answers a row that an earlier line answers"),
        ("same.jsonl", "out.jsonl", "same.jsonl, line 3: custom_id 'a' is that of line 1, too"),
        ("text.parquet", "out.jsonl", "cannot be read as Parquet"),
    ],
)
def test_wrong_files_are_refused_before_a_model_is_loaded(tmp_path, source, target, message):
    folder = tmp_path / "files"
    folder.mkdir()
    written(folder / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "link.jsonl").symlink_to(folder / "in.jsonl")
    written(folder / "foreign.jsonl", [{"custom_id": "z"}])
    written(folder / "text.jsonl", [{"line": 1}, "hello"])
    written(folder / "twice.jsonl", [{"line": 1}, {"line": 1}])
    written(folder / "text.parquet", ["hello"])
    written(folder / "same.jsonl", [{"custom_id": "a"}, {"custom_id": "b"}, {"custom_id": "a"}])
    arguments = ["run-batch", "-i", str(folder / source), "-o", str(folder / target), "--model", "no/such/model"]
    result = CliRunner().invoke(lamella.cli.cli, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_output_that_is_being_written_is_refused(answered, tmp_path):
    from lamella.batch_files.output_rows import OutputRows

    with OutputRows(tmp_path / "out.jsonl", set(), overwrites=False):
        _, told = answered([{"prompt": "a"}], exit_code=2)
    assert "is being written by another run" in told


def test_what_is_there_is_not_run_again_and_a_torn_line_is(answered, tmp_path):
    lines = mixed_rows(12)
    whole, _ = answered(lines)
    target = tmp_path / "out.jsonl"
    kept = target.read_bytes().splitlines(keepends=True)
    for cut in (b"", kept[5][:1], kept[5][:-1], kept[5][: len(kept[5]) // 2]):
        target.write_bytes(b"".join(kept[:5]) + cut)
        again, told = answered(lines)
        assert again == whole
        assert target.read_bytes().startswith(b"".join(kept[:5]))
        assert "12 of 12 rows are written" in told
        assert "5 were there before" in told
    again, told = answered(lines)
    assert (again, "12 were there before" in told) == (whole, True)
    again, told = answered(lines[:6], "--overwrite")
    assert len(again) == 6
    assert "there before" not in told


def test_ctrl_c_says_how_to_go_on(answered, monkeypatch, tmp_path):
    from lamella.engine.engine import Engine

    step, calls = Engine.step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return step(self)

    lines = mixed_rows(18)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        some, told = answered(lines, exit_code=130)
    assert 0 < len(some) < 18
    assert f"{len(some)} of 18 rows are written" in told
    assert "the same command goes on" in told
    rest, _ = answered(lines)
    assert {key: rest[key] for key in some} == some
    assert len(rest) == 18


def test_a_killed_run_goes_on_and_ends_like_one_that_was_not(folder, answered, tmp_path):
    lines = mixed_rows(40)
    source, killed, target = (tmp_path / name for name in ("killed.jsonl", "part.jsonl", "out.jsonl"))
    written(source, lines)
    num_lines = kill_after_rows(run_batch_process(folder, source, killed), killed, 13)
    assert 13 <= num_lines < 40
    whole, _ = answered(lines)
    target.write_bytes(killed.read_bytes())
    resumed, told = answered(lines)
    # The lines of bad rows name the file.
    assert len(resumed) == 40
    assert f"{num_lines} were there before" in told
    assert [row for row in resumed.values() if not row["error"]] != []
    for key, row in resumed.items():
        assert row == whole[key] or row["error"]["code"] == whole[key]["error"]["code"] == "invalid_request"


@pytest.mark.slow
def test_a_run_that_is_killed_five_times(folder, tmp_path):
    moments = sorted(random.Random().sample(range(20, 270), 5))
    print("killed after rows", moments)
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    written(source, mixed_rows(300))
    reached = [kill_after_rows(run_batch_process(folder, source, target), target, each) for each in moments]
    for path in (target, whole):
        process = run_batch_process(folder, source, path)
        _, told = process.communicate(timeout=200)
        assert process.returncode == 0, told
    assert sorted(reached) == reached
    assert reached[-1] < 300
    print("rows at each kill", reached)
    found = by_id(target)
    assert len(found) == 300
    assert found == by_id(whole)
