"""Where weights come from: safetensors, GGUF, or nowhere (dummy)."""

import os
import re
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors
import torch

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.engine.weights.expert_pieces import Place, gguf_places, hf_places
from kunserve.engine.weights.packing import StoredRows
from kunserve.engine.weights.pieces import Piece
from kunserve.engine.weights.quants import dequantise, row_bytes
from kunserve.engine.weights.scaled import SCALES, WORDS, ScaledFile, expand
from kunserve.model.gguf.config import PAIRED_ROPE
from kunserve.model.gguf.file import read_gguf
from kunserve.model.json_file import read_json
from kunserve.model.packed import WeightFormat
from kunserve.model.quantization import COMPRESSED_TENSORS, FP8, GGUF_FORMATS
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec

_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""What names begin with instead of ``model.`` where the model is part of one with images."""


class Reader(Protocol):
    """Gives the tensors of one checkpoint."""

    fills_devices: bool
    """Whether ``read`` makes what it gives where the destination lies, without host memory."""

    @property
    def quantization(self) -> str | None:
        """How its weights are quantised, as ``--quantization`` names it, if they are."""
        ...

    def format_of(self, piece: Piece) -> WeightFormat:
        """How the piece can lie in memory without a loss; PLAIN if it is not quantised."""
        ...

    def read_stored(self, piece: Piece) -> StoredRows:
        """A piece whose format is not PLAIN, as it is stored."""
        ...

    def check(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Raise ModelFiles unless the piece is there, whole and of this shape."""
        ...

    def read(self, piece: Piece, destination: torch.Tensor) -> None:
        """Fill the contiguous destination with the piece, converting its dtype."""
        ...


def open_reader(source: ModelSource, spec: ModelSpec, seed: int) -> Reader:
    """The reader for the source's format. ``seed`` makes dummy weights agree between instances."""
    match source.weights:
        case "safetensors":
            return SafetensorsReader(source.path, spec)
        case "gguf":
            return GgufReader(source.path, spec)
        case "dummy":
            return DummyReader(seed, norm=0.0 if spec.has_offset_norms else 1.0)


