"""Triton's kernels run here in its interpreter, unless there is a GPU. Which of the two is settled when triton is
imported, and one process cannot do both: tests that compile kernels start processes of their own."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before its interpreter could be switched on")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The shapes here are tiny: waking a second thread costs more than it computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
