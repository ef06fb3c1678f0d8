"""The Ray cluster that lamella's processes run on: one that is there, or one of this machine alone."""

from __future__ import annotations

import importlib
import os
from typing import Any

from lamella.errors import ConfigError


def import_ray() -> Any:
    """Raises ConfigError where Ray is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            'distributed_executor_backend="ray" needs Ray, which is not installed: pip install "lamella[ray]"'
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
    ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    return ray
