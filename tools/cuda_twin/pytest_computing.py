"""A plugin of pytest (`-p cuda_twin.pytest_computing`) for a process of the twin: within a test the device computes."""

from collections.abc import Generator

import pytest

from cuda_twin.computing import Computing


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Around each test's own code, not its fixtures."""
    with Computing():
        yield
