from collections.abc import Iterator

import pytest

from kunserve_extras.torch_body.cuda.driver import Driver
from tests.fakecuda.library import FakeCuda, build


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    return Driver(library=build())
