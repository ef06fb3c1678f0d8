"""What is said while something takes long: it moves with tokens and bytes, and fills no log."""

from __future__ import annotations

import io
import logging

import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.engine import generate_progress
from lamella.model_executor import progress
from lamella.model_executor.layers.description import Model
from lamella.model_executor.progress import BAR_SECONDS, LINE_SECONDS, Progress, with_progress
from lamella.model_executor.weights import loading
from lamella.model_executor.weights.loading import load_config, load_weights, resolve_model
from tests.helpers.tiny_gemma import native_shapes, save_tiny_gemma


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


def test_elsewhere_than_on_a_terminal_a_line_comes_now_and_then():
    stream, clock = io.StringIO(), Clock()
    one = Progress("reading", 1000, "B", stream=stream, clock=clock)
    for num_done in range(0, 1000, 10):
        clock.now += LINE_SECONDS / 25
        if one.is_due:
            one.show(num_done, "so far")
    one.close()
    assert stream.getvalue().splitlines() == [
        "reading: 24 %, so far",
        "reading: 49 %, so far",
        "reading: 74 %, so far",
        "reading: 99 %, so far",
    ]


def test_what_ends_soon_says_nothing_unless_it_announces_itself():
    stream, clock = io.StringIO(), Clock()
    for announces in (False, True):
        one = Progress("reading", 10, "B", announces=announces, stream=stream, clock=clock)
        one.show(5, "")
        one.close()
    assert stream.getvalue() == "reading …\n"


def test_on_a_terminal_a_bar_moves_and_never_goes_back():
    stream, clock = Terminal(), Clock()
    one = Progress("reading", 1000, "B", stream=stream, clock=clock)
    reached = []
    for num_done, total in ((100, 1000), (400, 1000), (300, 1000), (400, 500), (900, 500)):
        clock.now += 2 * BAR_SECONDS
        assert one.is_due
        one.show(num_done, "so far", total)
        assert not one.is_due
        reached.append((one._bar.n, one._bar.total))
    one.close()
    assert reached == [(100, 1000), (400, 1000), (400, 1000), (400, 500), (500, 500)]
    assert "reading" in stream.getvalue()


@pytest.fixture
def told(monkeypatch):
    """(done, note, total) of each time that generate's progress was shown: after every step."""
    made = []

    class Recorder:
        is_due = True

        def __init__(self, label, total, unit, *, stream):
            self.total = total

        def show(self, num_done, note, total):
            made.append((num_done, note, total))

        def close(self):
            made.append("closed")

    monkeypatch.setattr(generate_progress, "Progress", Recorder)
    return made


def test_a_long_prompt_moves_the_bar_chunk_by_chunk_and_then_token_by_token(saved, told):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 2**23, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with LLM(saved[0], **arguments) as llm:
        llm.generate([[7 + index % 50 for index in range(300)]], params)
    *steps, last, closed = told
    # Chunks of 64 tokens; with the last the first token is sampled, then one a step until the request is finished.
    assert [num_done for num_done, _, _ in steps] == [64, 128, 192, 256, 301, 302, 303, 304, 305]
    assert {total for _, _, total in steps} == {305}
    assert "0 of 1 prompts finished, 128 prompt tokens read, 0 tokens generated" in steps[1][1]
    assert "0 of 1 prompts finished, 300 prompt tokens read, 2 tokens generated" in steps[5][1]
    assert last == (305, "1 of 1 prompts finished, 300 prompt tokens read, 5 tokens generated", 305)
    assert closed == "closed"


def test_the_end_comes_nearer_where_requests_stop_early(saved, told):
    """The second prompt's only token is its last: of 40 it may have, 39 are never generated."""
    with LLM(saved[0], max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (first,) = llm.generate([[7] * 10], params, use_tqdm=False)
        stop = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[first.outputs[0].token_ids[0]])
        llm.generate([[7] * 10], stop)
    assert told[-2][0] == told[-2][2] == 11


