"""Complete several prompts at once. Prompts of different lengths share every step of the engine.

python examples/offline_batch.py [model]
"""

import sys

from lamella import LLM, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"
PROMPTS = [
    "The capital of France is",
    "A sliding window remembers",
    "Once upon a time, in a house by the sea,",
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=0)
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
