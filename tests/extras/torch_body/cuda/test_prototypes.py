"""What we call is what CUDA's own header declares: every prototype, constant and struct."""

import ctypes
import re
import shutil
import subprocess
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from kunserve_extras.torch_body.cuda import driver
from kunserve_extras.torch_body.cuda.prototypes import (
    CALLS,
    NEWER_CALLS,
    AccessDesc,
    AllocationProp,
    CopyAttributes,
)

CUDA_H = Path("/usr/local/cuda/include/cuda.h")
pytestmark = pytest.mark.skipif(
    not CUDA_H.is_file() or not shutil.which("g++"),
    reason=f"no {CUDA_H}, which comes with nvcc, or no g++",
)
KINDS: dict[Any, tuple[str, int]] = {
    c_int: ("is_number", 4),
    c_uint: ("is_number", 4),
    c_size_t: ("is_anything", 8),  # c_uint64 is the same type: sizes, addresses and handles
    c_uint64: ("is_anything", 8),
    c_void_p: ("is_pointer", 8),
    c_char_p: ("is_pointer", 8),
}
STAYS = ("must be terminated", "inconsistent state")
"""Said of errors after which every call fails."""
CONSTANTS = {
    "CU_MEM_LOCATION_TYPE_DEVICE": driver._DEVICE,
    "CU_MEM_ALLOCATION_TYPE_PINNED": driver._PINNED,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": driver._READ_WRITE,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": driver._POSIX_FD,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": driver._HAS_VIRTUAL_MEMORY,
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": driver._CAN_EXPORT_FD,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": driver._CAPABILITY[0],
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": driver._CAPABILITY[1],
    "CU_STREAM_NON_BLOCKING": driver._NON_BLOCKING,
    "CU_EVENT_DISABLE_TIMING": driver._NO_TIMING,
    "CUDA_ERROR_OUT_OF_MEMORY": driver._OUT_OF_MEMORY,
    "CUDA_ERROR_NOT_READY": driver._NOT_READY,
    "CU_STREAM_WAIT_VALUE_GEQ": driver._AT_LEAST,
    "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": driver._IN_STREAM_ORDER,
}
HEAD = """
#include <cuda.h>
#include <type_traits>
template <class T> constexpr bool is_pointer = std::is_pointer_v<T>;
template <class T> constexpr bool is_number = std::is_integral_v<T> || std::is_enum_v<T>;
template <class T> constexpr bool is_anything = true;
template <class F> struct Of;
template <class... A> struct Of<CUresult (*)(A...)> {
    static constexpr int count = sizeof...(A);
    template <int N> using At = std::tuple_element_t<N, std::tuple<A...>>;
};
"""


def pointee(kind: Any) -> Any:
    """What a ctypes pointer points to, or None."""
    return getattr(kind, "_type_", None) if hasattr(kind, "contents") else None


def assertions(name: str, arguments: tuple[Any, ...]) -> list[str]:
    of = f"Of<decltype(&{name})>"
    lines = [f'static_assert({of}::count == {len(arguments)}, "{name}: how many");']
    for number, kind in enumerate(arguments):
        at, target = f"{of}::At<{number}>", pointee(kind)
        if target is None:
            rule, size = KINDS[kind]
        else:
            lines.append(f'static_assert(is_pointer<{at}>, "{name}: {number}");')
            at = f"std::remove_pointer_t<{at}>"
            if target in (AllocationProp, AccessDesc, CopyAttributes):
                size = ctypes.sizeof(target)
                lines.append(f'static_assert(sizeof({at}) == {size}, "{name}: {number}");')
                continue
            rule, size = KINDS[target]
        lines.append(f'static_assert({rule}<{at}>, "{name}: {number} {rule}");')
        lines.append(f'static_assert(sizeof({at}) == {size}, "{name}: {number} size");')
    return lines


def compile_(lines: list[str], folder: Path) -> str:
    """What the compiler has against it."""
    source = folder / "prototypes.cc"
    source.write_text("\n".join(["#include <tuple>", HEAD, *lines]))
    command = ["g++", "-std=c++17", f"-I{CUDA_H.parent}", "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_every_prototype_is_the_headers(tmp_path: Path) -> None:
    calls = CALLS | NEWER_CALLS
    lines = [line for call in calls.items() for line in assertions(*call)]
    assert len(CALLS) > 30 and compile_(lines, tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cuMemUnmap", (c_uint64,)),
        ("cuMemUnmap", (c_uint64, c_uint)),
        ("cuMemRelease", (c_void_p,)),
        ("cuDeviceGet", (c_int, c_int)),
        ("cuStreamWaitValue32_v2", (c_void_p, c_uint64, c_uint64, c_uint)),
    ],
)
def test_a_wrong_one_is_seen(name: str, wrong: tuple[Any, ...], tmp_path: Path) -> None:
    assert f"{name}: " in compile_(assertions(name, wrong), tmp_path)


def test_numbers_are_the_headers(tmp_path: Path) -> None:
    lines = [f'static_assert({name} == {value}, "{name}");' for name, value in CONSTANTS.items()]
    assert compile_(lines, tmp_path) == ""
    assert compile_(['static_assert(CU_STREAM_NON_BLOCKING == 2, "no");'], tmp_path)


def test_errors_that_stay_are_those_of_which_the_header_says_so() -> None:
    """In comments. One that is missing would be taken for a refusal, and tried again for ever."""
    text = CUDA_H.read_text()
    errors = text[text.index("CUDA_SUCCESS") : text.index("} CUresult")]
    told = re.findall(r"/\*\*(.*?)\*/\s*CUDA_ERROR_(\w+)\s*=\s*(\d+)", errors, re.DOTALL)
    stay = {
        int(number)
        for comment, _, number in told
        if any(words in " ".join(comment.replace("*", " ").split()) for words in STAYS)
    }
    assert len(told) > 80 and len(stay) > 10
    assert stay <= driver._BY_KERNELS | driver._BY_DEVICES
