from tests.helpers.triton_interpreter import one_thread  # noqa: F401
