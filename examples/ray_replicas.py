"""Two engines on Ray behind one LLM: the same call, and the same outputs as of one.

    pip install ".[ray]"
    python examples/ray_replicas.py [model]

Prompts that begin alike go to the same engine, which then has their beginning cached.
"""

import sys

from lamella import LLM, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"
BEGINNINGS = [
    "A sliding window remembers the last tokens alone, and what lies before them is forgotten. Question: ",
    "A tree of prefixes keeps what several prompts begin with, and computes it once. Question: ",
]
QUESTIONS = ["why?", "how long?", "what does it cost?", "who said so?"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    prompts = [beginning + question for question in QUESTIONS for beginning in BEGINNINGS]
    with LLM(
        model,
        data_parallel_size=2,
        distributed_executor_backend="ray",
        ray_actor_options={"num_cpus": 0.5},  # both fit a machine of few cores
        max_model_len=1024,
    ) as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=16, seed=0)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        for index, counters in enumerate(llm.engine.counters()):
            print(f"engine {index}: {counters['num_cached_tokens']} of {counters['num_prompt_tokens']} tokens cached")


if __name__ == "__main__":
    main()
