"""The driver's rules, as the stand-in keeps them; and that our structs are the driver's."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kunserve.core.faults import Fault, fault_of
from kunserve_extras.torch_body.cuda import driver as driver_module
from kunserve_extras.torch_body.cuda.driver import CudaError, DeviceLost, Driver
from tests.fakecuda.library import KIB, SOURCE, FakeCuda, build

SIZE = 4 * KIB
CUDA_H = Path("/usr/local/cuda/include/cuda.h")


@pytest.fixture
def space(driver: Driver) -> Iterator[int]:
    """Room for eight granules."""
    address = driver.reserve(8 * SIZE, SIZE)
    yield address
    driver.unreserve(address, 8 * SIZE)


def write(address: int, value: bytes) -> None:
    ctypes.memmove(address, value, len(value))


def test_it_says_what_it_is(driver: Driver) -> None:
    assert driver.name == "fake 0" and driver.version >= 13000
    assert driver.has_virtual_memory and driver.can_export
    free, total = driver.memory_bytes()
    assert 0 < free == total


def test_no_library_and_no_device() -> None:
    with pytest.raises(OSError, match="no-such-library"):
        Driver(library="/no-such-library.so")
    with pytest.raises(CudaError, match="cuDeviceGet"):
        Driver(ordinal=7, library=build())


def test_memory_shows_at_two_addresses_and_outlives_its_handle(driver: Driver, space: int) -> None:
    handle = driver.create(SIZE)
    for at in (space, space + 4 * SIZE):
        driver.map(at, SIZE, handle)
        driver.allow(at, SIZE)
    write(space, b"here")
    driver.release(handle)
    driver.unmap(space, SIZE)
    assert ctypes.string_at(space + 4 * SIZE, 4) == b"here"
    assert driver.handle_at(space) is None and driver.handle_at(space + 4 * SIZE) == handle
    driver.unmap(space + 4 * SIZE, SIZE)


def test_what_the_driver_refuses(driver: Driver, space: int) -> None:
    pieces = [driver.create(SIZE) for _ in range(2)]
    whole = driver.create(2 * SIZE)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        driver.create(SIZE + 1)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        driver.create(1 << 40)
    driver.map(space, SIZE, pieces[0])
    driver.map(space + SIZE, SIZE, pieces[1])
    driver.map(space + 2 * SIZE, 2 * SIZE, whole)
    refused = [
        (driver.map, (space, SIZE, pieces[1])),  # something is there
        (driver.map, (space + 4 * SIZE, SIZE, whole)),  # a part of a piece
        (driver.map, (space + 8 * SIZE, SIZE, pieces[0])),  # not reserved
        (driver.map, (space + 4 * SIZE + 1, SIZE, pieces[0])),
        (driver.allow, (space, 5 * SIZE)),  # a hole
        (driver.allow, (space, 3 * SIZE)),  # a part of a mapping
        (driver.unmap, (space, 3 * SIZE)),
        (driver.unmap, (space + 5 * SIZE, SIZE)),  # nothing is there
        (driver.unreserve, (space, 8 * SIZE)),  # in use
    ]
    for call, arguments in refused:
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            call(*arguments)
    driver.allow(space, 4 * SIZE)
    driver.unmap(space, 4 * SIZE)
    for handle in (*pieces, whole):
        driver.release(handle)
    with pytest.raises(CudaError, match="INVALID"):
        driver.import_(-1)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_stray_touch_ends_the_process(is_mapped: bool) -> None:
    """Of nothing, or of a mapping whose access is not set."""
    code = f"""
import ctypes
from kunserve_extras.torch_body.cuda.driver import Driver
from tests.fakecuda.library import FakeCuda, build
fake = FakeCuda()
driver = Driver(library=build())
address = driver.reserve({SIZE}, {SIZE})
if {is_mapped}:
    driver.map(address, {SIZE}, driver.create({SIZE}))
print("before", flush=True)
ctypes.string_at(address, 1)
print("after")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == -signal.SIGSEGV and ended.stdout == b"before\n", ended


