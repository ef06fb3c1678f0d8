"""Pin anew what the code does now. Where a change is meant to change it, the commit says why.

PYTHONPATH=benchmarks python -m tests.pins.make NAME...

counters take seconds; log_probabilities are of the builds of the native kernels that this processor can run; steps;
compiled takes minutes, and is for the Triton that is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tests.pins import compiled, counters, log_probabilities, steps, stored

MAKERS: dict[str, Callable[[], dict[str, object]]] = {
    "counters": counters.count_all,
    "compiled": compiled.compile_all,
    "log_probabilities": log_probabilities.measure_all,
    "steps": steps.measure_all,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pinned values anew.")
    parser.add_argument("names", nargs="+", choices=list(MAKERS))
    for name in parser.parse_args().names:
        print(stored.store(name, MAKERS[name]()))


if __name__ == "__main__":
    main()
