"""A worker beside the engine: loads its shard of the model, then computes the plans that it is sent, until its channel
is closed."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from lamella.distributed.plan_message import decode_plan
from lamella.distributed.worker_channel import Channel
from lamella.distributed.worker_group import WorkerGroup, join_group
from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import choose_device, load_shard
from lamella.model_executor.runner import ModelRunner

logger = logging.getLogger(__name__)

_AGREE_SECONDS = 3600.0  # the engine closes the channel if anything happens to it


def serve(channel: Channel, device_name: str | None = None) -> None:
    """Do all that a worker does. device_name: instead of the one that its rank has."""
    settings = channel.receive_settings()
    rank, num_workers = settings["rank"], settings["num_workers"]
    try:
        config = EngineConfig(**settings["config"])
        device = choose_device(config.device if device_name is None else device_name, rank)
        seconds = config.distributed_timeout_seconds
        group = join_group(Path(settings["folder"]), rank, num_workers, device=device, timeout_seconds=seconds)
        runner = _load(config, group, channel, device_name)
        while True:
            try:
                message = channel.receive()
            except (EOFError, OSError):
                return
            runner.compute(decode_plan(message))
    except BaseException as error:
        try:
            channel.send_failure(f"{type(error).__name__}: {error}")
        except OSError:
            logger.debug("worker %d ends, and nobody listens", rank, exc_info=True)


def _load(config: EngineConfig, group: WorkerGroup, channel: Channel, device_name: str | None) -> ModelRunner:
    def agree(number: int) -> int:
        channel.send_number(number)
        return channel.receive_number(time.monotonic() + _AGREE_SECONDS)

    shard = load_shard(config, group, agree, device_name)
    return shard.make_runner()


def main() -> None:
    """Of a process that the engine starts, with the number of its channel's descriptor."""
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    serve(Channel(Connection(int(sys.argv[1]))))


def _end_with_the_engine() -> None:
    """Standard input is a pipe whose other end the engine's process has, and never writes to."""
    os.read(0, 1)
    os._exit(0)
