"""What the llama.cpp driver feeds to `llama_decode`, with a stand-in for the context."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

DRIVERS = Path(__file__).parents[2] / "benchmarks" / "compare_engines" / "drivers"
MODULUS = 97


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.syspath_prepend(str(DRIVERS))
    spec = importlib.util.spec_from_file_location("llama_cpp_driver", DRIVERS / "llama_cpp_driver.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("wire", None)


class FakeContext:
    """A model whose next token is a checksum of all tokens before: it knows when one is missing or misplaced."""

    def __init__(self, batch_tokens):
        self.batch_tokens = batch_tokens
        self.sequences, self.batch, self.batch_sizes = {}, [], []

    def add(self, token, position, sequence, wants_logits):
        self.batch.append((token, position, sequence, wants_logits))

    @property
    def num_filled(self):
        return len(self.batch)

    @property
    def is_full(self):
        return self.num_filled == self.batch_tokens

    def decode(self):
        assert len(self.batch) <= self.batch_tokens
        answers = []
        for token, position, sequence, wants_logits in self.batch:
            tokens = self.sequences.setdefault(sequence, [])
            assert position == len(tokens)
            tokens.append(token)
            if wants_logits:
                answers.append(checksum(tokens))
        self.batch_sizes.append(len(self.batch))
        self.batch = []
        return answers

    def share(self, num_sequences):
        for sequence in range(1, num_sequences):
            self.sequences[sequence] = list(self.sequences[0])


def checksum(tokens):
    return sum((index + 1) * token for index, token in enumerate(tokens)) % MODULUS


def one_by_one(prompt, output_tokens):
    tokens = list(prompt)
    for _ in range(output_tokens):
        tokens.append(checksum(tokens))
    return tokens[len(prompt) :]


def batches_of(size, count):
    return [size] * (count // size) + [count % size] * (count % size > 0)


@pytest.mark.parametrize("num_shared", [0, 1, 5, 16, 21])
@pytest.mark.parametrize("num_own", [1, 3, 16, 20])
def test_each_sequence_sees_its_own_tokens_in_order(driver, num_shared, num_own):
    shared = [7 * index % 89 for index in range(num_shared)]
    prompts = [shared + [(13 * row + 5 * index) % 83 for index in range(num_own)] for row in range(4)]
    context = FakeContext(batch_tokens=16)
    outputs = driver.run(context, prompts, 6, num_shared)
    assert outputs == [one_by_one(prompt, 6) for prompt in prompts]
    # Shared tokens once, batches as full as can be, then a step per token.
    assert context.batch_sizes == batches_of(16, num_shared) + batches_of(16, 4 * num_own) + [4] * 5


def test_one_token_needs_no_step(driver):
    context = FakeContext(batch_tokens=16)
    assert driver.run(context, [[3, 4]], 1, 0) == [one_by_one([3, 4], 1)]
    assert context.batch_sizes == [2]


class FakeLibrary(SimpleNamespace):
    """As much of llama-cpp-python as a context is made with; keeps the parameters of each."""

    def __init__(self):
        super().__init__(made=[])

    def llama_context_default_params(self):
        return SimpleNamespace()

    def llama_init_from_model(self, model, params):
        self.made.append(params)
        return "context"

    def __getattr__(self, name):
        if not name.startswith("llama_"):
            raise AttributeError(name)
        return lambda *arguments: name.encode()


@pytest.mark.parametrize(
    ("kv_unified", "num_shared", "expected"),
    [(False, 0, (False, 3 * 7)), (True, 0, (True, 3 * 7)), (False, 4, (True, 4 + 3 * 7)), (True, 4, (True, 4 + 3 * 7))],
)
def test_one_buffer_where_it_is_asked_for_or_a_prefix_is_shared(driver, monkeypatch, kv_unified, num_shared, expected):
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setattr(driver, "run", lambda context, prompts, output_tokens, shared_tokens: prompts)
    generate, told = driver.load({"model": "m.gguf", "num_threads": 2, "kv_unified": kv_unified})
    generate([[1] * (num_shared + 5)] * 3, 2, num_shared)
    (params,) = library.made
    assert (params.kv_unified, params.n_ctx) == expected
    assert params.n_seq_max == 3
    assert told["kv_unified"] == (True if kv_unified else "where a prefix is shared")
