"""The system calls behind the arena: reserve, map and move pages at fixed addresses."""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED = mmap.MAP_SHARED
_MAP_PRIVATE_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MAP_FIXED = 0x10
_MAP_POPULATE = 0x8000
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.PyDLL(None, use_errno=True)
"""Of calls that are over sooner than another thread would give the interpreter back: a remap makes
several, and would wait after each."""
_patient_libc = ctypes.CDLL(None, use_errno=True)
"""Of calls that fill pages or give them back. Meanwhile other threads run."""
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
_patient_libc.mmap.restype = _libc.mmap.restype
_patient_libc.mmap.argtypes = _libc.mmap.argtypes
_patient_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_patient_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _mmap(
    address: int | None,
    num_bytes: int,
    prot: int,
    flags: int,
    fd: int,
    offset: int,
    *,
    is_patient: bool = False,
) -> int:
    libc = _patient_libc if is_patient else _libc
    result: int | None = libc.mmap(address, num_bytes, prot, flags, fd, offset)
    if result is None or result == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes failed: {os.strerror(code)}")
    return result


def reserve(num_bytes: int) -> int:
    """Address of ``num_bytes`` of inaccessible address space; costs no memory."""
    return _mmap(None, num_bytes, _PROT_NONE, _MAP_PRIVATE_NOTHING, -1, 0)


def unreserve(address: int, num_bytes: int) -> None:
    """Give the address space back."""
    _patient_libc.munmap(address, num_bytes)


def map_file(
    address: int, num_bytes: int, fd: int, offset: int, populate: bool, *, writable: bool = True
) -> None:
    """Put ``num_bytes`` of the file at ``address``, replacing whatever was mapped there."""
    flags = _MAP_SHARED | _MAP_FIXED
    prot = _PROT_READ_WRITE if writable else mmap.PROT_READ
    _mmap(address, num_bytes, prot, flags, fd, offset)
    if populate and not populate_pages(address, num_bytes):
        # Linux before 5.14.
        flags |= _MAP_POPULATE
        _patient_libc.mmap(address, num_bytes, _PROT_READ_WRITE, flags, fd, offset)


def unmap(address: int, num_bytes: int, *, is_moved: bool = False) -> None:
    """Make ``num_bytes`` at ``address`` inaccessible, keeping them reserved.

    Page by page, while other threads run; but what ``move`` has left has no pages any more.
    """
    flags = _MAP_PRIVATE_NOTHING | _MAP_FIXED
    _mmap(address, num_bytes, _PROT_NONE, flags, -1, 0, is_patient=not is_moved)


def move(source: int, target: int, num_bytes: int) -> bool:
    """Move a mapping with its page tables, so that its pages need no new faults.

    The source stays reserved; ``unmap`` it afterwards. False (and nothing done) where the
    kernel cannot do it: before Linux 5.13, or if the source is not one mapping.
    """
    # Without DONTUNMAP the source's addresses would be free for an instant, and another
    # thread's allocation could land there.
    result: int | None = _libc.mremap(
        source, num_bytes, num_bytes, _MREMAP_MAYMOVE_FIXED_DONTUNMAP, target
    )
    return result is not None and result != _FAILED


def populate_pages(address: int, num_bytes: int, *, writable: bool = True) -> bool:
    """Fault pages in without changing them; False where that is not possible (not mapped)."""
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    return bool(_patient_libc.madvise(address, num_bytes, advice) == 0)


def advise_huge(address: int, num_bytes: int) -> None:
    """Ask for huge pages where nothing lies yet. The kernel's settings decide."""
    _patient_libc.madvise(address, num_bytes, _MADV_HUGEPAGE)


def collapse(address: int, num_bytes: int) -> int:
    """Put what lies there into huge pages, unless ``shmem_enabled`` is ``deny``: 0, or an errno.

    Some may be in huge pages even so. EINVAL before Linux 6.1.
    """
    if _patient_libc.madvise(address, num_bytes, _MADV_COLLAPSE) == 0:
        return 0
    return ctypes.get_errno()


@contextlib.contextmanager
def shown(fd: int, offset: int, num_bytes: int, alignment: int) -> Iterator[int]:
    """The address, a multiple of ``alignment``, at which a file is mapped for a while."""
    reserved_bytes = num_bytes + alignment
    reserved_at = reserve(reserved_bytes)
    try:
        address = -(-reserved_at // alignment) * alignment
        map_file(address, num_bytes, fd, offset, populate=False)
        yield address
    finally:
        unreserve(reserved_at, reserved_bytes)


def huge_bytes_at(address: int, num_bytes: int, fd: int | None = None) -> int:
    """How much of a memory file's (None: of any one's) mappings there goes through huge pages, as
    far as the kernel says. Slow.
    """
    inode = None if fd is None else str(os.fstat(fd).st_ino)
    try:
        with open("/proc/self/smaps", encoding="utf-8") as lines:
            return sum(_huge_bytes_in(lines, address, address + num_bytes, inode))
    except OSError:
        return 0


def _huge_bytes_in(
    lines: Iterable[str], address: int, end: int, inode: str | None
) -> Iterator[int]:
    is_there = False
    for line in lines:
        name, *fields = line.split(maxsplit=2)
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            if first >= end:  # addresses rise, and the kernel walks each mapping that is read
                return
            is_there = address <= first and last <= end
            is_there &= inode is None or fields[-1].split()[2] == inode
        elif is_there and name == "ShmemPmdMapped:":
            yield int(fields[0]) * 1024


class Mapping(NamedTuple):
    """One line of ``/proc/self/maps`` that belongs to a file."""

    address: int
    num_bytes: int
    offset: int


def mappings_of(fd: int) -> Iterator[Mapping]:
    """Where the kernel says that the file is mapped in this process."""
    inode = os.fstat(fd).st_ino
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            span, _, offset, _, line_inode, *name = line.split(maxsplit=5)
            if int(line_inode) == inode and name and name[0].startswith("/memfd:"):
                first, last = (int(part, 16) for part in span.split("-"))
                yield Mapping(first, last - first, int(offset, 16))
