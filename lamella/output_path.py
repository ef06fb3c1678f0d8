"""Whether a file can be written, asked before the run that makes its content."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lamella.errors import ConfigError


def check_output_path(name: str, path: str | Path | None) -> None:
    """Raise ConfigError, under the argument's name, unless a file can be written there. Leaves no trace."""
    if path is None:
        return
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{name}={str(path)!r}: its folder does not exist; create it first")
    try:
        existed = path.exists()
        if existed and not (path.is_file() or path.is_dir()):
            return  # a device or a pipe: opening it may wait for whoever reads
        with path.open("ab"):
            pass
        if not existed:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={str(path)!r} cannot be written ({error}); give another file") from error
