"""One model, and an adapter for each request, mixed in one batch.

    python examples/lora_per_request.py MODEL ADAPTER [ADAPTER ...]

ADAPTER is a folder as PEFT saves one (adapter_config.json and adapter_model.safetensors). A prompt is answered by
the model alone and with every adapter; all of it runs together, and each has a prefix cache of its own.
"""

import sys
from pathlib import Path

from lamella import LLM, LoRARequest, SamplingParams

PROMPT = "Once upon a time"


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    model, *folders = sys.argv[1:]
    adapters = [None, *(LoRARequest(Path(folder).name, index, folder) for index, folder in enumerate(folders, 1))]
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model, max_model_len=512, enable_lora=True, max_loras=len(folders)) as llm:
        outputs = llm.generate([PROMPT] * len(adapters), params, lora_request=adapters, use_tqdm=False)
        for adapter, output in zip(adapters, outputs, strict=True):
            print(f"{adapter.name if adapter else 'the model alone'}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
