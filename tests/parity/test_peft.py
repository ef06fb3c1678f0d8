"""Adapters against PEFT itself: five in one batch, of each of several families, with prompts cached and not."""

import json

import pytest
from safetensors.torch import save_file

from lamella import LLM, LoRARequest, SamplingParams
from tests.helpers.tiny_decoders import save_tiny_decoder
from tests.helpers.tiny_gemma import VOCAB_SIZE, save_tiny_gemma
from tests.parity.peft_models import FIXTURE, MODELS, NUM_TOKENS_APART, adapter_values, prompt_of

CASES = json.loads(FIXTURE.read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_pefts(tmp_path, name):
    if name == "gemma3":
        save_tiny_gemma(tmp_path)
    else:
        save_tiny_decoder(tmp_path, name)
    requests = []
    for index, case in enumerate(CASES[name]):
        folder = tmp_path / f"adapter{index}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(case["config"]))
        tensors = {key: adapter_values(key, shape) for key, shape in case["shapes"].items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        requests.append(LoRARequest(f"adapter{index}", index + 1, folder))
    prompts = [prompt_of(index) for index in range(len(requests))]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB_SIZE)
    with LLM(tmp_path, enable_lora=True, max_model_len=128, kv_cache_memory_bytes=1 << 24) as llm:
        cold, warm = (llm.generate(prompts, params, lora_request=requests, use_tqdm=False) for _ in range(2))
    assert [output.num_cached_tokens for output in cold] == [0] * 5
    assert [output.num_cached_tokens for output in warm] == [len(prompt) - 1 for prompt in prompts]
    for outputs in (cold, warm):
        for output, case in zip(outputs, CASES[name], strict=True):
            (found,) = output.outputs[0].logprobs
            ours = [found[token].logprob for token in range(0, VOCAB_SIZE, NUM_TOKENS_APART)]
            assert ours == pytest.approx(case["logprobs"], abs=3e-4)
