"""Facts from free text as JSON of a given shape: every answer that is complete fits the schema.

    python examples/structured_extraction.py [model]

The schema also says what the model may leave out. An answer that max_tokens cuts off is not complete, and is told apart
by its finish_reason.
"""

import json
import sys

from lamella import LLM, SamplingParams
from lamella.sampling_params import StructuredOutputsParams

DEMO_MODEL = "demo:gemma-3-270m"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1, "maximum": 2100},
        "kind": {"enum": ["city", "person", "machine"]},
    },
    "required": ["name", "year", "kind"],
    "additionalProperties": False,
}
TEXTS = [
    "Rome is said to have been founded in 753.",
    "Ada Lovelace, born in 1815, wrote of engines that weave algebra.",
    "In 1946 a machine named ENIAC filled a room in Philadelphia.",
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    prompts = [f"Text: {text}\nThe facts as JSON: " for text in TEXTS]
    # Without this a small model may write spaces between two keys until max_tokens ends it.
    tight = {"disable_any_whitespace": True}
    with LLM(model, max_model_len=1024, structured_outputs_config=tight) as llm:
        for text, output in zip(TEXTS, llm.generate(prompts, params, use_tqdm=False), strict=True):
            answer = output.outputs[0]
            if answer.finish_reason == "stop":
                print(f"{text}\n  -> {json.dumps(json.loads(answer.text))}")
            else:
                print(f"{text}\n  -> cut off by max_tokens: {answer.text!r}")


if __name__ == "__main__":
    main()
