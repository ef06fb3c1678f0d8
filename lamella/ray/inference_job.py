"""A data set of Ray, answered by a pool of engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from lamella.argument_checks import WholeRange, shown
from lamella.distributed.ray_cluster import connect
from lamella.distributed.replicated_engine import actor_options
from lamella.engine.config import EngineConfig
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import ConfigError
from lamella.ray.batch_actor import LamellaBatches, sampling_defaults
from lamella.ray.batch_checkpoint import KEY_COLUMN, BatchCheckpoint
from lamella.ray.jsonl_rows import read_jsonl
from lamella.ray.row_tables import data_rows

_MOST_LOSSES = 3  # of actors by one batch
_BATCHES_AHEAD = 2  # that lie ready for an actor, beside those that it runs
_BATCHES_TOGETHER = 2  # of which the second fills the engine while the first comes to its end
_MOST_READS = 64  # tasks that read a checkpoint
_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources")
_COUNT, _ROWS = WholeRange(1, 2**14), WholeRange(1, 2**20)


def batch_inference(
    dataset: Any,
    model: str,
    *,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    num_actors: int | tuple[int, int] = 1,
    batch_size: int = 256,
    ray_actor_options: Mapping[str, Any] | None = None,
    checkpoint_path: str | Path | None = None,
    **engine_arguments: Any,
) -> Any:
    """The Dataset of answered rows, which is lazy as all of Ray's are: rows run when it is written, iterated over or
    materialised. Rows and answers are those of LamellaBatches; other columns are carried through.

    dataset: a Dataset, or the path of a .jsonl, .jsonl.gz or .parquet file, or several paths of one kind. Of a path, a
    line that is no JSON is an error of its row (`read_jsonl`). num_actors: engines, or the fewest and the most of them.
    batch_size: rows that an actor takes at a time; several times max_num_seqs keeps its engine full. ray_actor_options:
    num_cpus, num_gpus, memory and resources of each engine, times tensor_parallel_size. checkpoint_path: a folder which
    every machine sees; rows that it has answers to are not run again, and are in the result with the others. Rows must
    then differ in custom_id, or, without one, in content.

    An actor that is lost is started again, and its batches run again; a batch by which three are lost after the first
    ends the job. Raises ConfigError, and RequestError for sampling_params, before anything is started.
    """
    is_pair = isinstance(num_actors, (tuple, list)) and len(num_actors) == 2
    given: Any = num_actors
    ends: Sequence[Any] = given if is_pair else (given, given)
    low, high = (_COUNT.check("num_actors", one, ConfigError) for one in ends)
    if low > high:
        raise ConfigError(f"num_actors={num_actors}: the fewest are more than the most; give (fewest, most)")
    _ROWS.check("batch_size", batch_size, ConfigError)
    defaults = sampling_defaults(sampling_params)
    config = EngineConfig(model=model, ray_actor_options=ray_actor_options, **engine_arguments)
    if config.data_parallel_size != 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size}: each actor has one engine; give num_actors instead"
        )
    options = actor_options(config)
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ConfigError(f"ray_actor_options has {', '.join(unknown)}: engines take {', '.join(_OPTIONS)}")
    checkpoint = None if checkpoint_path is None else BatchCheckpoint(checkpoint_path)
    if checkpoint is not None:
        checkpoint.open_for({"model": model, "seed": config.seed, "sampling_params": defaults})
    ray = connect()
    rows, answered = _dataset_of(dataset), None
    if checkpoint is not None and (done := checkpoint.done()):
        parts = [{"path": str(path)} for path in checkpoint.parts()]
        answered = ray.data.from_items(parts, override_num_blocks=min(len(parts), _MOST_READS)).map_batches(
            _parts, batch_size=1, batch_format="pyarrow"
        )
        rows = rows.map_batches(
            _left, batch_format="pyarrow", batch_size=None, fn_kwargs={"done": ray.put(frozenset(done))}
        )
    # Blocks are what actors are given, and what is lost with one: a whole file may be one.
    made = rows.repartition(target_num_rows_per_block=batch_size, strict=True).map_batches(
        LamellaBatches,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            min_size=low,
            max_size=high,
            max_tasks_in_flight_per_actor=_BATCHES_TOGETHER + _BATCHES_AHEAD,
            max_concurrent_calls_per_actor=_BATCHES_TOGETHER,
            enable_true_multi_threading=True,
        ),
        fn_constructor_kwargs={
            "model": model,
            "sampling_params": sampling_params,
            "checkpoint_path": None if checkpoint is None else str(checkpoint.folder),
            **engine_arguments,
        },
        max_restarts=-1,
        max_task_retries=_MOST_LOSSES,
        **options,
    )
    return made if answered is None else answered.union(made)


def _dataset_of(given: Any) -> Any:
    from ray.data import Dataset, read_parquet

    if isinstance(given, Dataset):
        return given
    paths = [given] if isinstance(given, (str, Path)) else given
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(one, (str, Path)) for one in paths):
        raise ConfigError(f"dataset={shown(given)}: give a Dataset of Ray, or paths of .jsonl or .parquet files")
    if all(Path(path).suffix == ".parquet" for path in paths):
        return read_parquet([str(path) for path in paths])
    if all(str(path).removesuffix(".gz").endswith(".jsonl") for path in paths):
        return read_jsonl(paths)
    raise ConfigError(f"dataset={shown(given)}: give .jsonl files, or .parquet files, or a Dataset of Ray")


def _parts(paths: pyarrow.Table) -> Iterator[pyarrow.Table]:
    """Each file with its own types, which Ray brings together: a column that is null in one may be text in others."""
    for path in paths.column("path").to_pylist():
        yield pyarrow.parquet.read_table(path).drop_columns([KEY_COLUMN])


def _left(table: pyarrow.Table, done: Any) -> pyarrow.Table:
    """The rows that are not done."""
    import ray

    known = ray.get(done) if isinstance(done, ray.ObjectRef) else done
    return table.filter(pyarrow.array([row.key not in known for row in data_rows(table)], type=pyarrow.bool_()))
