"""A child that was forked after a load is told so, wherever it enters; one that was forked before works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lamella
from lamella import LLM, SamplingParams
from tests.helpers.tiny_gemma import save_tiny_gemma

ENTRIES = """
import os, sys, threading, torch
torch.set_num_threads(2)
from lamella import LLM, Engine, LamellaError, SamplingParams
from lamella.native.library import load_library
folder = sys.argv[1]
ARGUMENTS = dict(max_model_len=128, kv_cache_memory_bytes=2**22)
llm = LLM(folder, **ARGUMENTS)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.generate([list(range(40))] * 3, params, use_tqdm=False)
entries = dict(
    generate=lambda: llm.generate("a", params, use_tqdm=False),
    chat=lambda: llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False),
    new_llm=lambda: LLM(folder, **ARGUMENTS),
    new_engine=lambda: Engine(model=folder, **ARGUMENTS),
    add_request=lambda: llm.engine.add_request("x", "a", params),
    step=lambda: llm.engine.step(),
    abort=lambda: llm.engine.abort("x"),
    stats=lambda: llm.engine.stats(),
    reset_prefix_cache=lambda: llm.reset_prefix_cache(),
)
if load_library() is not None:
    from lamella.native import attention, elementwise, gguf_linear, int8, int8_head, linear, top_columns, w8a8
    x = torch.rand(64, 32)
    packed, quantized = linear.pack_weight(torch.rand(64, 32)), int8.quantize_int8(torch.rand(64, 32))
    blocks = gguf_linear.pack_gguf(torch.zeros(64, 34, dtype=torch.uint8).numpy(), "Q8_0")
    head, ids = int8_head.build_int8_head(packed.data, 64), torch.arange(64)
    place = llm.engine.inspect().runner.places[0]
    kernels, pages = llm.engine.inspect().runner.backend.kernels, place.cache.pages
    rows = torch.rand(64, pages.num_kv_heads, pages.k_dim)
    layer = llm.engine.inspect().runner.model.operators._weights[0]
    entries |= dict(
        pack_weight=lambda: linear.pack_weight(x), linear=lambda: linear.linear(x, packed),
        linear_topk=lambda: linear.linear_topk(x, packed, 3), gather_rows=lambda: linear.gather_rows(packed, ids),
        linear_int8=lambda: int8.linear_int8(x, quantized), linear_w8a8=lambda: w8a8.linear_w8a8(x, quantized),
        gather_rows_int8=lambda: int8.gather_rows_int8(quantized, ids), head=lambda: head.best(x),
        linear_gguf=lambda: gguf_linear.linear_gguf(x, blocks),
        gather_rows_gguf=lambda: gguf_linear.gather_rows_gguf(blocks, ids),
        add_norm=lambda: elementwise.add_norm(x, None, None, torch.ones(32), 1e-6),
        gated=lambda: elementwise.gated_activation(x, "silu"), softcap=lambda: elementwise.softcap(x, 1.0),
        top_columns=lambda: top_columns.top_columns(x, 3), layer=lambda: layer.qkv_proj(torch.rand(64, 64)),
        tail=lambda: layer.tail(torch.rand(64, 64), torch.rand(64, 64)),
        write_kv=lambda: kernels.write_kv(pages, rows, rows, ids),
    )
sys.stdout.flush()
holder, is_held, is_over = None, threading.Event(), threading.Event()
def hold():
    llm.engine._turns.run(lambda: (is_held.set(), is_over.wait()))
holder = threading.Thread(target=hold)
holder.start()
is_held.wait()
if (child := os.fork()) == 0:
    for name, entry in entries.items():
        try:
            entry()
            print(name, "ran")
        except LamellaError as error:
            print(name, type(error).__name__, 'use "spawn"' in str(error))
    llm.close()
    print("closed")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
is_over.set()
holder.join()
(output,) = llm.generate([list(range(40))], params, use_tqdm=False)
print("parent", *output.outputs[0].token_ids)
llm.close()
"""

FORK_FIRST = """
import os, sys, lamella
child = os.fork()
import torch
torch.set_num_threads(2)
from lamella import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate([list(range(40))], params, use_tqdm=False)
    tokens = " ".join(map(str, output.outputs[0].token_ids))
if child:
    os.waitpid(child, 0)
sys.stdout.write(f"{tokens}\\n")
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


@pytest.fixture(scope="module")
def tokens(folder):
    """Of a process that never forks."""
    with LLM(folder, max_model_len=128, kv_cache_memory_bytes=2**22) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (output,) = llm.generate([list(range(40))], params, use_tqdm=False)
    return [str(token) for token in output.outputs[0].token_ids]


def run(script, folder):
    root = Path(lamella.__file__).parents[1]
    command = [sys.executable, "-c", script, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_child_forked_after_a_load_is_told_to_spawn_by_every_entry(folder, tokens):
    lines = run(ENTRIES, folder)
    *told, closed, parent = lines
    assert len(told) >= 9
    assert [line for line in told if line.split()[1:] != ["ForkedProcessError", "True"]] == []
    assert closed == "closed"
    assert parent.split()[1:] == tokens


def test_a_child_forked_before_any_load_works(folder, tokens):
    assert [line.split() for line in run(FORK_FIRST, folder)] == [tokens, tokens]
