"""Answer a file of rows by two engines on Ray. Run it again after a kill: what was answered is not run again.

    pip install ".[ray]"
    python examples/ray_batch.py in.jsonl out-folder [model]

Rows are {"custom_id": ..., "prompt": ...}, or with "messages", beside other keys. Answers are written as Parquet files,
and those of bad rows say what is wrong. The folder out-folder.checkpoint keeps what was answered.
"""

import sys

from lamella.ray import batch_inference

DEMO_MODEL = "demo:gemma-3-270m"


def main() -> None:
    in_path, out_path = sys.argv[1:3]
    model = sys.argv[3] if len(sys.argv) > 3 else DEMO_MODEL
    answers = batch_inference(
        in_path,
        model,
        sampling_params={"temperature": 0.8, "max_tokens": 32},
        num_actors=2,
        ray_actor_options={"num_cpus": 0.5},  # both fit a machine of few cores
        checkpoint_path=f"{out_path}.checkpoint",
        max_model_len=1024,
    ).materialize()
    answers.write_parquet(out_path, mode="overwrite")
    num_errors = sum(row["error"] is not None for row in answers.iter_rows())
    print(f"{answers.count()} rows in {out_path}, {num_errors} errors")


if __name__ == "__main__":
    main()