def test_every_thread_enters(driver: Driver) -> None:
    seen: list[object] = []

    def work() -> None:
        try:
            driver.granularity_bytes()
        except CudaError as error:
            seen.append(error)
        driver.enter()
        seen.append(driver.granularity_bytes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "INVALID_CONTEXT" in str(seen[0]) and seen[1] == SIZE


def test_copies_are_late(driver: Driver, space: int) -> None:
    handle = driver.create(SIZE)
    driver.map(space, SIZE, handle)
    driver.allow(space, SIZE)
    write(space, b"old")
    pinned, stream, event = driver.host_alloc(SIZE), driver.stream(), driver.event()
    write(pinned, b"new")
    driver.copy_in(space, pinned, 3, stream)
    driver.record(event, stream)
    assert ctypes.string_at(space, 3) == b"old"
    driver.wait(event)
    assert ctypes.string_at(space, 3) == b"new"
    driver.copy_out(pinned + 8, space, 3, stream)
    driver.synchronize(stream)
    assert ctypes.string_at(pinned + 8, 3) == b"new"
    driver.stream_destroy(stream)
    driver.event_destroy(event)
    driver.host_free(pinned)
    driver.unmap(space, SIZE)
    driver.release(handle)


def test_a_copy_into_what_was_unmapped_spoils_everything(driver: Driver, fake: FakeCuda) -> None:
    address, handle = driver.reserve(SIZE, SIZE), driver.create(SIZE)
    driver.map(address, SIZE, handle)
    driver.allow(address, SIZE)
    pinned, stream = driver.host_alloc(SIZE), driver.stream()
    driver.copy_in(address, pinned, SIZE, stream)
    driver.unmap(address, SIZE)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        driver.synchronize(stream)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        driver.granularity_bytes()
    FakeCuda()
    driver.stream_destroy(stream)
    driver.host_free(pinned)
    driver.release(handle)
    driver.unreserve(address, SIZE)


@pytest.mark.parametrize(
    ("error", "fault"), [(700, Fault.REQUEST), (719, Fault.REQUEST), (999, Fault.MACHINE)]
)
def test_an_error_that_stays_is_no_refusal(
    driver: Driver, fake: FakeCuda, error: int, fault: Fault
) -> None:
    fake.spoil(error)
    with pytest.raises(DeviceLost, match=str(error)) as lost:
        driver.create(SIZE)
    assert fault_of(lost.value) is fault and not isinstance(lost.value, OSError)


def test_memory_that_cannot_be_exported_is_taken_without(fake: FakeCuda) -> None:
    """The device says that it can; a sandbox refuses it."""
    fake.refuse_exportable()
    driver = Driver(library=build())
    assert not driver.can_export
    driver.release(driver.create(SIZE))
    FakeCuda(SIZE, total_bytes=0)
    assert Driver(library=build()).can_export, "a full device says nothing of it"


def test_mapping_beside_queued_copies(driver: Driver, space: int, fake: FakeCuda) -> None:
    """Some drivers wait, on some devices what runs faults: both as a test wants it."""
    handle, stream, pinned = driver.create(SIZE), driver.stream(), driver.host_alloc(SIZE)
    driver.map(space, SIZE, handle)
    driver.allow(space, SIZE)
    for what, is_seen in (("ignore", False), ("stall", True), ("fault", None)):
        write(space, b"old")
        write(pinned, b"new")
        fake.beside_work(what)
        driver.copy_in(space, pinned, 3, stream)
        if is_seen is None:
            with pytest.raises(DeviceLost):
                driver.map(space + SIZE, SIZE, handle)
                driver.synchronize(stream)
            break
        driver.map(space + SIZE, SIZE, handle)
        assert (ctypes.string_at(space, 3) == b"new") == is_seen
        driver.synchronize(stream)
        driver.unmap(space + SIZE, SIZE)
    assert fake.num_changes_beside_work == 3
    FakeCuda()
    driver.stream_destroy(stream)
    driver.unmap(space, 2 * SIZE)
    driver.host_free(pinned)
    driver.release(handle)


def test_memory_goes_to_another_process(driver: Driver, space: int) -> None:
    handle = driver.create(SIZE)
    driver.map(space, SIZE, handle)
    driver.allow(space, SIZE)
    write(space, b"from here")
    fd = driver.export(handle)
    code = f"""
import ctypes
from kunserve_extras.torch_body.cuda.driver import Driver
from tests.fakecuda.library import FakeCuda, build
fake = FakeCuda()
driver = Driver(library=build())
address = driver.reserve({SIZE}, {SIZE})
handle = driver.import_({fd})
driver.map(address, {SIZE}, handle)
driver.allow(address, {SIZE})
assert ctypes.string_at(address, 9) == b"from here"
ctypes.memmove(address, b"from there", 10)
"""
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[4],
        pass_fds=(fd,),
        check=True,
        timeout=120,
    )
    os.close(fd)
    assert ctypes.string_at(space, 10) == b"from there"
    driver.unmap(space, SIZE)
    driver.release(handle)


@pytest.mark.skipif(not CUDA_H.is_file() or not shutil.which("gcc"), reason="no cuda.h")
def test_structs_are_the_drivers(tmp_path: Path) -> None:
    """Those of the stand-in by the compiler, and ours by size."""
    include = f"-I{CUDA_H.parent}"
    check = ["gcc", "-DREAL_CUDA_H", include, "-fsyntax-only", str(SOURCE)]
    subprocess.run(check, check=True)
    ours = {
        "CUmemAllocationProp": ctypes.sizeof(driver_module.AllocationProp),
        "CUmemAccessDesc": ctypes.sizeof(driver_module.AccessDesc),
    }
    source = tmp_path / "sizes.c"
    lines = [f'_Static_assert(sizeof({name}) == {size}, "");' for name, size in ours.items()]
    source.write_text("\n".join(["#include <cuda.h>", *lines]))
    subprocess.run(["gcc", include, "-fsyntax-only", str(source)], check=True)
