"""A model that mixes tokens outside of attention is not run."""

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.token_mixing import refuse_mixing
from tests.helpers.transformers_models import VOCAB_SIZE, recorded_model


def test_attention_alone_mixes_tokens():
    model, _ = recorded_model("qwen3_moe")
    refuse_mixing(model, VOCAB_SIZE, torch.device("cpu"))


def test_a_convolution_over_tokens_is_found():
    model, _ = recorded_model("llama")
    model.model.layers[2].mlp.register_forward_hook(lambda *call: call[-1] + call[-1].roll(1, dims=1))
    with pytest.raises(ModelLoadError, match="outside of attention"):
        refuse_mixing(model, VOCAB_SIZE, torch.device("cpu"))
