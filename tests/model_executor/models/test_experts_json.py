"""What configs with experts share: groups that divide, numbers under several names, lists of layers."""

from __future__ import annotations

import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.experts_json import checked_experts, count_of, sparse_kinds
from lamella.model_executor.models.mlp_config import MLPConfig, RouterConfig
from lamella.model_executor.models.typed_fields import TypedFields


def config(**fields: object) -> ConfigJson:
    return ConfigJson(TypedFields(fields, "config.json"))


def test_the_first_name_that_is_there_counts():
    both = config(num_experts=3, num_local_experts=4)
    assert count_of(both, 9, "num_local_experts", "num_experts") == 4
    assert count_of(config(num_experts=3, num_local_experts=None), 9, "num_local_experts", "num_experts") == 3
    assert count_of(config(), 9, "num_experts") == 9


@pytest.mark.parametrize(
    ("num_experts", "router", "told"),
    [
        (8, {"num_groups": 3}, "8 experts cannot be divided"),
        (8, {"num_groups": 8}, "groups of 2 or more"),
        (8, {"num_groups": 2, "num_chosen_groups": 3}, "there are 2 groups"),
        (8, {"num_groups": 4, "num_chosen_groups": 2, "top_k": 5}, "choose from 4 experts"),
        (2, {"top_k": 3}, "choose from 2 experts"),
    ],
)
def test_routers_that_give_no_token_its_experts(num_experts, router, told):
    given = RouterConfig(**{"scoring": "sigmoid", "top_k": 1, **router})
    with pytest.raises(ModelLoadError, match=told):
        checked_experts(config(n_group=0, topk_group=0), num_experts, MLPConfig(8, "silu"), given)


def test_lists_of_layers():
    assert sparse_kinds(config(), 3, num_dense=1) == (False, True, True)
    assert sparse_kinds(config(mlp_layer_types=["sparse", "dense"]), 2, num_dense=1) == (True, False)
    with pytest.raises(ModelLoadError, match="mlp_layer_types"):
        sparse_kinds(config(mlp_layer_types=["sparse", "other"]), 2, num_dense=1)
