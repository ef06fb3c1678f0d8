"""What lies in the cache folder, for listing it and for clearing it.

Only files with names as lamella gives them are listed and removed, for the folder may hold other things.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lamella.model_executor.weights.cache_folder import remove_entry, sum_path
from lamella.model_executor.weights.cache_parts import PART_SUFFIX, is_abandoned
from lamella.model_executor.weights.checksums import read_sum
from lamella.model_executor.weights.demo_models import DEMO_FOLDER, DEMO_PREFIX, demo_file_names

CACHE_KINDS = ("weights", "tokenizer", "demo", "unfinished")
_FOLDER = re.compile(r"(.*)-[0-9a-f]{20}")
_FILE = re.compile(r"(weights|tokenizer)(-.*)?-[0-9a-f]{20}\.(safetensors|json)")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """model: the path that it was made from, where that is noted; form: what tells entries of a model apart.
    made_at: seconds since the epoch."""

    path: Path
    kind: str
    model: str
    form: str
    num_bytes: int
    made_at: float

    def age_days(self, now: float) -> float:
        return (now - self.made_at) / 86400


def list_cache(cache_dir: Path) -> list[CacheEntry]:
    """All entries in `cache_dir`, the largest first. What a running process is still writing is left out."""
    entries = []
    for path in sorted(cache_dir.glob("*/*")):
        with suppress(OSError):  # gone meanwhile, or another user's
            entry = _entry(path)
            if entry is not None:
                entries.append(entry)
    return sorted(entries, key=lambda entry: -entry.num_bytes)


def clear_cache(cache_dir: Path, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Remove `entries`, and folders that are empty then. Returns the entries that were removed."""
    removed = []
    for entry in entries:
        remove_entry(entry.path)
        if not entry.path.exists():
            removed.append(entry)
        with suppress(OSError):  # not empty
            entry.path.parent.rmdir()
    return removed


def cache_report(cache_dir: Path, entries: Sequence[CacheEntry], *, now: float | None = None) -> str:
    now = time.time() if now is None else now
    total = sum(entry.num_bytes for entry in entries)
    lines = [f"{cache_dir}: {len(entries)} entries, {total / 1e9:.2f} GB"]
    if entries:
        lines.append(f"{'GB':>8}  {'days old':>8}  {'kind':<10}  {'form':<16}  model")
    lines += [
        f"{entry.num_bytes / 1e9:8.2f}  {entry.age_days(now):8.1f}  {entry.kind:<10}  {entry.form:<16}  {entry.model}"
        for entry in entries
    ]
    if entries:
        lines.append("`lamella cache clear` removes them, with --model, --older-than and --kind some of them")
    return "\n".join(lines)


def _entry(path: Path) -> CacheEntry | None:
    state = path.lstat()
    folder = _FOLDER.fullmatch(path.parent.name)
    if path.parent.name == DEMO_FOLDER and path.name in demo_file_names():
        model = DEMO_PREFIX + demo_file_names()[path.name]
        return CacheEntry(path, "demo", model, path.suffix[1:], state.st_size, state.st_mtime)
    if folder is None and path.parent.name != DEMO_FOLDER:
        return None
    model = folder[1] if folder is not None else path.name
    if path.name.startswith(".") and path.suffix == PART_SUFFIX:
        if not is_abandoned(path):
            return None
        return CacheEntry(path, "unfinished", model, "", state.st_size, state.st_mtime)
    name = _FILE.fullmatch(path.name)
    if name is None:
        return None
    noted = read_sum(path) or {}
    num_bytes = state.st_size + (sum_path(path).stat().st_size if noted else 0)
    sources = noted.get("sources") or [model]
    return CacheEntry(path, name[1], _common(sources), (name[2] or "").strip("-"), num_bytes, state.st_mtime)


def _common(sources: Sequence[str]) -> str:
    """A file, or the folder of several."""
    return sources[0] if len(sources) == 1 else str(Path(sources[0]).parent)
