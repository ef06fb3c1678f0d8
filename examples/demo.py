"""What `make demo` runs: complete a few prompts with a small model and say how fast it went."""

import time

from lamella import LLM, SamplingParams

MODEL = "demo:gemma-3-270m"
PROMPTS = [
    "The capital of France is",
    "The three primary colours are",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "In the beginning of the twentieth century, physics",
    "A recipe for bread: first,",
    "The largest planet of the solar system is",
    "My favourite season is autumn, because",
]
OUTPUT_TOKENS = 48


def main() -> None:
    print(f"Loading {MODEL} ...", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    with LLM(MODEL) as llm:
        start = time.perf_counter()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        seconds = time.perf_counter() - start

        for output in outputs:
            print(f"\nPrompt:     {output.prompt}\nCompletion:{output.outputs[0].text.rstrip()}")

        num_input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"\nTime to load: {llm.load_seconds:.2f} s")
        print(
            f"Throughput:   {num_input_tokens / seconds:.1f} input tokens/s, "
            f"{num_output_tokens / seconds:.1f} output tokens/s "
            f"({num_input_tokens} in, {num_output_tokens} out, {seconds:.2f} s)"
        )


if __name__ == "__main__":
    main()
