"""Stands in for lamella.LLM: answers at once, and remembers what it was asked."""

import time
from types import SimpleNamespace

from lamella import CompletionOutput, EngineConfig, RequestOutput


class FakeLLM:
    """Each prompt is answered with max_tokens times the token 7; every prompt after a call's first is
    said to have had `cached_tokens` cached tokens."""

    cached_tokens = 2
    generate_seconds = 0.05
    load_seconds = 1.25

    def __init__(self, model, **engine_arguments):
        config = EngineConfig(model=model, **engine_arguments)
        self.calls = []
        self.is_closed = False
        self.model_config = SimpleNamespace(vocab_size=100)
        self.engine = SimpleNamespace(
            max_model_len=config.max_model_len or 4096,
            stats=lambda: SimpleNamespace(peak_pages={"full": 12, "window_512": 3}),
        )
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.is_closed = True

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])

    def generate(self, prompts, sampling_params, use_tqdm=True, lora_request=None):
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        self.calls.append((prompts, params))
        time.sleep(self.generate_seconds)
        return [self._answer(i, prompt, one) for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))]

    def _answer(self, index, prompt, params):
        text = prompt if isinstance(prompt, str) else None
        ids = self.get_tokenizer().encode(text) if text is not None else prompt
        completion = CompletionOutput(0, "seven " * params.max_tokens, [7] * params.max_tokens, finish_reason="length")
        return RequestOutput(
            request_id=str(index),
            prompt=text,
            prompt_token_ids=ids,
            outputs=[completion],
            finished=True,
            num_cached_tokens=self.cached_tokens if index else 0,
        )
