"""An MLP's and experts' configs are values: equal where their fields are, so that layers that are alike share one."""

from __future__ import annotations

from lamella.model_executor.models.mlp_config import ExpertsConfig, GateClamp, MLPConfig, RouterConfig


def experts(**router: object) -> ExpertsConfig:
    expert = MLPConfig(8, "silu", clamp=GateClamp(limit=7.0))
    return ExpertsConfig(
        num_experts=4, expert=expert, router=RouterConfig(**{"scoring": "softmax", "top_k": 2, **router})
    )


def test_equal_fields_make_equal_configs():
    assert experts() == experts()
    assert hash(experts()) == hash(experts())
    assert experts() != experts(scale=2.0)
    assert MLPConfig(8, "silu") != MLPConfig(8, "silu", clamp=GateClamp(limit=7.0))
