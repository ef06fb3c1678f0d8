"""The Ray cluster that lamella's processes run on: one that is there, or one of this machine alone."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

from lamella.distributed.worker_group import LOOPBACK
from lamella.errors import ConfigError


def import_ray() -> Any:
    """Raises ConfigError where Ray is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            'distributed_executor_backend="ray" needs Ray, which is not installed: pip install "ray[data,serve]"'
        ) from error


def connect() -> Any:
    """Ray, connected: to the cluster that this process is connected to or that RAY_ADDRESS names, else to a new one of
    this machine, which listens on the loopback interface alone and ends with this process."""
    ray = import_ray()
    if ray.is_initialized():
        return ray
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return ray
    with _loopback_alone():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address=LOOPBACK,
            _system_config={"worker_niceness": 0},  # Ray's 15 is for what runs beside the main work; here it is that
        )
    return ray


@contextlib.contextmanager
def _loopback_alone() -> Iterator[None]:
    """Ray takes a loopback address for a slip, puts the machine's own in its place and listens on all interfaces,
    unless it is told that there will be no other machines. Where its release has no such switch, this does nothing."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    was_cluster = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if was_cluster is None:
        yield
        return
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = was_cluster
