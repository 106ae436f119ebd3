"""What the tests on GPUs found is kept: ``pytest tests/gpu --results FILE`` appends a line of JSON for each."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="file to which each test appends its outcome and errors, as JSON")
    parser.addoption("--small", action="store_true", help="models and runs of the smallest sizes that show the same")


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Whether sizes are to be the smallest that show the same."""
    chosen: bool = request.config.getoption("--small")
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    path: Path | None = item.config.getoption("--results", default=None)
    if path is not None and (report.when == "call" or report.outcome != "passed"):
        found: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found | dict(report.user_properties)) + "\n")
    return report
