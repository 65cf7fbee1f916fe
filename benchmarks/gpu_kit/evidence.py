"""What a phase leaves, as one file that is whole at any moment, and the device's own words.

A machine may be taken away, and a call killed, at any time. So after every part of a phase all that
is known of it is packed again, beside the last file, and takes its place.
"""

import contextlib
import gzip
import io
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 15 << 20
"""Of a packed phase. What comes last, and does not fit, is named in it instead."""
MOST_LOG_BYTES = 4 << 20
"""Of one log; the beginning and the end of a longer one are kept."""
SUFFIX = ".tar.gz"
LEFT_OUT = "left_out.txt"
_PATIENCE_S = 10.0
_SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def pack(name: str, out: Path, folder: Path, since_s: float) -> Path:
    """A phase's files, and those that were written since, as ``folder/NAME.tar.gz``.

    Atomic: a reader finds the file before, or this one.
    """
    buffer, left_out = io.BytesIO(), []
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=3) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        room = MOST_BYTES
        for path in _files(name, out, since_s):
            with contextlib.suppress(OSError):
                data = _read(path)
                room -= (size := len(zlib.compress(data, 1)) + 512)
                if room < 0:
                    room += size
                    left_out.append(f"{path.relative_to(out)} {len(data)} bytes")
                    continue
                _add(tar, str(path.relative_to(out)), data, path.stat().st_mtime)
        if left_out:
            _add(tar, f"{name}.{LEFT_OUT}", "\n".join(left_out).encode(), 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    target, part = folder / f"{name}{SUFFIX}", folder / f".{name}{SUFFIX}.part"
    with part.open("wb") as file:
        file.write(buffer.getvalue())
        file.flush()
        os.fsync(file.fileno())
    part.replace(target)
    return target


def unpack(folder: Path, out: Path) -> list[str]:
    """Take up what earlier calls have packed; the phases. What ``out`` has of one stays as it is.

    A file that is broken is said, and left alone.
    """
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        name = path.name.removesuffix(SUFFIX)
        if (out / f"{name}.jsonl").exists():
            continue
        try:
            with tarfile.open(path) as tar:
                tar.extractall(out, filter="data")
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            print(f"{path.name} cannot be read: {error}", flush=True)
            continue
        found.append(name)
    return found


def snapshot(path: Path, when: str) -> None:
    """Append what the driver and the kernel say of the device: memory, clocks, Xid errors."""
    smi = _said("nvidia-smi") + _said("nvidia-smi", "-q", "-d", "MEMORY,CLOCK,PERFORMANCE,ECC")
    xids = [line for line in _said("dmesg").splitlines() if "Xid" in line or "NVRM" in line]
    with path.open("a", encoding="utf-8") as file:
        file.write(f"## {when}\n{smi}\n### dmesg\n" + "\n".join(xids[-50:]) + "\n")


def find_sanitizer() -> str | None:
    """NVIDIA's checker of memory accesses, if it is here."""
    return next((found for name in _SANITIZERS if (found := shutil.which(name))), None)


def _said(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}\n"
    return done.stdout


def _files(name: str, out: Path, since_s: float) -> Iterator[Path]:
    """The most valuable first: figures, then logs, then what is large and can be made again."""
    own = sorted(out.glob(f"{name}.*"), key=lambda path: path.suffix not in (".jsonl", ".json"))
    yield from (path for path in own if path.is_file())
    # A model's folder can be written again.
    models = {path.parent for path in out.glob("*/tokenizer.json")}
    others = []
    for path in out.rglob("*"):
        with contextlib.suppress(OSError):
            if not path.is_file() or path in own or path.name.endswith((SUFFIX, ".part")):
                continue
            info = path.stat()
            if info.st_mtime >= since_s and not models & set(path.parents):
                others.append((info.st_size, path))
    yield from (path for _, path in sorted(others))


def _read(path: Path) -> bytes:
    """A file as it is now; of a long log both ends."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= MOST_LOG_BYTES or path.suffix not in (".log", ".txt"):
            return file.read()
        head = file.read(MOST_LOG_BYTES // 4)
        file.seek(size - MOST_LOG_BYTES * 3 // 4)
        return head + b"\n[... cut ...]\n" + file.read()


def _add(tar: tarfile.TarFile, name: str, data: bytes, modified_s: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(modified_s)
    tar.addfile(info, io.BytesIO(data))
