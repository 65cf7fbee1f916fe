"""Which of a wheel's libraries a processor gets, and what a wheel gets compiled."""

import logging
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kunserve.core.errors import ConfigError
from kunserve.engine.cpu.kernels import build as build_module
from kunserve.engine.cpu.kernels import levels
from kunserve.engine.cpu.kernels.build import build_shipped, find_or_build
from kunserve.engine.cpu.kernels.levels import LEVELS, VARIABLE, fitting_levels, levels_of
from kunserve.engine.cpu.kernels.tiles import why_not

X86 = {level.name: level for level in LEVELS if level.machine == "x86_64"}
AMX = "x86-64-v4-amx"


@pytest.fixture
def wheel(monkeypatch, tmp_path: Path) -> Path:
    """An installed wheel's libraries (empty files), a place to compile to, and no compiler."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.delenv(VARIABLE, raising=False)  # `make test-processors` sets it
    monkeypatch.setattr(build_module, "SHIPPED", shipped)
    monkeypatch.setattr(build_module, "_folders", lambda: (tmp_path / "compiled",))
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build_module, "why_not", lambda path: None)
    for level in X86.values():
        (shipped / build_module._name_of(level)).touch()
    return shipped


def processor(monkeypatch, *features: str, vendor: str = "AuthenticAMD") -> None:
    text = f"processor : 0\nvendor_id\t: {vendor}\nflags\t\t: {' '.join(features)}\n"
    monkeypatch.setattr(levels, "_cpuinfo", text.splitlines)


@pytest.mark.parametrize("name", X86)
def test_a_processor_gets_the_best_library_that_it_can_run(monkeypatch, wheel, name) -> None:
    processor(monkeypatch, *X86[name].needs, "something_else")
    assert find_or_build().name.startswith(f"kernels-{name}-")


@pytest.mark.parametrize(
    ("vendor", "features", "wanted"),
    [
        ("GenuineIntel", {"avx512_fp16"}, "x86-64-v4-vnni"),  # tiles hidden by a cloud
        ("GenuineIntel", X86[AMX].needs | {"avx512_fp16"}, AMX),
        ("GenuineIntel", set(), "x86-64-v4-bf16"),  # Cooper Lake
        ("AuthenticAMD", {"avx512_fp16"}, "x86-64-v4-bf16"),
    ],
)
def test_bfloat16_is_taken_where_it_is_fast(monkeypatch, wheel, vendor, features, wanted) -> None:
    processor(monkeypatch, *X86["x86-64-v4-bf16"].needs | features, vendor=vendor)
    assert find_or_build().name.startswith(f"kernels-{wanted}-")
    is_slow = vendor == "GenuineIntel" and "avx512_fp16" in features
    assert ("-DKUN_SLOW_BF16" in levels.native_flags()) == is_slow
    monkeypatch.setenv(VARIABLE, "x86-64-v4-bf16")
    assert find_or_build().name.startswith("kernels-x86-64-v4-bf16-")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads machine code with binutils")
@pytest.mark.skipif(not levels.has_slow_bfloat16(), reason="bfloat16 is fast here, or not there")
@pytest.mark.skipif("KERNEL_FLAGS" in os.environ, reason="compiled otherwise")
def test_what_is_compiled_here_leaves_out_slow_bfloat16() -> None:
    command = ["objdump", "-d", "--no-show-raw-insn", str(build_module.build())]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "vfmadd" in code and "vdpbf16ps" not in code


def test_tiles_come_before_what_was_compiled_here(monkeypatch, wheel) -> None:
    processor(monkeypatch, *X86[AMX].needs)
    compiled_here(wheel)
    assert find_or_build().name.startswith(f"kernels-{AMX}-")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_tiles_that_cannot_be_used_are_told_of(monkeypatch, wheel, caplog, is_compiled) -> None:
    """By default the next best kernels are taken. Who asks for tiles by name gets these or none."""
    processor(monkeypatch, *X86[AMX].needs)
    compiled = compiled_here(wheel) if is_compiled else None
    monkeypatch.setattr(build_module, "why_not", lambda path: "Linux refuses")
    found = find_or_build()
    assert found == compiled or found.name.startswith("kernels-x86-64-v4-bf16-")
    text = f"kernels {AMX} cannot be used: Linux refuses"
    assert f"the next best kernels are taken: {text}" in caplog.text
    monkeypatch.setenv(VARIABLE, AMX)
    with pytest.raises(ConfigError, match=text):
        find_or_build()


LIBRARY = """
#include <stdint.h>
#include <string.h>
int32_t kun_allow_amx(void) { return REFUSAL; }
void kun_linear_bf16(void *x, void *w, void *bias, float *y, int64_t m, int64_t n) {
  memset(y, 0, (size_t)(m * n) * 4);
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(
    ("refusal", "wanted"),
    [(1, r"Linux refuses this process the tiles \(Operation not"), (0, "came out wrong")],
)
def test_a_library_is_asked_for_tiles_and_a_product(tmp_path: Path, refusal, wanted) -> None:
    (tmp_path / "a.c").write_text(LIBRARY)
    command = ["gcc", "-shared", "-fPIC", f"-DREFUSAL={refusal}", "-o", tmp_path / "a.so"]
    subprocess.run([*command, tmp_path / "a.c"], check=True)
    assert re.search(wanted, str(why_not(tmp_path / "a.so")))
    assert "cannot be loaded" in str(why_not(tmp_path / "none.so"))


def test_products_that_are_right_pass() -> None:
    """Whatever level this processor runs: it needs no tiles for this."""
    assert why_not(find_or_build()) is None


def compiled_here(wheel: Path) -> Path:
    compiled = wheel.parent / "compiled" / build_module._native_name(())
    compiled.parent.mkdir()
    compiled.touch()
    return compiled


def test_a_level_by_name_comes_before_what_was_compiled_here(monkeypatch, wheel) -> None:
    processor(monkeypatch, *X86["x86-64-v4"].needs)
    compiled = compiled_here(wheel)
    monkeypatch.setenv(VARIABLE, "x86-64-v3")
    assert find_or_build().name.startswith("kernels-x86-64-v3-")
    monkeypatch.setenv(VARIABLE, "")
    assert find_or_build() == compiled


def test_a_level_that_cannot_be_had_says_why(monkeypatch, wheel) -> None:
    processor(monkeypatch, *X86["x86-64-v4"].needs)
    monkeypatch.setenv(VARIABLE, "x86-64-v4-bf16")
    with pytest.raises(ConfigError, match=r"need avx512_bf16, avx512_vnni, .* run x86-64-v4, x8"):
        find_or_build()
    monkeypatch.setenv(VARIABLE, "avx9")
    with pytest.raises(ConfigError, match="no kernels are called 'avx9'; for this processor"):
        find_or_build()
    monkeypatch.setenv(VARIABLE, "armv8-a")
    with pytest.raises(ConfigError, match="need aarch64, which this processor lacks"):
        find_or_build()


def test_a_level_that_no_wheel_brought_is_compiled(monkeypatch, wheel) -> None:
    processor(monkeypatch, *X86["x86-64-v3"].needs)
    for library in wheel.iterdir():
        library.unlink()
    monkeypatch.setenv(VARIABLE, "x86-64-v3")
    with pytest.raises(ConfigError, match="C compiler"):
        find_or_build()


def test_an_old_processor_gets_none(monkeypatch, wheel, caplog) -> None:
    """It has no AVX2. Without a compiler that is the end, and both things are said."""
    processor(monkeypatch, "sse4_2")
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="C compiler"):
        find_or_build()
    assert "compiling them once, for some seconds" in caplog.text


