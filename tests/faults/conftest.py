"""How often the tests of this folder kill something."""

import random

import pytest


@pytest.fixture
def fault_rounds(request: pytest.FixtureRequest) -> int:
    """Of all kills, which the tests share: ``--fault-rounds``."""
    rounds: int = request.config.getoption("--fault-rounds")
    return max(4, rounds)


@pytest.fixture
def chance(fault_rounds: int) -> random.Random:
    """Draws the same points in time in CI, and others where more rounds are asked for."""
    return random.Random(fault_rounds)
