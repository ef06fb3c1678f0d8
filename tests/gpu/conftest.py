"""Tests of what only a GPU can show: `pytest -m gpu tests/gpu`."""

# Where there is no GPU these are collected all the same; Triton's interpreter is switched on before it is imported.
import tests.helpers.triton_interpreter  # noqa: F401
