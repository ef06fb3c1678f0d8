"""lm-evaluation-harness on lamella: a multiple-choice task from a local file.

    pip install lm_eval
    python examples/evaluate.py [model]

The questions of one task share prefixes, which are computed once.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

from lamella import LLM
from lamella.integrations.lm_eval import lm_eval_model

DEMO_MODEL = "demo:gemma-3-270m"
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0},
    {"question": "Water is made of hydrogen and", "choices": [" iron", " oxygen"], "answer": 1},
    {"question": "Two plus two is", "choices": [" four", " nine"], "answer": 0},
]
TASK = """\
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEMO_MODEL
    with tempfile.TemporaryDirectory() as folder, LLM(model, max_model_len=512) as llm:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
        (Path(folder) / "local_choices.yaml").write_text(TASK.format(data=data))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        found = lm_eval.simple_evaluate(model=lm_eval_model(llm), tasks=["local_choices"], task_manager=tasks)
    print(f"accuracy: {found['results']['local_choices']['acc,none']:.2f} of {len(QUESTIONS)} questions")


if __name__ == "__main__":
    main()
