"""Speculation where a text repeats: an answer that is mostly its prompt again comes several tokens a step.

    python examples/speculative_edit.py [model]

The tokens are the same with and without: only the number of steps differs. No second model is needed, drafts come from
the request's own texts.
"""

import sys

from lamella import LLM, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"
CODE = """\
def total_price(items, tax):
    total = 0
    for item in items:
        total = total + item.price * item.count
    total = total + total * tax
    return total
"""
PROMPT = f"The function:\n{CODE}\nThe same function once more:\n{CODE}\nAnd a last time:\n"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    texts = []
    for speculative_config in (None, {"method": "suffix"}):
        with LLM(model, max_model_len=1024, speculative_config=speculative_config) as llm:
            [output] = llm.generate([PROMPT], params, use_tqdm=False)
            stats = llm.engine.stats()
        texts.append(output.outputs[0].text)
        label = "without" if speculative_config is None else "with"
        print(
            f"{label} speculation: {stats.num_generated_tokens} tokens in {stats.num_steps} steps, "
            f"{output.metrics.num_accepted_tokens} of {output.metrics.num_draft_tokens} drafts accepted"
        )
    print("the same text:" if texts[0] == texts[1] else "ANOTHER TEXT, which would be a fault:", repr(texts[1]))


if __name__ == "__main__":
    main()
