"""Workers of one engine as Ray actors of its machine, so that Ray counts what they take."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from lamella.distributed.ray_cluster import connect, import_ray
from lamella.distributed.worker_channel import Channel
from lamella.distributed.workers import StartedWorker, Workers, meeting_folder
from lamella.errors import ConfigError

_START_SECONDS = 120.0
_KEY_BYTES = 32


class _Actor:
    """What a Ray actor runs: a worker's whole life is one call."""

    def process_id(self) -> int:
        return os.getpid()

    def serve(self, address: str, key: bytes) -> None:
        import importlib

        # By its name, as it imports what imports this file.
        serve = importlib.import_module("lamella.distributed.worker_process").serve
        connection = Client(address, family="AF_UNIX", authkey=key)
        assert isinstance(connection, Connection)
        serve(Channel(connection))


class _ActorHandle:
    def __init__(self, actor: Any, life: Any, process_id: int) -> None:
        self._actor, self._life, self._process_id = actor, life, process_id

    def exit_reason(self) -> str | None:
        ray = import_ray()
        try:
            done, _ = ray.wait([self._life], timeout=0)
            if not done:
                return None
            ray.get(self._life)
        except Exception as error:  # whatever Ray says of an actor's end
            return f"Ray says of its actor (process {self._process_id}): {type(error).__name__}"
        return "its actor returned"

    def end(self, seconds: float) -> None:
        ray = import_ray()
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Exception):  # it may be gone, or Ray may be
            ray.wait([self._life], timeout=max(0.0, deadline - time.monotonic()))
            ray.kill(self._actor, no_restart=True)
        while _is_there(self._process_id) and time.monotonic() < deadline + 5.0:
            time.sleep(0.02)


def _is_there(process_id: int) -> bool:
    """Whether the process runs; one that ended and that nobody has asked for yet does not."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_actors(
    settings: dict[str, Any], num_workers: int, timeout_seconds: float, options: Mapping[str, Any]
) -> Workers:
    """options: `ray_actor_options`. All are placed on this machine, where the engine is: sums are taken over its
    loopback interface. Raises ConfigError where Ray does not give what is asked for."""
    ray = connect()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    made = ray.remote(_Actor).options(**{"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": here, **options})
    folder = meeting_folder()
    started: list[StartedWorker] = []
    actors: list[Any] = []
    try:
        actors = [made.remote() for _ in range(1, num_workers)]
        try:
            process_ids = ray.get([actor.process_id.remote() for actor in actors], timeout=_START_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise ConfigError(
                f"tensor_parallel_size={num_workers} with ray_actor_options={dict(options)}: Ray has not started "
                f"{num_workers - 1} such actors on this machine within {_START_SECONDS:.0f} s, of which it has free "
                f"{ray.available_resources()}; ask for less"
            ) from error
        for rank, (actor, process_id) in enumerate(zip(actors, process_ids, strict=True), 1):
            key = os.urandom(_KEY_BYTES)
            address = str(folder / f"worker-{rank}")
            with Listener(address, family="AF_UNIX", authkey=key) as listener:
                life = actor.serve.remote(address, key)
                listener._listener._socket.settimeout(_START_SECONDS)  # type: ignore[attr-defined]
                connection = listener.accept()
            assert isinstance(connection, Connection)
            channel = Channel(connection, send_seconds=timeout_seconds)
            started.append(StartedWorker(rank, _ActorHandle(actor, life, process_id), channel))
            channel.send_settings({**settings, "rank": rank, "num_workers": num_workers, "folder": str(folder)})
    except BaseException:
        Workers(started, folder, timeout_seconds=timeout_seconds).close()
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        raise
    return Workers(started, folder, timeout_seconds=timeout_seconds)
