"""One copy of the weights: filled by turns, whoever dies meanwhile, and then written no more."""

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kunserve.core.errors import ConfigError, TooLittleMemory
from kunserve.engine.memory import address_space, weights_file
from kunserve.engine.memory.huge_pages import HUGE_PAGE_BYTES
from kunserve.engine.memory.weights_file import WeightsFile
from kunserve.engine.weights.layout import WeightLayout
from tests.unit.engine.memory.test_memory import SMALL

LAYOUT = WeightLayout(SMALL, 8192)
SECTIONS = list(range(1 + SMALL.num_layers))
NAMES = {"model_files": "abc", "seed": "0"}


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield made
    os.close(made)


def open_file(fd: int, **names: str) -> WeightsFile:
    return WeightsFile(fd, NAMES | names, LAYOUT, huge=False)


def span_of(section: int) -> tuple[int, int]:
    first = LAYOUT.layer_offset(section - 1) if section else 0
    return first, LAYOUT.layer_offset(section) - first


class Filler:
    """Writes a section's number all over it."""

    def __init__(self, file: WeightsFile) -> None:
        self.file = file
        self.filled: list[int] = []

    def __call__(self, section: int) -> None:
        first, num_bytes = span_of(section)
        ctypes.memset(self.file.window + first, 1 + section, num_bytes)
        self.filled.append(section)


def shown(file: WeightsFile) -> np.ndarray:
    """The bytes where they are mapped to be read. Until the process ends."""
    address = address_space.reserve(file.num_bytes)
    file.map_at(address)
    return np.ctypeslib.as_array((ctypes.c_uint8 * file.num_bytes).from_address(address))


def check_content(file: WeightsFile) -> None:
    data = shown(file)
    for section in SECTIONS:
        first, num_bytes = span_of(section)
        assert (data[first : first + num_bytes] == 1 + section).all(), section


def test_one_loads_and_the_next_finds_everything(fd: int) -> None:
    with closing(open_file(fd)) as one, closing(open_file(fd)) as other:
        assert one.missing == other.missing == SECTIONS
        first = Filler(one)
        one.load(first)
        assert first.filled == SECTIONS and one.is_sealed
        second = Filler(other)
        other.load(second)
        assert second.filled == [] and other.missing == []
        check_content(other)


def test_two_load_by_turns(fd: int) -> None:
    """While one fills a section another fills the next: here it does so in the middle."""
    with closing(open_file(fd)) as one, closing(open_file(fd)) as other:
        second = Filler(other)

        class Meanwhile(Filler):
            def __call__(self, section: int) -> None:
                super().__call__(section)
                if section == 0:
                    with pytest.raises(ConfigError, match="has not loaded its part"):
                        other.load(second, patience_s=0.0)

        first = Meanwhile(one)
        one.load(first)
        assert first.filled == [0] and second.filled == SECTIONS[1:]
        assert one.is_sealed
        check_content(one)


PROGRAM = """
import os, signal, sys
from tests.unit.engine.memory.test_weights_file import Filler, open_file

file = open_file(int(sys.argv[1]))
filler = Filler(file)

def fill(section):
    filler(section)
    if section == 2:
        os.kill(os.getpid(), signal.SIGKILL)

file.load(fill)
"""


def test_what_a_killed_process_was_at_is_loaded_by_the_next(fd: int) -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM, str(fd)], pass_fds=[fd], check=False)
    assert process.returncode == -9
    with closing(open_file(fd)) as file:
        assert file.missing == SECTIONS[2:] and not file.is_sealed
        filler = Filler(file)
        file.load(filler)
        assert filler.filled == SECTIONS[2:] and file.is_sealed
        check_content(file)


def test_a_section_that_cannot_be_loaded_is_left_to_others(fd: int) -> None:
    def fail(section: int) -> None:
        raise ConfigError("a file is corrupt")

    with closing(open_file(fd)) as one, closing(open_file(fd)) as other:
        with pytest.raises(ConfigError, match="corrupt"):
            one.load(fail)
        other.load(Filler(other))
        check_content(other)


def test_nobody_writes_to_what_is_sealed(fd: int) -> None:
    with closing(open_file(fd)) as file:
        unsealed = shown(file)
        file.load(Filler(file))
        size = HUGE_PAGE_BYTES + file.num_bytes
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", HUGE_PAGE_BYTES)
        for change in (size + mmap.PAGESIZE, HUGE_PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, change)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE, offset=HUGE_PAGE_BYTES)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        for view in (unsealed, shown(file)):
            address = ctypes.c_void_p(view.ctypes.data)
            read_write = mmap.PROT_READ | mmap.PROT_WRITE
            assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), read_write) == -1
            with open("/proc/self/maps", encoding="utf-8") as lines:
                (line,) = (line for line in lines if line.startswith(f"{view.ctypes.data:x}-"))
            assert line.split()[1] == "r--s"
        check_content(file)


def test_another_model_is_refused_by_the_name_of_what_differs(fd: int) -> None:
    with closing(open_file(fd)):
        with pytest.raises(ConfigError, match="another seed: 0, not 7"):
            open_file(fd, seed="7")
        with pytest.raises(ConfigError, match="another dtype: None, not float32"):
            open_file(fd, dtype="float32")
        with pytest.raises(ConfigError, match="another granule_bytes: 8192, not 4096"):
            WeightsFile(fd, NAMES, WeightLayout(SMALL, 4096), huge=False)


def test_a_half_written_header_says_nothing(fd: int) -> None:
    os.pwrite(fd, b'{"seed": "9"', 32)
    with closing(open_file(fd)) as file:
        file.load(Filler(file))
    with closing(open_file(fd)) as file:
        check_content(file)


def test_too_little_memory_is_told(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "available_bytes", lambda: LAYOUT.num_bytes - 1)
    with pytest.raises(TooLittleMemory, match="one copy of the weights"):
        open_file(fd)
    monkeypatch.undo()
    open_file(fd).close()
