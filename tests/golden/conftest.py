"""``pytest tests/golden --renew`` writes the logs anew; read the difference before you commit."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write tests/golden/logs anew")


@pytest.fixture
def renew(request: pytest.FixtureRequest) -> bool:
    """Whether logs are written instead of compared."""
    return bool(request.config.getoption("--renew", default=False))
