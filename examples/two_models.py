"""Two models in one process, each with an engine, a KV memory and a prefix cache of its own.

    python examples/two_models.py [model [other model]]

Steps alternate here; engines in two threads of an application do as well.
"""

import sys

from lamella import Engine, SamplingParams

DEMO_MODELS = ["demo:gemma-3-270m", "demo:gemma-3-270m"]
PROMPT = "The sea was calm, and"


def main() -> None:
    models = [*sys.argv[1:], *DEMO_MODELS[len(sys.argv[1:]) :]]
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0.8, seed=1, max_tokens=16),
    ]
    engines = [Engine(model=model, max_model_len=512, kv_cache_memory_bytes=64 * 2**20) for model in models]
    try:
        for engine, one in zip(engines, params, strict=True):
            engine.add_request("a", PROMPT, one)
        while any(engine.has_unfinished_requests() for engine in engines):
            for number, engine in enumerate(engines):
                for output in engine.step():
                    if output.finished:
                        print(f"model {number}: {PROMPT}{output.outputs[0].text}")
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
