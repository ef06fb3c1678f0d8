"""Chat in the terminal. Each turn resumes from the KV cache of the turns before it.

    python examples/chat.py [model]

An empty line or end of input stops. The demo model is a base model without a chat template, so one is given here;
an instruction-tuned model brings its own.
"""

import sys

from lamella import LLM, SamplingParams

DEMO_MODEL = "demo:gemma-3-270m"
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    template = PLAIN_TEMPLATE if model == DEMO_MODEL else None
    params = SamplingParams(temperature=0.7, max_tokens=128, stop=["\nUser:"], seed=0)
    messages: list[dict[str, str]] = []
    with LLM(model) as llm:
        for line in iter(lambda: read_line("You: "), ""):
            messages.append({"role": "user", "content": line})
            [output] = llm.chat(messages, params, chat_template=template, use_tqdm=False)
            reply = output.outputs[0].text.strip()
            messages.append({"role": "assistant", "content": reply})
            print(f"Model: {reply}")
            print(f"       ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached)")


def read_line(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
