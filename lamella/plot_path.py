"""Whether a plot can be written, asked before the run."""

from __future__ import annotations

from pathlib import Path

from lamella.errors import ConfigError
from lamella.output_path import check_output_path


def check_plot_path(path: str | Path | None) -> None:
    """Raise ConfigError now rather than after the run: matplotlib is missing, the name does not end in .png, or the
    file cannot be written."""
    if path is None:
        return
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"plot={str(path)!r}: plots are PNG files; give a name that ends in .png")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            'a plot needs matplotlib, which is not installed; run: pip install ".[bench]" in a clone of lamella'
        ) from error
    check_output_path("plot", path)
