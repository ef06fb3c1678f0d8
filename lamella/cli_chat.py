"""`lamella chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from lamella import LLM, SamplingParams
from lamella.engine.sampling_params import RequestOutputKind
from lamella.errors import LamellaError

HELP = """\
/reset          forget the conversation, not the system prompt
/system TEXT    begin anew with this system prompt; without TEXT: with none
/save FILE      write the conversation as JSON
/stats          tokens, what the cache had of them, and tokens per second
/help           this list
/exit           end; so does end of input
Ctrl-C stops an answer and keeps it as far as it came. A line that ends in \\ goes on in the next."""


class Conversation:
    """Messages so far, and the engine that answers them: what a turn repeats of those before it is in the cache.

    num_prompt_tokens, num_cached_tokens, num_output_tokens, seconds: of the last turn; totals: the same of all.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system_prompt: str | None = None) -> None:
        self._llm = llm
        self._params = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
        self._ids = itertools.count()
        self.messages: list[dict[str, str]] = []
        self.begin(system_prompt)
        self.last = self.totals = (0, 0, 0, 0.0)

    def begin(self, system_prompt: str | None) -> None:
        """Forget all messages."""
        self.system_prompt = system_prompt
        self.messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def answer(self, text: str) -> Iterator[str]:
        """The answer to the user's `text`, in pieces. Where reading is broken off, by Ctrl-C or by closing the
        iterator, the request ends, and what has come of the answer counts. Raises LamellaError, with nothing changed,
        where the conversation cannot be run."""
        engine, request_id = self._llm.engine, f"chat-{next(self._ids)}"
        messages = [*self.messages, {"role": "user", "content": text}]
        (prompt,) = self._llm.chat_prompts(messages)
        engine.add_request(request_id, prompt, self._params)
        started, num_output, pieces, output = time.monotonic(), 0, [], None
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    num_output += len(output.outputs[0].token_ids)
                    pieces.append(output.outputs[0].text)
                    yield pieces[-1]
        finally:
            if not engine.is_closed:
                engine.abort(request_id)
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
            num_cached = 0 if output is None else output.num_cached_tokens
            self.last = (len(prompt["prompt_token_ids"]), num_cached, num_output, time.monotonic() - started)
            self.totals = tuple(a + b for a, b in zip(self.totals, self.last, strict=True))  # type: ignore[assignment]
        if output is not None and output.outputs[0].finish_reason == "error":
            raise LamellaError(f"the answer ended with an error: {output.outputs[0].stop_reason}")

    def stats(self) -> str:
        """Lines for people."""
        lines = []
        for name, (num_prompt, num_cached, num_output, seconds) in (("last turn", self.last), ("all", self.totals)):
            rate = num_output / seconds if seconds else 0.0
            lines.append(
                f"{name}: {num_prompt} prompt tokens, {num_cached} of them from the cache; "
                f"{num_output} generated, {rate:.1f} tokens/s"
            )
        return "\n".join(lines)


def run_chat(conversation: Conversation, source: TextIO = sys.stdin, out: TextIO = sys.stdout) -> None:
    """Read turns and commands from `source` until it ends or says /exit; answers go to `out` as they come. Where source
    is a terminal it is asked with a prompt, and lines can be edited."""
    is_terminal = source.isatty()
    if is_terminal:
        print("Type a message, or /help.", file=out)
    read = _terminal_lines if is_terminal else lambda: _lines(source)
    for text in _joined(read()):
        if not text.strip():
            continue
        if text.startswith("/"):
            if not _command(conversation, text, out):
                return
            continue
        pieces = conversation.answer(text)
        try:
            for piece in pieces:
                print(piece, end="", flush=True, file=out)
            print(file=out, flush=True)
        except KeyboardInterrupt:
            pieces.close()  # type: ignore[attr-defined]
            print("\n[stopped]", file=out, flush=True)
        except LamellaError as error:
            print(f"Error: {error}", file=out, flush=True)


def _command(conversation: Conversation, text: str, out: TextIO) -> bool:
    """Do what a line that begins with a slash says. False: the chat ends."""
    name, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    commands: dict[str, Callable[[], Any]] = {
        "/reset": lambda: conversation.begin(conversation.system_prompt),
        "/system": lambda: conversation.begin(rest or None),
        "/stats": lambda: print(conversation.stats(), file=out),
        "/save": lambda: _save(conversation, rest, out),
        "/help": lambda: print(HELP, file=out),
    }
    if name in ("/exit", "/quit"):
        return False
    if name not in commands:
        print(f"{name} is no command. There are:\n{HELP}", file=out)
    else:
        commands[name]()
    out.flush()
    return True


def _save(conversation: Conversation, path: str, out: TextIO) -> None:
    if not path:
        print("Error: /save needs a file name", file=out)
        return
    try:
        text = json.dumps({"messages": conversation.messages}, ensure_ascii=False, indent=2)
        Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
        print(f"saved {len(conversation.messages)} messages in {path}", file=out)
    except OSError as error:
        print(f"Error: {path} cannot be written ({error}); give another file", file=out)


def _lines(source: TextIO) -> Iterator[str]:
    for line in source:
        yield line.rstrip("\r\n")


def _terminal_lines() -> Iterator[str]:
    """Lines that are typed. Ctrl-C while typing drops the line; Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it is what lets `input` edit lines
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Lines, each with those after it that a backslash at its end joins."""
    parts: list[str] = []
    for line in lines:
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts = []
    if parts:
        yield "\n".join(parts)
