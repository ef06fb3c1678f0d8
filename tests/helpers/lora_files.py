"""LoRA adapters for small transformers models, written as PEFT writes them; and the models that they amount to."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model."


def lora_config(**fields: Any) -> dict[str, Any]:
    """What adapter_config.json holds, with the fields that PEFT writes into every one."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "some/model",
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 16,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **fields,
    }


def save_lora(
    path: Path,
    model: Any,
    *,
    seed: int = 0,
    spread: float = 0.1,
    modules: Callable[[str], bool] | Sequence[str] = ("q_proj", "v_proj"),
    ranks: Callable[[str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a random adapter of `model` to the folder `path`; returns (A, B) of each module.

    modules: the last parts of the paths of those that get weights, or whether a path does. ranks: of a path; None: r.
    fields: of adapter_config.json that differ; target_modules are `modules` where these are names.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not callable(modules):
        names = tuple(modules)
        fields.setdefault("target_modules", list(names))

        def modules(name: str) -> bool:
            return name.rpartition(".")[2] in names

    config = lora_config(**fields)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not modules(name):
            continue
        rank = config["r"] if ranks is None else ranks(name)
        down = torch.randn(rank, module.in_features, generator=generator) * spread
        up = torch.randn(module.out_features, rank, generator=generator) * spread
        weights[name] = (down.to(dtype), up.to(dtype))
    assert weights, "no module is adapted"
    tensors = {
        f"{PREFIX}{name}.lora_{which}.weight": pair[which == "B"] for name, pair in weights.items() for which in "AB"
    }
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(config))
    return weights


def merged(
    model: Any, weights: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: Callable[[str], float] | float
) -> Any:
    """A copy of the model whose linear layers have W + scale * B A for weights: by an account of its own."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, (down, up) in weights.items():
            its_scale = scale(name) if callable(scale) else scale
            changed.get_submodule(name).weight += (its_scale * up.double() @ down.double()).float()
    return changed


def stabilized(alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank)
