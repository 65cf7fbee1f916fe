"""Compiles the Triton kernels for compute capability 9.0, and reads what they need.

    python -m tests.unit.engine.gpu_kernels.compiled_kernels [all]

Without ``all`` only what Qwen2.5-14B and 7B run. No device is needed. Prints a line per kernel: its
name, type and sizes, then bytes of shared memory, registers, and bytes of each thread that lie in
slow memory, because registers were spilled.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kunserve.model.experts import Experts
from kunserve.model.packed import WeightFormat
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.quantised import FORMS, Part
from kunserve_extras.triton_ops.attention import attention_kernel, join_kernel, part_kernel
from kunserve_extras.triton_ops.expert_ops import (
    ORDER_PIECE,
    SUM_PIECE,
    ExpertTile,
    choose_constants,
    expert_tiles,
    group_constants,
    router_tile,
)
from kunserve_extras.triton_ops.experts import (
    choose_kernel,
    down_kernel,
    gate_kernel,
    order_kernel,
    router_kernel,
    sum_kernel,
)
from kunserve_extras.triton_ops.ops import place_warps
from kunserve_extras.triton_ops.packed import packed_kernel
from kunserve_extras.triton_ops.packed_tiles import PRODUCT_TOKENS, product_tile
from kunserve_extras.triton_ops.rows import gate_mul_kernel, place_kernel, rms_norm_kernel
from kunserve_extras.triton_ops.tiles import LEAST_PART_KEYS, Tile, tiles_for
from tests.specs import model_spec

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOATS = {"q", "kv", "out", "x", "weight", "gate_up", "k", "v", "q_weight", "k_weight"}
FLOATS |= {"bias", "router", "gated", "down", "products", "shared"}
FLOAT32S = {"sums", "angles", "logits", "shares"}
INTS = {"tables", "q_starts", "context_lens", "entries", "offsets", "chosen", "pairs", "starts"}
BYTES = {"values"}
NO_TILE = Tile(0, 0, 4, 3)
SHAPES = [  # heads, KV heads, head_dim, block size
    (40, 8, 128, 64),
    (28, 4, 128, 16),
    (9, 3, 64, 16),
    (16, 8, 256, 64),
]
NUM_MAIN_SHAPES = 2
SPARSE = [  # hidden, inner and experts of Qwen3-30B-A3B, Mixtral 8x7B, Qwen1.5-MoE-A2.7B
    (2048, 768, Experts(128, 8, normalised=True)),
    (4096, 14336, Experts(8, 2, normalised=True)),
    (2048, 1408, Experts(60, 4, normalised=False, shared_size=5632)),
]
NUM_MAIN_SPARSE = 1
SERVED = (WeightFormat.FP8, WeightFormat.FP8_128, WeightFormat.INT4_128)
"""Formats that fleets serve most."""


def compile_kernel(
    kernel: Any,
    dtype: str,
    constants: dict[str, float],
    tile: Tile = NO_TILE,
    scales: str = "*fp32",
) -> Any:
    """Compiled as a launch would: addresses and strides are multiples of 16.

    ``scales`` is the type of a quantised weight's.
    """
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "*fp32" if dtype == "float32" else "*bf16"
        elif name in FLOAT32S:
            signature[name] = "*fp32"
        elif name in BYTES:
            signature[name] = "*u8"
        elif name == "scales":
            signature[name] = scales
        elif name in INTS:
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in ("eps", "scale") else "i32"
        if signature[name].startswith("*") or name.endswith("stride"):
            attributes[number,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def place_variant(
    heads: int, kv_heads: int, head_dim: int, block_size: int, *, norms_heads: bool, is_gemma: bool
) -> tuple[dict[str, float], Tile]:
    """The constants that ``place_kernel`` is given for such a model, and its threads."""
    group_pad = triton.next_power_of_2(heads // kv_heads)
    pad = triton.next_power_of_2(head_dim // 2)
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "GROUP_PAD": group_pad,
        "BLOCK_SIZE": block_size,
        "HALF": head_dim // 2,
        "PAD": pad,
        "NORMS": norms_heads,
        "OFFSET": is_gemma,
    }
    return constants, Tile(0, 0, place_warps(group_pad, pad), 3)


def expert_variants(spec: ModelSpec) -> Iterator[tuple[Any, dict[str, Any], Tile]]:
    """Each kernel of a sparse MLP with what ``ExpertOps`` gives it, and its threads."""
    experts, hidden = spec.experts, spec.hidden_size
    assert experts is not None
    tile = router_tile(spec.dtype)
    own = {"LOGITS": experts.num_logits, "HIDDEN": hidden}
    yield router_kernel, own | tile.constants, threads(tile)
    yield choose_kernel, choose_constants(experts), NO_TILE
    own = {"EXPERTS": experts.held, "PIECE": ORDER_PIECE}
    yield order_kernel, own, Tile(0, 0, 8, 3)
    sizes = group_constants(experts) | {"HIDDEN": hidden, "INNER": spec.intermediate_size}
    for are_many in (False, True)[: 1 if spec.dtype == "float32" else 2]:
        tiles = expert_tiles(spec.dtype, are_many=are_many)
        own = sizes | {"CHOICES": experts.per_token, "GELU": False}
        yield gate_kernel, own | tiles.gate.constants, threads(tiles.gate)
        yield down_kernel, sizes | tiles.down.constants, threads(tiles.down)
    has_shared = experts.shared_size is not None
    own = {"EXPERTS": experts.held, "CHOICES": experts.per_token, "LOGITS": experts.num_logits}
    own |= {"WIDTH": hidden, "SHARED": has_shared, "ADDS": True, "PIECE": SUM_PIECE}
    yield sum_kernel, own, NO_TILE


def threads(tile: ExpertTile) -> Tile:
    """A product's, as of attention."""
    return Tile(0, 0, tile.num_warps, tile.num_stages)


