"""How fast KV goes to host memory and back, for swapping and parking."""

import pytest

from kunserve.core.errors import ConfigError
from kunserve.engine.memory import copy_rate
from kunserve.engine.memory.copy_rate import measure_copy_rate
from kunserve_extras.torch_body.cuda import copy_rate as device_copies
from kunserve_extras.torch_body.cuda.cards import STAND_IN
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.pages import DevicePages
from kunserve_extras.torch_body.cuda.staging import Staging
from tests.fakecuda.library import FakeCuda, build


def test_a_devices_own_copies_are_timed_by_a_process_of_its_own() -> None:
    fake = FakeCuda()
    assert measure_copy_rate(f"{STAND_IN}{build()}") > 0.0
    assert fake.num_calls == 0, "this process has not entered the device"
    with pytest.raises(ConfigError, match="cannot time copies of stand-in:nowhere"):
        measure_copy_rate(f"{STAND_IN}nowhere")


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_is_timed_is_what_instances_do(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda()
    if not is_pinned:
        fake.refuse_pinning()
    done: list[str] = []
    for kind, name in ((Staging, "read"), (Staging, "write"), (Driver, "copy_in")):
        copy = getattr(kind, name)

        def noted(*arguments: object, name: str = name, copy: object = copy) -> None:
            done.append(name)
            copy(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(kind, name, noted)
    for module in (copy_rate, device_copies):
        monkeypatch.setattr(module, "COPY_BYTES", 1 << 20)
    assert device_copies.rate_of(build()) > 0.0
    if is_pinned:
        assert done == ["copy_in"] * copy_rate.NUM_COPIES
    else:
        assert done == ["write", "copy_in"] * copy_rate.NUM_COPIES + ["read"] * copy_rate.NUM_COPIES
    assert fake.left() == {} and fake.used_bytes == 0


def test_a_cpu_copies_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_rate, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(DevicePages, "__init__", None)
    assert measure_copy_rate() > 0.0