def test_cached_prompts_count_as_read(saved, told):
    with LLM(saved[0], max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for _ in range(2):
            told.clear()
            llm.generate([list(range(10, 60))], params)
    assert [num_done for num_done, _, _ in told[:3]] == [51, 52, 53]


def test_generate_off_a_terminal_writes_lines_and_no_bar(saved, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with LLM(saved[0], max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
        capsys.readouterr()
        llm.generate([[5] * 8], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Generating: 81 %, 0 of 1 prompts finished, 8 prompt tokens read, 1 tokens generated"
    assert lines[-1] == "Generating: 100 %, 1 of 1 prompts finished, 8 prompt tokens read, 3 tokens generated"
    assert "\r" not in "".join(lines)


def test_a_bar_of_the_callers_tells_tokens_before_a_prompt_is_finished(saved):
    notes = []

    class Bar:
        def __init__(self, **options):
            self.format_dict = {"elapsed": 0.0}
            self.num_prompts = options["total"]

        def set_postfix_str(self, text, refresh):
            notes.append((self.format_dict["elapsed"], text))

        def update(self):
            self.num_prompts -= 1

        def close(self):
            notes.append(self.num_prompts)

    class SlowBar(Bar):
        @property
        def format_dict(self):
            self._seconds += 1.0
            return {"elapsed": self._seconds}

        @format_dict.setter
        def format_dict(self, value):
            self._seconds = value["elapsed"]

    arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 2**23, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with LLM(saved[0], **arguments) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        llm.generate([[7 + index % 50 for index in range(200)]], params, use_tqdm=SlowBar)
    assert notes[0][1] == "in 64.0 tok/s, out 0.0 tok/s"
    assert len(notes) == 5
    assert notes[-1] == 0


def test_conversion_says_once_what_it_does(saved, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    folder, model = saved
    source = resolve_model(folder)
    shapes = native_shapes(model.config)
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    told = []
    monkeypatch.setattr(
        loading,
        "with_progress",
        lambda items, *rest, **options: (told.append(rest), with_progress(items, *rest, **options))[1],
    )
    for shows_progress, wanted in ((False, ""), (True, "converting weights once (0.0 GB) …\n"), (True, "")):
        cache_dir = tmp_path / str(shows_progress)
        with caplog.at_level(logging.INFO):
            load_weights(
                source,
                Model(load_config(source), torch.float32),
                cache_dir=cache_dir,
                shows_progress=shows_progress,
            )
        assert capsys.readouterr().err == wanted
    assert [(label, total) for label, total, _ in told] == [("converting weights once", num_bytes)] * 2
    assert caplog.text.count(f"converting weights once (0.0 GB) from {folder}") == 2


def test_bytes_are_counted_while_they_are_taken(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    pieces = [bytes(30), bytes(50), bytes(20)]
    assert list(with_progress(iter(pieces), "loading weights", 100, len, is_shown=True)) == pieces
    assert capsys.readouterr().err.splitlines() == [
        "loading weights (0.0 GB) …", "loading weights (0.0 GB): 30 %", "loading weights (0.0 GB): 80 %",
        "loading weights (0.0 GB): 100 %",
    ]  # fmt: skip


def test_an_engine_loads_without_a_word_and_llm_with_one(saved, tmp_path, monkeypatch, capsys):
    from lamella import Engine

    monkeypatch.setattr(loading, "MIN_CACHED_BYTES", 0)
    arguments = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22}
    Engine(model=saved[0], cache_dir=str(tmp_path / "engine"), **arguments).close()
    LLM(saved[0], cache_dir=str(tmp_path / "quiet"), use_tqdm_on_load=False, **arguments).close()
    assert capsys.readouterr().err == ""
    LLM(saved[0], cache_dir=str(tmp_path / "llm"), **arguments).close()
    assert capsys.readouterr().err.startswith("converting weights once (0.0 GB) …\n")
