"""Models that do not go over their tokens once, from first to last, are told from others by their configs."""

import re

import pytest
from transformers import AutoConfig, LlamaConfig

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.declared_passes import refuse_other_passes


def check(config, text_config):
    refuse_other_passes(lambda name: getattr(config, name, None), lambda name: getattr(text_config, name, None))


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("t5gemma2", "is_encoder_decoder=True: its encoder's attention is not causal"),
        ("diffusion_gemma", "canvas_length=256: it generates by diffusion"),
        ("dory", "n_recurrent_loops=2: layers attend so often in one pass"),
    ],
)
def test_transformers_configs_that_are_refused(model_type, told):
    config = AutoConfig.for_model(model_type)
    with pytest.raises(ModelLoadError, match=re.escape(told)):
        check(config, config.get_text_config(decoder=True))


def test_one_pass_of_each_layer_is_none_of_them():
    check(LlamaConfig(), LlamaConfig())
    once = AutoConfig.for_model("dory", n_recurrent_loops=1)
    check(once, once)
