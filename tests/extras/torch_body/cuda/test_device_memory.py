"""An instance's memory on a device: what is refused changes nothing, and nothing is lost."""

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kunserve.control.instance.body import UnitCopy
from kunserve.core.config import InstanceConfig
from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory import second_places
from kunserve.engine.memory.instance_memory import InstanceMemory, RemapFailed
from kunserve_extras.torch_body.cuda.driver import DeviceLost, Driver
from kunserve_extras.torch_body.cuda.pages import DevicePages
from kunserve_extras.torch_body.cuda.staging import Staging
from tests.direct_engine import prepare_all
from tests.fakecuda.library import KIB, MIB, FakeCuda
from tests.specs import model_spec

MODEL = model_spec(num_layers=6, hidden_size=32, intermediate_size=64, num_heads=1, num_kv_heads=1)
CONFIG = InstanceConfig(kv_cache_memory_bytes=64 * KIB, granule_bytes=8 * KIB)
WHOLE, MIDDLE = LayerRange(0, 6), LayerRange(2, 4)


class DeviceMemory(InstanceMemory):
    def __init__(self, driver: Driver) -> None:
        def open_pages(num_bytes: int, granule_bytes: int, _: int) -> DevicePages:
            return DevicePages(driver, num_bytes, granule_bytes)

        super().__init__(InstanceId(0), MODEL, CONFIG, 0, open_pages, backs_guard=True)

    def stamp(self) -> None:
        for layer in range(*self.held):
            self.write_layer(layer, 0, np.full(self.layer_bytes, layer + 1, dtype=np.uint8))
        units = np.repeat(np.arange(self.spec.kv_units, dtype=np.uint8), self.unit_bytes)
        self.write_units([(0, self.spec.kv_units)], units)

    def prove(self, layers: LayerRange) -> None:
        """Books and system agree, and what is held has its content."""
        self.check(ask_kernel=True)
        for layer in range(*layers):
            data = np.empty(self.layer_bytes, dtype=np.uint8)
            self.read_layer(layer, 0, data)
            assert (data == layer + 1).all(), layer
        units = np.empty((self.spec.kv_units, self.unit_bytes), dtype=np.uint8)
        self.read_units([(0, self.spec.kv_units)], units.reshape(-1))
        assert (units == np.arange(self.spec.kv_units)[:, None]).all()


@pytest.fixture
def memory(driver: Driver) -> Iterator[DeviceMemory]:
    made = DeviceMemory(driver)
    made.stamp()
    yield made
    made.close()


def test_a_drop_is_prepared_then_one_of_books(memory: DeviceMemory, fake: FakeCuda) -> None:
    assert prepare_all(memory, MIDDLE) is None
    memory.prove(WHOLE)
    calls = fake.num_calls
    remap = memory.drop(MIDDLE)
    assert fake.num_calls == calls, "a commit waits for the driver"
    assert remap.kv_units == memory.spec.units_when_holding(2)
    assert memory.arena.num_aliases > 0
    while memory.arena.num_aliases:
        memory.tidy()
    memory.prove(MIDDLE)
    assert prepare_all(memory, WHOLE) is None
    calls = fake.num_calls
    memory.reclaim(WHOLE)
    assert fake.num_calls == calls
    memory.prove(MIDDLE)


def test_what_is_called_off_costs_nothing(memory: DeviceMemory, fake: FakeCuda) -> None:
    prepare_all(memory, MIDDLE)
    calls = fake.num_calls
    assert prepare_all(memory, WHOLE) is None and fake.num_calls == calls
    memory.prove(WHOLE)
    # What is mapped already is used again.
    prepare_all(memory, MIDDLE)
    assert fake.num_calls - calls < 200
    memory.drop(MIDDLE)
    memory.prove(MIDDLE)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_drop", [True, False], ids=["drop", "restore"])
