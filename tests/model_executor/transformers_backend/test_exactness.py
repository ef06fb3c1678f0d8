"""What is the same bits whatever the batch where transformers' code runs, and what is not: torch's products and
vectorised functions, which round by how many values there are and where one stands."""

import pytest
import torch

from lamella import LLM, SamplingParams
from tests.helpers.transformers_models import save_random_model

PROMPTS = [[(7 * at + length) % 300 + 6 for at in range(length)] for length in (33, 5, 20)]
ENGINE = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 64, "model_impl": "transformers"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random_model(folder, "gemma2")
    return folder


def scores(folder, prompts, **arguments):
    """Log-probabilities of the first prompt's greedy tokens."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(str(folder), **{**ENGINE, **arguments}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    completion = outputs[0].outputs[0]
    return [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def row_by_row(self, x):
    """A product whose rows do not know how many there are."""
    rows = [torch.nn.functional.linear(row, self.weight, self.bias) for row in x.reshape(-1, 1, x.shape[-1])]
    return torch.cat([x.new_zeros(0, self.weight.shape[0]), *rows]).reshape(*x.shape[:-1], self.weight.shape[0])


def in_float64(function):
    """Rounded once to float32, so that it does not matter which of torch's loops a value falls into."""
    return lambda x, *rest: function(x.double(), *rest).to(x.dtype)


WAYS = [
    {"prompts": PROMPTS},  # beside others
    {"prompts": PROMPTS[:1], "max_num_batched_tokens": 8, "max_num_seqs": 8},  # in chunks
    {"prompts": PROMPTS, "max_num_batched_tokens": 16, "max_num_seqs": 2, "page_size": 32},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_but_torchs_rounding_is_the_same_bits_whatever_the_batch(folder, way, monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "forward", row_by_row)
    for name in ("cos", "sin"):
        monkeypatch.setattr(torch.Tensor, name, in_float64(getattr(torch.Tensor, name)))
    for name in ("tanh", "rsqrt"):
        monkeypatch.setattr(torch, name, in_float64(getattr(torch, name)))
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, **how: gelu(x.double(), **how).to(x.dtype))
    assert scores(folder, **way) == scores(folder, PROMPTS[:1])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_torchs_rounding_is_small(folder, way):
    one, other = torch.tensor(scores(folder, **way)), torch.tensor(scores(folder, PROMPTS[:1]))
    assert (one - other).abs().max() < 1e-4


def test_the_same_steps_are_the_same_bits(folder):
    assert scores(folder, PROMPTS) == scores(folder, PROMPTS)
