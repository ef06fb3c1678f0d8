import pytest

from tests.helpers.triton_interpreter import one_thread  # noqa: F401


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = [report for report in terminalreporter.stats.get("passed", []) if "/test_triton_" in report.nodeid]
    cases = sum(value for report in passed for name, value in report.user_properties if name == "kernel_cases")
    if cases:
        terminalreporter.write_line(f"triton kernels: {cases} cases of kernel x shape x window")