def test_a_refusal_at_any_call_leaves_the_old_state(
    driver: Driver, fake: FakeCuda, is_drop: bool, count: int
) -> None:
    old, new = (WHOLE, MIDDLE) if is_drop else (MIDDLE, WHOLE)

    def set_up() -> DeviceMemory:
        made = DeviceMemory(driver)
        made.stamp()
        if not is_drop:
            made.drop(MIDDLE)
            made.tidy()
        return made

    for after in range(200):
        memory = set_up()
        fake.refuse(after, count)
        refusal = prepare_all(memory, new)
        fake.refuse_nothing()
        assert memory.held == old
        memory.prove(old)
        if refusal is not None:
            assert "OUT_OF_MEMORY" in refusal
            assert prepare_all(memory, new) is None, "it cannot be done again"
        memory.drop(new) if is_drop else memory.reclaim(new)
        fake.refuse(0, count)
        memory.tidy()  # refused: the old addresses stay a little longer
        fake.refuse_nothing()
        memory.prove(MIDDLE)
        assert memory.held == new
        memory.close()
        assert not fake.left()
        if refusal is None:
            break
    assert after > 3, "nothing was refused"


def test_a_refusal_of_what_was_not_prepared_ends_the_instance(
    memory: DeviceMemory, fake: FakeCuda
) -> None:
    fake.refuse(3)
    with pytest.raises(RemapFailed):
        memory.drop(MIDDLE)
    memory.prove(WHOLE)


def test_addresses_that_cannot_be_unmapped_are_tried_again(
    memory: DeviceMemory, fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    memory.drop(MIDDLE)
    aliases = memory.arena.num_aliases
    fake.refuse(0, 5)
    for _ in range(5):
        memory.tidy()
    assert memory.arena.num_aliases == aliases
    assert caplog.text.count("cannot unmap old addresses") == 1
    memory.tidy()
    assert memory.arena.num_aliases < aliases
    memory.prove(MIDDLE)


def test_too_little_and_badly_cut_memory_are_refused(driver: Driver, fake: FakeCuda) -> None:
    with pytest.raises(
        TooLittleMemory,
        match=r"asks for .* and 0\.0 MiB for.*fake 0 has [\d.]+ MiB of 64\.0 MiB left",
    ):
        DevicePages(driver, 64 * MIB, 8 * KIB, 5)
    fake.refuse(after=30)
    with pytest.raises(TooLittleMemory, match=r"cannot give.*OUT_OF_MEMORY.*cuMemCreate"):
        DevicePages(driver, 1 * MIB, 8 * KIB)
    with pytest.raises(ConfigError, match="multiple of 4096"):
        DevicePages(driver, 1 * MIB, 6 * KIB)
    assert not fake.left()


def test_copies_between_units_are_in_order(memory: DeviceMemory) -> None:
    memory.copy_units((UnitCopy(3, 1, 1), UnitCopy(1, 0, 1)))
    data = np.empty(memory.unit_bytes, dtype=np.uint8)
    memory.read_units([(0, 1)], data)
    assert (data == 3).all()


def test_device_memory_is_not_viewed(memory: DeviceMemory) -> None:
    with pytest.raises(AssertionError, match="not in host memory"):
        memory.unit_view(0, 1)


@pytest.mark.parametrize("piece_bytes", [64, 1000, 1 << 16])
def test_bytes_pass_through_small_pieces(
    driver: Driver, memory: DeviceMemory, piece_bytes: int
) -> None:
    staging = Staging(driver, piece_bytes)
    base = memory.kv_base_address
    spans = [(base + 100, 700), (base + 5000, 1), (base + 900, 2999), (base, 0)]
    data = np.random.default_rng(1).integers(0, 256, 3700, dtype=np.uint8)
    staging.write(spans, data)
    into = np.zeros_like(data)
    staging.read(spans, into)
    assert (into == data).all()
    staging.close()


def test_any_thread_may_copy(memory: DeviceMemory) -> None:
    failures: list[BaseException] = []

    def work(unit: int) -> None:
        try:
            for value in range(20):
                data = np.full(memory.unit_bytes, value, dtype=np.uint8)
                memory.write_units([(unit, 1)], data)
                into = np.empty_like(data)
                memory.read_units([(unit, 1)], into)
                assert (into == data).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(unit,)) for unit in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_granule_goes_to_another_process(memory: DeviceMemory, driver: Driver) -> None:
    """That a mapping of it shows the same bytes is proven in ``test_driver``."""
    pages = memory.arena.pages
    assert isinstance(pages, DevicePages)
    fd = pages.export(3)
    handle = driver.import_(fd)
    driver.release(handle)
    os.close(fd)


