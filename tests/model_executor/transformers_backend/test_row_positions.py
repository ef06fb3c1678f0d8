"""A token's position is what the model is told, not its row in the batch."""

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.model_executor.models.transformers_backend.attention_interface import ATTENTION
from lamella.model_executor.models.transformers_backend.row_positions import counts_rows, rows_before
from tests.helpers.transformers_models import recorded_model

CPU = torch.device("cpu")


def unmasked_model(model_type, **changes):
    model, _ = recorded_model(model_type, **changes)
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.mark.parametrize("model_type", ["gemma3n_text", "ministral3", "mistral", "mimo_v2_flash"])
def test_most_models_go_by_what_they_are_told(model_type):
    assert not counts_rows(unmasked_model(model_type), 512, CPU)


def test_layers_that_count_are_told_what_came_before_each_row():
    """Llama 4's scale by position; with the published floor of 8,192, too, which few rows would not show."""
    assert counts_rows(unmasked_model("llama4_text"), 512, CPU)
    assert counts_rows(unmasked_model("llama4_text", floor_scale=8192, attn_scale=0.1), 131072, CPU)
    assert not counts_rows(unmasked_model("llama4_text", attn_temperature_tuning=False), 512, CPU)
    assert rows_before(torch.tensor([7, 0, 3])).tolist() == [7, -1, 1]


def test_a_layer_that_only_counts_is_refused():
    model = unmasked_model("llama")

    def by_row(module, inputs, output):
        return output * (1 + torch.arange(output.shape[1]))[:, None]

    model.model.layers[1].self_attn.q_proj.register_forward_hook(by_row)
    with pytest.raises(ModelLoadError, match="from its row in the batch"):
        counts_rows(model, 512, CPU)