class Product(NamedTuple):
    """One variant of ``packed_kernel``."""

    constants: dict[str, float]
    tile: Tile
    scales: str
    name: str


def product_variants(
    kinds: Iterable[WeightFormat], columns: int, dtype: str, *, has_bias: bool = True
) -> Iterator[Product]:
    """For every tile of each of these formats."""
    for kind in kinds:
        form = FORMS[kind]
        room = torch.empty(1, dtype=torch.uint8)
        part = Part(form, columns, room, room)
        tiles = [product_tile(num_tokens, part, dtype) for num_tokens in PRODUCT_TOKENS]
        for tile in dict.fromkeys(tiles):
            constants = {
                "COLUMNS": columns,
                "GROUP": part.group,
                "BITS": form.bits,
                "FLOATS": form.is_e4m3,
                "BIAS": has_bias,
                "ADDS": not has_bias,
                "ROWS": tile.rows,
                "TOKENS": tile.tokens,
                "STEP": tile.step,
            }
            scales = "*fp16" if form.scale is torch.float16 else "*fp32"
            threads = Tile(0, 0, tile.num_warps, tile.num_stages)
            yield Product(constants, threads, scales, kind.name)


def resources(built: Any) -> tuple[int, int, int]:
    """Bytes of shared memory, registers, and bytes of each thread that were spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (used,) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    registers, stack_bytes, local_bytes = map(int, used)
    return built.metadata.shared, registers, stack_bytes + local_bytes


def say(
    kernel: Any,
    dtype: str,
    constants: dict[str, float],
    tile: Tile = NO_TILE,
    scales: str = "*fp32",
) -> None:
    used = resources(compile_kernel(kernel, dtype, constants, tile, scales))
    sizes = ",".join(f"{name}={value}" for name, value in constants.items())
    print(kernel.__name__, dtype, sizes, *used, flush=True)


def say_attention(shape: tuple[int, int, int, int], dtype: str) -> None:
    heads, kv_heads, head_dim, block_size = shape
    spec = model_spec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    tiles, group = tiles_for(spec), heads // kv_heads
    head = {"HEAD_DIM": head_dim, "HEAD_PAD": head_dim}
    shared = head | {"KV_HEADS": kv_heads, "GROUP": group, "BLOCK_SIZE": block_size, "CAP": 0.0}
    parts = {"PARTS": tiles.parts, "LEAST": LEAST_PART_KEYS}
    tile = tiles.several
    own = {"ROWS": tile.rows, "KEYS": tile.keys, "QUERIES": tile.rows // group}
    say(attention_kernel, dtype, shared | own, tile)
    tile = tiles.single
    own = {"ROWS": tile.rows, "KEYS": tile.keys}
    say(part_kernel, dtype, shared | own | parts, tile)
    say(join_kernel, dtype, head | parts | {"HEADS": heads, "KEYS": tile.keys})


if __name__ == "__main__":
    is_all = "all" in sys.argv[1:]
    for dtype in ("float32", "bfloat16"):
        for shape in SHAPES[: None if is_all else NUM_MAIN_SHAPES if dtype == "bfloat16" else 1]:
            say_attention(shape, dtype)
        say(rms_norm_kernel, dtype, {"WIDTH": 5120, "PAD": 8192, "OFFSET": False})
        say(gate_mul_kernel, dtype, {"WIDTH": 13824, "PIECE": 1024, "GELU": False})
        say(place_kernel, dtype, *place_variant(40, 8, 128, 64, norms_heads=True, is_gemma=False))
        for hidden, inner, experts in SPARSE[: None if is_all else NUM_MAIN_SPARSE]:
            sparse = {"hidden_size": hidden, "intermediate_size": inner, "experts": experts}
            for variant in expert_variants(model_spec(**sparse, dtype=dtype)):
                say(variant[0], dtype, *variant[1:])
        if is_all or dtype == "bfloat16":
            for one in product_variants(FORMS if is_all else SERVED, 5120, dtype):
                say(packed_kernel, dtype, *one[:3])
