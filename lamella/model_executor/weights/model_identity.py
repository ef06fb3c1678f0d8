"""Whether two processes run the same model: a digest of what its files say, wherever they lie."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lamella.model_executor.weights.model_source import ModelSource
from lamella.model_executor.weights.regular_files import is_there, open_regular_file

_EDGE_BYTES = 1 << 20  # of a file's start, where the names and shapes of tensors are, and of its end
_SAMPLE_BYTES = 1 << 10
_NUM_SAMPLES = 1024


def model_identity(source: ModelSource) -> str:
    """Hexadecimal digest of the model's configuration and weights.

    Of each weight file it reads the length, the first and the last MiB and 1,024 places between, of a KiB each and at
    even distances: some milliseconds, however large the model. So every tensor of more than a thousandth of its file is
    looked at; an edit of less may go unseen. Raises ModelLoadError where a file is gone.
    """
    digest = hashlib.sha256(source.kind.encode())
    config = source.folder / "config.json"
    files = [*([config] if source.gguf_path is None and is_there(config) else []), *source.paths]
    for file in dict.fromkeys(files):
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    with open_regular_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        digest.update(num_bytes.to_bytes(8, "little"))
        stride = max(_SAMPLE_BYTES, num_bytes // _NUM_SAMPLES)
        places = [(start, _SAMPLE_BYTES) for start in range(_EDGE_BYTES, num_bytes - _EDGE_BYTES, stride)]
        for start, length in [(0, _EDGE_BYTES), *places, (max(0, num_bytes - _EDGE_BYTES), _EDGE_BYTES)]:
            file.seek(start)
            digest.update(file.read(length))
