import tests.helpers.triton_interpreter  # noqa: F401
