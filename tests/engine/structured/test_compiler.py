"""Grammars that cannot be used: each is an error of its own request, within its time, whatever it holds."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from lamella.engine.structured import guidance_backend
from lamella.engine.structured.compiler import GrammarCompiler
from lamella.engine.structured.config import StructuredOutputsConfig
from lamella.engine.structured.params import MOST_CHARACTERS, StructuredOutputsParams
from lamella.errors import RequestError
from lamella.model_executor.text.tokenizer import Tokenizer
from tests.helpers import tiny_tokenizers


def made(**config) -> GrammarCompiler:
    backend = tiny_tokenizers.byte_level()
    end = backend.token_to_id(tiny_tokenizers.END)
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": tiny_tokenizers.END})
    return GrammarCompiler(tokenizer, 263, (end,), StructuredOutputsConfig(**config))


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"regex": "(a"}, "regex='(a' cannot be used"),
        ({"regex": r"(a)\1"}, "cannot be used"),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"enum": []}}, "cannot be used"),
        ({"grammar": "start: missing"}, "cannot be used"),
        ({"grammar": 'root ::= "a" | missing'}, "cannot be read"),
        ({"grammar": "no rules here"}, "cannot be read"),
        ({"json": '{"items":' * 200 + '{"type":"string"}' + "}" * 200}, "recursion limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_that_are_wrong(form, told):
    with pytest.raises(RequestError) as refused:
        made().compile(StructuredOutputsParams(**form))
    assert told in str(refused.value)


def test_a_long_chain_of_rules_does_not_end_the_process():
    """The library goes down rule by rule, and an ordinary thread's stack would end before the chain does."""
    num_rules = (MOST_CHARACTERS - 100) // 15
    rules = "\n".join(f"r{index}:r{index + 1}" for index in range(num_rules))
    grammar = f'start:r0\n{rules}\nr{num_rules}:"z"'
    assert MOST_CHARACTERS // 2 < len(grammar) <= MOST_CHARACTERS
    mask = made().compile(StructuredOutputsParams(grammar=grammar))().mask(np.zeros(0, dtype=np.int32))
    assert sum(int(word).bit_count() for word in mask) == 1


def test_a_grammar_that_takes_too_long_is_an_error_and_so_are_more_while_it_runs(monkeypatch):
    compiler = made(compile_timeout_seconds=0.05)
    compiler.compile(StructuredOutputsParams(regex="a"))  # makes the vocabulary, which no grammar waits for
    may_end = threading.Event()
    whole = guidance_backend.grammar_text

    def slow(params, special_tokens):
        may_end.wait(60)
        return whole(params, special_tokens)

    monkeypatch.setattr(guidance_backend, "grammar_text", slow)
    for index in range(4):
        with pytest.raises(RequestError, match=r"takes longer to compile than compile_timeout_seconds=0\.05"):
            compiler.compile(StructuredOutputsParams(regex=f"b{index}"))
    with pytest.raises(RequestError, match="4 other grammars are being compiled"):
        compiler.compile(StructuredOutputsParams(regex="c"))
    compiler.compile(StructuredOutputsParams(regex="a"))  # what is compiled needs no thread
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "lamella-grammar":
            thread.join(60)
    monkeypatch.undo()
    compiler._config = StructuredOutputsConfig()
    compiler.compile(StructuredOutputsParams(regex="c"))


def test_as_many_are_kept_as_the_cache_has_room_for(monkeypatch):
    compiler = made(cache_size=2)
    compiled = []
    whole = guidance_backend.grammar_text
    monkeypatch.setattr(
        guidance_backend,
        "grammar_text",
        lambda params, special: compiled.append(params.regex) or whole(params, special),
    )
    for regex in ("a", "b", "a", "c", "a", "b"):  # "b" went for "c": "a" was used after it
        compiler.compile(StructuredOutputsParams(regex=regex))
    assert compiled == ["a", "b", "c", "b"]


def test_the_threads_stack_is_for_the_compiler_alone():
    before = threading.stack_size()
    made().compile(StructuredOutputsParams(regex="a"))
    assert threading.stack_size() == before