def test_a_lost_device_is_no_refusal(memory: DeviceMemory, fake: FakeCuda) -> None:
    """Nobody waits for a better moment: there is none."""
    fake.spoil()
    with pytest.raises(DeviceLost):
        prepare_all(memory, MIDDLE)
    fake.spoil(0)
    assert prepare_all(memory, MIDDLE) is None
    memory.drop(MIDDLE)
    fake.spoil()
    with pytest.raises(DeviceLost):
        memory.tidy()
    fake.spoil(0)


def test_memory_is_prepared_and_left_some_granules_at_once(
    memory: DeviceMemory, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a step waits for is so much, and what it all took is known."""
    monkeypatch.setattr(second_places, "AT_ONCE", 4)
    assert memory.tidied_s == 0.0 and not memory.is_preparing
    pieces = 0
    while not pieces or memory.is_preparing:
        before, calls = memory.arena.num_aliases, fake.num_calls
        assert memory.prepare(MIDDLE) is None
        assert memory.arena.num_aliases - before <= 4 and fake.num_calls - calls <= 5
        memory.tidy()  # leaves alone what is wanted
        memory.prove(WHOLE)
        pieces += 1
    assert pieces > 3
    calls = fake.num_calls
    remap = memory.drop(MIDDLE)
    assert fake.num_calls == calls and remap.prepare_s > 0.0 and memory.tidied_s is None
    while memory.tidied_s is None:
        before = memory.arena.num_aliases
        memory.tidy()
        assert 0 < before - memory.arena.num_aliases <= 4
    assert memory.tidied_s > 0.0
    memory.prepare(WHOLE)
    assert memory.reclaim(WHOLE).moved_bytes < 0, "the rest is done at once"
    memory.prove(MIDDLE)


def test_nothing_is_mapped_while_copies_run(memory: DeviceMemory, fake: FakeCuda) -> None:
    """Copies of other threads are queued for a moment only, and mapping waits for their end."""
    stop = threading.Event()

    def copy() -> None:
        data = np.zeros(8 * memory.unit_bytes, dtype=np.uint8)
        while not stop.is_set():
            memory.read_units([(0, 8)], data)

    thread = threading.Thread(target=copy)
    thread.start()
    for layers in 5 * (MIDDLE, WHOLE):
        prepare_all(memory, layers)
        memory.drop(layers) if layers == MIDDLE else memory.reclaim(layers)
        while memory.tidied_s is None:
            memory.tidy()
    stop.set()
    thread.join()
    assert fake.num_changes_beside_work == 0


def test_graphs_that_are_alive_make_no_step_wait_longer_than_a_piece(
    memory: DeviceMemory, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the costs that others saw: of each call, of each GiB, and of each graph."""
    monkeypatch.setattr(second_places, "AT_ONCE", 4)
    fake.slow_down(30_000, 5_000_000, num_graphs=648, ns_each=100)
    call_ns = 30_000 + 648 * 100 + 8 * KIB * 5_000_000 // (1 << 30)
    longest_ns = total_ns = 0
    for layers in (MIDDLE, WHOLE):
        while memory.prepare(layers) is None:
            took_ns, before_ns = fake.spent_ns - total_ns, fake.spent_ns
            longest_ns, total_ns = max(longest_ns, took_ns), before_ns
            if not memory.is_preparing:
                break
        memory.drop(layers) if layers == MIDDLE else memory.reclaim(layers)
        assert fake.spent_ns == total_ns, "the commit waits for the driver"
        while memory.tidied_s is None:
            memory.tidy()
            longest_ns, total_ns = max(longest_ns, fake.spent_ns - total_ns), fake.spent_ns
    assert call_ns < longest_ns < 6 * call_ns < total_ns
