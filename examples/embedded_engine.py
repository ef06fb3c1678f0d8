"""Run the engine inside your own loop: requests come and go while others are being generated.

python examples/embedded_engine.py [model]
"""

import sys

from lamella import Engine, EngineConfig, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with Engine(EngineConfig(model=model, max_num_seqs=8)) as engine:
        engine.add_request("first", "The sea was calm, and", params)
        engine.add_request("unwanted", "This one is cancelled before it ends:", params)
        num_steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    print(f"step {num_steps:3}: {output.request_id} finished: {output.outputs[0].text!r}")
            num_steps += 1
            if num_steps == 5:
                engine.add_request("late", "A request that joins a running batch", params)
            if num_steps == 10:
                for output in engine.abort("unwanted"):
                    print(f"step {num_steps:3}: {output.request_id} aborted after {output.outputs[0].text!r}")
        print(f"done: {engine.stats().num_generated_tokens} tokens in {engine.stats().num_steps} steps")


if __name__ == "__main__":
    main()
