"""Data sets of Ray answered by lamella: `batch_inference`, and `LamellaBatches` for `Dataset.map_batches`."""

from lamella.distributed.ray_cluster import connect, import_ray

import_ray()  # says what to install, where it is not

from lamella.ray.batch_actor import LamellaBatches  # noqa: E402
from lamella.ray.inference_job import batch_inference  # noqa: E402
from lamella.ray.jsonl_rows import read_jsonl  # noqa: E402

__all__ = ["LamellaBatches", "batch_inference", "connect", "read_jsonl"]
