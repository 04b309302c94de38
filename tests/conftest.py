"""Markers, the environment tests run in, and the rule that CI skips nothing for want of a tool.

Shared helpers are modules of this folder (``tests`` is on ``sys.path``); what several folders of tests
need as a fixture stands here.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

HARDWARE_MARKERS = {"gpu": 1, "two_gpu": 2}
"""Marker to the number of CUDA devices that a test needs."""

IN_CI = os.environ.get("CI", "").lower() == "true"

# Two cores shared with other work: a slow example is no failure. In CI every run draws the same examples.
settings.register_profile("mlaprep", deadline=None, derandomize=IN_CI, print_blob=True)
settings.load_profile("mlaprep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=5, help="mixed traffic on one server (tests/faults)")
    parser.addoption("--openapi-examples", type=int, default=15, help="requests drawn for each call (tests/service)")
    parser.addoption("--soak-out", default="", help="where the record of that run goes, as JSON")
    parser.addoption("--fault-rounds", type=int, default=20, help="kills of processes at random points (tests/faults)")


def cuda_devices() -> int:
    """CUDA devices that torch can use; 0 where torch is absent or a CPU build."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {
        item: max((n for m, n in HARDWARE_MARKERS.items() if item.get_closest_marker(m)), default=0) for item in items
    }
    if not any(needs.values()):
        return
    present = cuda_devices()
    for item, wanted in needs.items():
        if wanted > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {present}"))


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, hardware: bool) -> None:
    """Under CI a skip for anything but missing hardware is a failure: a missing tool must not pass for green."""
    if IN_CI and report.skipped and not hardware and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped under CI, where everything but a GPU must be there: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report, hardware=any(item.get_closest_marker(marker) for marker in HARDWARE_MARKERS))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report, hardware=False)
    return report


@pytest.fixture(scope="session", autouse=True)
def private_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting of the developer's reaches a test, and no test reaches the developer's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLAPREP_")]:
            patch.delenv(name)
        patch.setenv("MLAPREP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parent.parent
