"""A long system prompt is computed once, kept in a file, and loaded by every later process.

    python examples/saved_prefix.py [model [file]]

The first run computes and saves it; the next ones load it, and their first request finds it in the cache. The file is
tied to the model, its weights' form and the KV's: for another it is refused.
"""

import sys
from pathlib import Path

from lamella import LLM, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"
SYSTEM_PROMPT = "You answer questions about the sea. " + " ".join(f"Fact {number} is known." for number in range(40))
QUESTION = "\nQuestion: why is it salty?\nAnswer:"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    path = Path(sys.argv[2] if len(sys.argv) > 2 else "sea.prefix")
    with LLM(model, max_model_len=2048) as llm:
        # Tokens, so that the prompt begins with just those of the prefix.
        prefix = llm.get_tokenizer().encode(SYSTEM_PROMPT)
        if path.exists():
            loaded = llm.load_prefix(path)
            print(f"loaded {len(loaded.token_ids)} tokens from {path} ({loaded.file_bytes:,} bytes)")
        else:
            saved = llm.save_prefix(path, {"prompt_token_ids": prefix})
            print(f"computed {len(saved.token_ids)} tokens and saved them in {path} ({saved.file_bytes:,} bytes)")
        question = llm.get_tokenizer().encode(QUESTION, add_special_tokens=False)
        params = SamplingParams(temperature=0, max_tokens=24)
        [output] = llm.generate({"prompt_token_ids": prefix + question}, params, use_tqdm=False)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens came from the cache")
        print(output.outputs[0].text.strip())


if __name__ == "__main__":
    main()
