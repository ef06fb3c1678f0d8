"""Writes tests/fixtures/peft_parity.json: what PEFT itself makes of adapters of small models.

Needs peft (0.21.2 made it) and accelerate. `python -m tests.parity.make_peft_fixture`. Weights of models and adapters
are random by their seeds; stored is what PEFT decides: the adapter's config, the names and shapes of its tensors, and
the log-probabilities of the model that it loads.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.helpers.tiny_decoders import save_tiny_decoder
from tests.helpers.tiny_gemma import save_tiny_gemma
from tests.parity.peft_models import FIXTURE, MODELS, NUM_TOKENS_APART, adapter_values, prompt_of

ADAPTERS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {
        "r": 8,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": "all-linear",
        "rank_pattern": {"o_proj": 2},
        "alpha_pattern": {r"layers\.1\.mlp\.\w+": 3},
    },
    {"r": 4, "lora_alpha": 16, "target_modules": ["o_proj", "mlp.down_proj"], "layers_to_transform": [1, 3]},
    {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": r"model\.layers\.\d+\.mlp\.gate_proj",
        "exclude_modules": r".*\.3\.mlp\..*",
    },
    {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["k_proj", "up_proj"],
        "layers_to_transform": 2,
        "layers_pattern": "layers",
    },
]


def main() -> None:
    import peft
    from transformers import AutoModelForCausalLM

    made: dict[str, Any] = {"peft": peft.__version__, "models": {}}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            if name == "gemma3":
                save_tiny_gemma(path)
            else:
                save_tiny_decoder(path, name)

            def load(path: Path = path) -> Any:
                return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

            cases = []
            for index, fields in enumerate(ADAPTERS):
                model = peft.get_peft_model(load(), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
                for parameter_name, parameter in model.named_parameters():
                    if "lora_" in parameter_name:
                        parameter.data.copy_(adapter_values(parameter_name.replace(".default", ""), parameter.shape))
                model.save_pretrained(path / f"{index}")
                model = peft.PeftModel.from_pretrained(load(), path / f"{index}").eval()
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt_of(index)]), use_cache=False).logits[0, -1].double()
                config = json.loads((path / f"{index}" / "adapter_config.json").read_text())
                config["base_model_name_or_path"] = name
                with safe_open(path / f"{index}" / "adapter_model.safetensors", framework="pt") as file:
                    shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
                logprobs = logits.log_softmax(dim=-1)[::NUM_TOKENS_APART].tolist()
                cases.append({"config": config, "shapes": shapes, "logprobs": [round(each, 6) for each in logprobs]})
            made["models"][name] = cases
    FIXTURE.write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
