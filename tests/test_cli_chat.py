"""`lamella chat`: from a pipe and in a pseudo-terminal, against what the engine says to the same messages."""

import functools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from lamella import LLM, SamplingParams
from lamella.cli import cli
from tests.helpers.tiny_gemma import save_tiny_gemma

ENGINE = {"max_model_len": 512, "kv_cache_memory_bytes": 2**22}
FLAGS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "4MiB"]
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module")
def answered(folder):
    """Messages -> the answer, by LLM.chat without any cache."""
    with LLM(folder, **ENGINE, enable_prefix_caching=False) as llm:

        def answer(messages):
            params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
            (output,) = llm.chat(messages, params, use_tqdm=False)
            return output.outputs[0].text, len(output.prompt_token_ids)

        yield answer


def said(role, content):
    return {"role": role, "content": content}


def test_a_conversation_from_a_pipe(folder, answered, tmp_path):
    saved = tmp_path / "chat.json"
    lines = [
        "the quick brown fox jumps over", "/stats", "a window \\", "slides", f"/save {saved}", "/stats", "/nothing",
        "/system be brief", "hello", "/reset", "hello again", "/exit", "never asked",
    ]  # fmt: skip
    flags = ["--temperature", "0", "--max-tokens", str(LENGTH), "--ignore-eos", "--system-prompt", "you are a cat"]
    result = CliRunner().invoke(cli, ["chat", "--model", folder, *flags, *FLAGS], input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output

    messages = [said("system", "you are a cat"), said("user", lines[0])]
    first, first_tokens = answered(messages)
    messages += [said("assistant", first), said("user", "a window \nslides")]
    second, second_tokens = answered(messages)
    brief, _ = answered([said("system", "be brief"), said("user", "hello")])
    again, _ = answered([said("system", "be brief"), said("user", "hello again")])
    assert json.loads(saved.read_text()) == {"messages": [*messages, said("assistant", second)]}

    output = result.stdout
    places = [output.index(text) for text in (first, second, "/nothing is no command", brief, again)]
    assert places == sorted(places)
    assert "never asked" not in output
    assert "Error" not in output
    last_turns = re.findall(r"last turn: (\d+) prompt tokens, (\d+) of them from the cache; (\d+) generated", output)
    (num_prompt, num_cached, num_output), (num_prompt_2, num_cached_2, _) = (map(int, turn) for turn in last_turns)
    assert (num_prompt, num_cached, num_output) == (first_tokens, 0, LENGTH)
    assert num_prompt_2 == second_tokens
    assert num_cached_2 > first_tokens - 16  # the second turn finds all whole pages of the first, at least


def test_a_message_that_does_not_fit_is_no_end(folder, answered):
    flags = ["--temperature", "0", "--max-tokens", str(LENGTH), "--ignore-eos"]
    given = "cat " * 2000 + "\nhello\n"
    result = CliRunner().invoke(cli, ["chat", "--model", folder, *flags, *FLAGS], input=given)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Error: ")
    assert "max_model_len=512" in result.stdout.splitlines()[0]
    assert answered([said("user", "hello")])[0] in result.stdout


def test_more_than_one_answer_is_refused(folder):
    result = CliRunner().invoke(cli, ["chat", "--model", folder, "--n", "2"], input="")
    assert result.exit_code == 2
    assert "--n 2" in result.stderr


@pytest.mark.slow
def test_control_c_stops_the_answer_and_keeps_the_chat(folder, tmp_path):
    saved = tmp_path / "chat.json"
    master, slave = pty.openpty()
    flags = ["--temperature", "0", "--ignore-eos", "--max-model-len", "16384", "--kv-cache-memory-bytes", "256MiB"]
    # The model's own limit is 512 positions; a longer one keeps it talking until it is stopped.
    save_tiny_gemma(tmp_path / "model", max_position_embeddings=16384)
    command = [sys.executable, "-m", "lamella", "chat", "--model", str(tmp_path / "model"), *flags]
    # A shell starts what runs in the background with interrupts ignored, and children inherit that.
    heeds_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=heeds_interrupts
    )
    os.close(slave)
    heard = ""

    def hear(until, seconds=90):
        nonlocal heard
        deadline = time.monotonic() + seconds
        while not re.search(until, heard):
            assert time.monotonic() < deadline, heard[-2000:]
            if select.select([master], [], [], 0.2)[0]:
                heard += os.read(master, 2**16).decode(errors="replace")
        found = heard
        heard = ""
        return found

    try:
        hear("> ")
        os.write(master, b"the quick brown fox\n")
        hear(r"fox\r\n[^\r\n]{20}")
        process.send_signal(signal.SIGINT)
        hear(r"\[stopped\]\r\n> ")
        os.write(master, f"/save {saved}\n".encode())
        hear("saved 2 messages")
        os.write(master, b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert len(messages[1]["content"]) >= 20