def test_a_library_of_other_sources_is_not_taken(monkeypatch, wheel) -> None:
    processor(monkeypatch, *X86["x86-64-v3"].needs)
    other = wheel.parent / "csrc"
    shutil.copytree(build_module.SOURCES, other)
    (other / "api.h").write_text("/* changed */")
    monkeypatch.setattr(build_module, "SOURCES", other)
    with pytest.raises(ConfigError, match="C compiler"):
        find_or_build()


def test_what_was_compiled_for_this_very_processor_comes_first(monkeypatch, wheel) -> None:
    processor(monkeypatch, *X86["x86-64-v3"].needs)
    compiled = compiled_here(wheel)
    assert find_or_build() == compiled


def test_a_wheel_has_a_library_for_each_level(monkeypatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def compile_nothing(command, **kwargs):
        commands.append(command)
        Path(command[command.index("-o") + 1]).touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build_module.subprocess, "run", compile_nothing)
    monkeypatch.setattr(build_module.shutil, "which", lambda name: name)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kernels-of-another-commit.so").touch()
    made = build_shipped(tmp_path / "out", machine="x86_64")
    assert sorted(made) == sorted((tmp_path / "out").iterdir())
    assert len(made) == len(levels_of("x86_64")) == 5
    by_flag = {flag: command[0] for command in commands for flag in command}
    assert by_flag["-mavx512bf16"] == "gcc"
    assert by_flag["-march=x86-64-v3"] == "clang"
    assert build_shipped(tmp_path / "none", machine="riscv64") == []


@pytest.mark.parametrize(("machine", "is_told"), [("x86_64", False), ("aarch64", True)])
def test_slow_kernels_are_told_of(monkeypatch, caplog, machine: str, is_told: bool) -> None:
    monkeypatch.setattr(build_module.shutil, "which", lambda name: name if name == "gcc" else None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert build_module._compiler(prefers_clang=False) == "gcc" and not caplog.records
    assert build_module._compiler(prefers_clang=True) == "gcc"
    assert ("clang's kernels are several times faster" in caplog.text) == is_told


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads this machine's own features")
def test_this_processor_is_read() -> None:
    assert set(fitting_levels()) <= set(X86.values())
    assert "sse2" in levels.processor_features()


@pytest.mark.skipif(shutil.which("nm") is None, reason="lists symbols with binutils")
def test_the_library_needs_glibc_only() -> None:
    """A symbol without a version is of a library that it does not say it needs, as libm was."""
    command = ["nm", "--dynamic", "--undefined-only", str(find_or_build())]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines() if " U " in line]
    assert names and all("@GLIBC" in name for name in names), names
