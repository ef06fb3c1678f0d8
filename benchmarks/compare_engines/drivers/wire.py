"""How a driver is asked and answers: lines of JSON on standard input and output.

Drivers are run as scripts by other engines' interpreters (3.10 or newer), which find this neighbour and nothing else
of lamella. The first line asks to load, {"load": settings}; each further one to run, {"prompts": [[id, ...], ...],
"output_tokens": n, "shared_tokens": how many ids all prompts begin with}. A closed standard input ends the driver.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time


def serve(load, packages):
    """Answer until standard input ends.

    load: settings -> (generate, what to add to the settings that are reported). generate: (prompts, output_tokens,
    shared_tokens) -> token ids per request; its time is the one measured. packages: whose versions are reported.
    """
    # Engines print; what they print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    generate, settings = load(json.loads(sys.stdin.readline())["load"])
    _answer(answers, {"versions": _versions(packages), "settings": settings})
    for line in sys.stdin:
        question = json.loads(line)
        start = time.perf_counter()
        output = generate(question["prompts"], question["output_tokens"], question["shared_tokens"])
        seconds = time.perf_counter() - start
        _answer(answers, {"seconds": seconds, "output_token_ids": [list(map(int, tokens)) for tokens in output]})


def _answer(file, value):
    file.write(json.dumps(value) + "\n")
    file.flush()


def _versions(packages):
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