class _Witness:
    """Notices when a mapped file is written to: layers are read again as long as a server runs.

    A file that is replaced by a new one of its name goes on giving the old content. One that is
    changed in place would give a mixture, or crash the process where it got shorter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._seen = os.stat(path)
        except OSError as error:
            raise ModelFiles(f"{path}: cannot be read: {error.strerror}") from error

    def check(self) -> None:
        """Raise ModelFiles when the file was changed in place."""
        try:
            now = os.stat(self._path)
        except OSError:
            return  # removed: what is mapped stays
        seen = self._seen
        is_same_file = (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)
        if is_same_file and (now.st_size, now.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
            raise ModelFiles(f"{self._path}: changed while it is served; start the server again")


class SafetensorsReader:
    """A Hugging Face folder: one file, or shards with an index."""

    fills_devices = False
    _DTYPES = ("F64", "F32", "F16", "BF16")

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._paired_heads = _rotated_heads(spec) if spec.has_paired_rope else {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelFiles(f"{index}: 'weight_map' is missing")
            self._file_of = {str(name): folder / str(file) for name, file in weight_map.items()}
            paths = sorted(set(self._file_of.values()))
            for path in paths:
                if path.parent != folder or path.name in ("", ".", ".."):
                    raise ModelFiles(f"{index}: names {path}, which is not in its folder")
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                others = [p.name for p in folder.glob("*.bin")] + [
                    p.name for p in folder.glob("*.pt")
                ]
                hint = f" (it has {', '.join(sorted(others))}: convert them)" if others else ""
                raise ModelFiles(f"{folder}: holds no .safetensors file{hint}")
            self._file_of = {}
        self._observers = {path: _Witness(path) for path in paths}
        self._files = {path: _open(path) for path in paths}
        if not self._file_of:
            self._file_of = {
                name: path
                for path, file in self._files.items()
                for name in file.keys()  # noqa: SIM118
            }

        self._scaled = ScaledFile(
            self._file_of, lambda name: self._file(name).get_slice(name), self.tensor
        )
        self._prefix = "model."
        for prefix in _TEXT_PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._file_of:
                self._prefix = prefix

    def check(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Raise ModelFiles unless the piece is there, whole and of this shape."""
        place = self._place(piece)
        name = place.name
        if self._scaled.scale_of(name) is None:
            self._check(name, place.stack or shape, self._DTYPES)
            return
        for wanted in self._scaled.expected(name, shape):
            self._check(*wanted)

    def _check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        path = self._file_of.get(name)
        if path is None:
            raise ModelFiles(f"{self._folder}: tensor {name!r} is missing")
        try:
            stored = self._files[path].get_slice(name)
        except safetensors.SafetensorError as error:
            raise ModelFiles(f"{path}: tensor {name!r} is missing") from error
        if tuple(stored.get_shape()) != shape:
            raise ModelFiles(
                f"{path}: tensor {name!r} has shape {tuple(stored.get_shape())}, "
                f"config.json implies {shape}"
            )
        if stored.get_dtype() not in dtypes:
            raise UnsupportedModel(
                f"{path}: tensor {name!r} has type {stored.get_dtype()}; "
                f"supported are {', '.join(dtypes)}"
            )

    @property
    def quantization(self) -> str | None:
        """How its weights are quantised, as ``--quantization`` names it, if they are."""
        if not any(name.endswith(SCALES) for name in self._file_of):
            return None
        stated = read_json(self._folder / "config.json").get("quantization_config")
        return FP8 if (stated or {}).get("quant_method") == FP8 else COMPRESSED_TENSORS

    def format_of(self, piece: Piece) -> WeightFormat:
        """By the scales that stand beside the tensor."""
        return self._scaled.format_of(self._place(piece).name)

    def _place(self, piece: Piece) -> Place:
        """Where the piece is; where it usually would be, if it is nowhere."""
        places = [
            place._replace(name=re.sub(r"^model\.", self._prefix, place.name))
            for place in hf_places(piece, self._spec)
        ]
        there = (p for p in places if not self._file_of.keys().isdisjoint((p.name, p.name + WORDS)))
        return next(there, places[0])

    def read_stored(self, piece: Piece) -> StoredRows:
        """A piece whose format is not PLAIN, as it is stored."""
        rows = self._scaled.rows(self._place(piece).name)
        return _parted(rows, self._paired_heads.get(piece.name))

    def read(self, piece: Piece, destination: torch.Tensor) -> None:
        """Fill the destination."""
        kind = self.format_of(piece)
        if kind is not WeightFormat.PLAIN:
            expand(kind, self.read_stored(piece), destination)
            return
        stored = self._stored(self._place(piece))
        num_heads = self._paired_heads.get(piece.name)
        if num_heads is None:
            destination.copy_(stored)
        else:
            _part_pairs(stored, num_heads, destination)

    def _stored(self, place: Place) -> torch.Tensor:
        if not place.stack:
            return self.tensor(place.name)
        stacked = self._file(place.name).get_slice(place.name)
        found: torch.Tensor = stacked[place.expert, place.first : place.end]
        return found

    def view(self, piece: Piece) -> torch.Tensor | None:
        """The piece where it lies in its file; None if reading it takes more than a copy."""
        is_plain = self.format_of(piece) is WeightFormat.PLAIN
        is_plain = is_plain and piece.name not in self._paired_heads
        return self._stored(self._place(piece)) if is_plain else None

    @property
    def names(self) -> list[str]:
        """Of all tensors, in order."""
        return sorted(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored; no copy."""
        found: torch.Tensor = self._file(name).get_tensor(name)
        return found

    def _file(self, name: str) -> Any:
        path = self._file_of[name]
        self._observers[path].check()
        return self._files[path]


def _rotated_heads(spec: ModelSpec) -> dict[str, int]:
    """Heads of each piece that the rotary embedding turns."""
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    return heads | {f"{name}_bias": count for name, count in heads.items()}


def _part_pairs(stored: torch.Tensor, num_heads: int, destination: torch.Tensor) -> None:
    """Rows of each head, whose pairs lie side by side, to first halves and second halves."""
    half = destination.shape[0] // num_heads // 2
    pairs = stored.view(num_heads, half, 2, -1)
    destination.view(num_heads, 2, half, -1).copy_(pairs.transpose(1, 2))


def _parted(rows: StoredRows, num_heads: int | None) -> StoredRows:
    """The same of rows that stay quantised; None: no pairs."""
    if num_heads is None:
        return rows
    order = np.arange(len(rows.blocks)).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return StoredRows(rows.blocks[order], None if rows.scales is None else rows.scales[order])


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelFiles(f"{path}: truncated or corrupt: {error}") from error


class GgufReader:
    """One GGUF file of any quantisation."""

    fills_devices = False
    quantization = "gguf"

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._file = read_gguf(path)
        self._spec = spec
        self._witness = _Witness(path)
        # Copy-on-write only because torch warns about arrays that cannot be written.
        self._data = np.memmap(path, dtype=np.uint8, mode="c")
        # llama.cpp stores q and k of these architectures with interleaved rotary pairs.
        is_paired = self._file.metadata.get("general.architecture") in PAIRED_ROPE
        self._paired_heads = _rotated_heads(spec) if is_paired else {}
        self._norm_offset = float(spec.has_offset_norms)

    def check(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Raise ModelFiles unless the piece is there, whole and of this shape."""
        path, place = self._file.path, self._place(piece)
        name, shape = place.name, place.stack or shape
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ModelFiles(f"{path}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise ModelFiles(
                f"{path}: tensor {name!r} has shape {tensor.shape}, its metadata implies {shape}"
            )
        size = row_bytes(tensor.quant_type, shape[-1])
        if size is None:
            raise UnsupportedModel(
                f"{path}: tensor {name!r} has GGML type {tensor.quant_type}, which is not known"
            )
        if max(self._span(place)) > self._file.num_bytes:
            raise ModelFiles(f"{path}: truncated inside tensor {name!r}")

    def format_of(self, piece: Piece) -> WeightFormat:
        """How the piece can lie in memory without a loss; PLAIN if it is not quantised."""
        tensor = self._file.tensors.get(self._place(piece).name)
        if tensor is None:
            return WeightFormat.PLAIN  # ``check`` says what is wrong
        return GGUF_FORMATS.get(tensor.quant_type, WeightFormat.PLAIN)

    def read_stored(self, piece: Piece) -> StoredRows:
        """A piece whose format is not PLAIN, as it is stored."""
        raw, place = self._stored_bytes(piece), self._place(piece)
        num_rows = self._file.tensors[place.name].shape[0]
        rows = raw.reshape(place.end - place.first if place.stack else num_rows, -1)
        return _parted(StoredRows(rows), self._paired_heads.get(piece.name))

    def _place(self, piece: Piece) -> Place:
        """Where the piece is; where it usually would be, if it is nowhere."""
        places = gguf_places(piece, self._spec)
        return next((p for p in places if p.name in self._file.tensors), places[0])

    def _stored_bytes(self, piece: Piece) -> npt.NDArray[np.uint8]:
        self._witness.check()
        first, end = self._span(self._place(piece))
        return np.asarray(self._data[first:end])

    def read(self, piece: Piece, destination: torch.Tensor) -> None:
        """Fill the destination."""
        tensor = self._file.tensors[self._place(piece).name]
        raw = self._stored_bytes(piece)
        num_heads = self._paired_heads.get(piece.name)
        if self._norm_offset and piece.name.endswith("norm"):
            wide = torch.empty_like(destination, dtype=torch.float32)
            dequantise(raw, tensor.quant_type, wide)
            destination.copy_(wide - self._norm_offset)
            return
        if num_heads is None:
            dequantise(raw, tensor.quant_type, destination)
            return
        stored = torch.empty_like(destination)
        dequantise(raw, tensor.quant_type, stored)
        _part_pairs(stored, num_heads, destination)

    def _span(self, place: Place) -> tuple[int, int]:
        """[first, end) bytes of the file."""
        tensor = self._file.tensors[place.name]
        size = row_bytes(tensor.quant_type, tensor.shape[-1])
        assert size is not None, tensor
        first, end = 0, tensor.shape[0] if len(tensor.shape) > 1 else 1
        if place.stack:
            above = place.expert * place.stack[1] if place.expert else 0
            first, end = above + place.first, above + place.end
        return tensor.offset + first * size, tensor.offset + end * size


class DummyReader:
    """Random weights, the same wherever the seed is the same, at the speed of a copy."""

    fills_devices = True
    quantization = None
    _BLOCK_ELEMENTS = 1_048_573
    """Prime, so that rows of no width repeat in step."""
    _DEVIATION = 0.02

    def __init__(self, seed: int, norm: float = 1.0) -> None:
        """``norm`` is what norms have, so that they multiply by 1."""
        self._seed = seed
        self._norm = norm
        generator = torch.Generator().manual_seed(seed)
        self._block = torch.randn(self._BLOCK_ELEMENTS, generator=generator) * self._DEVIATION

    def format_of(self, piece: Piece) -> WeightFormat:
        """Nothing is quantised."""
        return WeightFormat.PLAIN

    def read_stored(self, piece: Piece) -> StoredRows:
        """Nothing is quantised."""
        raise AssertionError(piece)

    def check(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Every piece of every shape is there."""

    def read(self, piece: Piece, destination: torch.Tensor) -> None:
        """Fill the destination."""
        if piece.name.endswith("norm"):
            destination.fill_(self._norm)
            return
        if (self._block.dtype, self._block.device) != (destination.dtype, destination.device):
            self._block = self._block.to(destination)
        flat = destination.view(-1)
        start = zlib.crc32(f"{self._seed}.{piece.layer}.{piece.name}".encode())
        start %= self._BLOCK_ELEMENTS
        done = 0
        while done < flat.numel():
            num = min(flat.numel() - done, self._BLOCK_ELEMENTS - start)
            flat[done : done + num] = self._block[start : start + num]
            done += num
            start = 0
