"""Compiles every variant of the Triton kernels that some models run, and reads the machine code.

    python -m tests.unit.engine.gpu_kernels.sass [MODEL ...]        (make test-gpu-kernels)

For compute capability 9.0, by the ptxas and the disassembler that Triton brings: no device is
needed. Of each kernel it says what must be true of fast ones, and ends with 1 where it is not:
nothing is spilled, shared memory fits, keys and values (or rows) are loaded 16 bytes at a time, and
products of half precision are the tensor cores'. Those with quantised weights are by one
instruction however many tokens there are, and fetch ahead.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.quantised import FORMS
from kunserve_extras.triton_ops.attention import attention_kernel, join_kernel, part_kernel
from kunserve_extras.triton_ops.experts import down_kernel, gate_kernel, router_kernel
from kunserve_extras.triton_ops.packed import packed_kernel
from kunserve_extras.triton_ops.rows import gate_mul_kernel, place_kernel, rms_norm_kernel
from kunserve_extras.triton_ops.tiles import LEAST_PART_KEYS, Tile, tiles_for
from tests.specs import model_spec
from tests.unit.engine.gpu_kernels.compiled_kernels import (
    CUOBJDUMP,
    NO_TILE,
    Product,
    compile_kernel,
    expert_variants,
    place_variant,
    product_variants,
    resources,
)

LEAST_WIDTH = 1024
"""Of rows: 128 threads with 16 bytes each."""
MOST_SHARED_BYTES = 227 * 1024
WIDE = re.compile(r"\b(?:LDG|LDGSTS)\.[\w.]*128\b")
LATER = re.compile(r"\bLDGSTS\.[\w.]*(?:64|128)\b")
"""Straight into shared memory, while others are computed with."""
TENSOR_CORES = re.compile(r"\b(?:HMMA|HGMMA|QGMMA)\.")
ALIKE = re.compile(r"\bHGMMA\.64x\d+x16\.F32\b")
OTHERWISE = re.compile(r"\b(?:HMMA|QGMMA)\.|\bHGMMA\.(?!64x\d+x16\.F32\b)")


@dataclass(frozen=True, slots=True)
class Model:
    """What decides which variants are compiled."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    cap: float = 0.0
    is_gemma: bool = False
    norms_heads: bool = False
    """Each head of queries and keys by itself."""
    experts: Experts | None = None

    def spec(self, dtype: str) -> ModelSpec:
        """As far as tiles need it."""
        return model_spec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            experts=self.experts,
            dtype=dtype,
        )


MODELS = {
    "qwen2.5-7b": Model(28, 4, 128, 3584, 18944),
    "qwen2.5-14b": Model(40, 8, 128, 5120, 13824),
    "qwen3-8b": Model(32, 8, 128, 4096, 12288, norms_heads=True),
    "qwen3-32b": Model(64, 8, 128, 5120, 25600, norms_heads=True),
    "gemma-2-9b": Model(16, 8, 256, 3584, 14336, cap=50.0, is_gemma=True),
    "gemma-3-27b": Model(32, 16, 128, 5376, 21504, is_gemma=True, norms_heads=True),
    "qwen3-30b-a3b": Model(32, 4, 128, 2048, 768, norms_heads=True, experts=Experts(128, 8, True)),
    "mixtral-8x7b": Model(32, 8, 128, 4096, 14336, experts=Experts(8, 2, True)),
}
PRODUCTS = (attention_kernel, part_kernel, router_kernel, gate_kernel, down_kernel)
"""Which tensor cores are for."""
GROUPED = (gate_kernel, down_kernel)

Variant = tuple[Any, dict[str, Any], Tile]


def variants(model: Model, dtype: str) -> Iterator[Variant]:
    """Each kernel with what ``TritonOps`` gives it."""
    tiles, group, dim = tiles_for(model.spec(dtype)), model.heads // model.kv_heads, model.head_dim
    head = {"HEAD_DIM": dim, "HEAD_PAD": dim}
    unit = {"KV_HEADS": model.kv_heads, "BLOCK_SIZE": 64}
    shared = head | unit | {"GROUP": group, "CAP": model.cap}
    parts = {"PARTS": tiles.parts, "LEAST": LEAST_PART_KEYS}
    tile = tiles.several
    own = {"ROWS": tile.rows, "KEYS": tile.keys, "QUERIES": tile.rows // group}
    yield attention_kernel, shared | own, tile
    tile = tiles.single
    own = {"ROWS": tile.rows, "KEYS": tile.keys}
    yield part_kernel, shared | own | parts, tile
    yield join_kernel, head | parts | {"HEADS": model.heads, "KEYS": tile.keys}, NO_TILE
    pad = 1 << (model.hidden - 1).bit_length()
    yield rms_norm_kernel, {"WIDTH": model.hidden, "PAD": pad, "OFFSET": model.is_gemma}, NO_TILE
    gate = {"WIDTH": model.intermediate, "PIECE": 1024, "GELU": model.is_gemma}
    yield gate_mul_kernel, gate, NO_TILE
    constants, tile = place_variant(
        model.heads, model.kv_heads, dim, 64, norms_heads=model.norms_heads, is_gemma=model.is_gemma
    )
    yield place_kernel, constants, tile
    if model.experts is not None:
        yield from expert_variants(model.spec(dtype))


def products(model: Model, dtype: str) -> Iterator[Product]:
    """With weights in each format that is kept: q, k and v with a bias, and down."""
    for columns, has_bias in ((model.hidden, True), (model.intermediate, False)):
        yield from product_variants(FORMS, columns, dtype, has_bias=has_bias)


def disassemble(cubin: bytes) -> str:
    """Its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def faults(
    kernel: Any, dtype: str, constants: dict[str, Any], sass: str, used: tuple[int, int, int]
) -> list[str]:
    """What a fast kernel would not have, in words. Rows of a head are too short to be wide."""
    shared_bytes, registers, spilled_bytes = used
    is_packed = kernel is packed_kernel
    is_product = kernel in PRODUCTS
    is_wide = is_product or constants.get("WIDTH", 0) >= LEAST_WIDTH
    # Of rows of 32 bytes Triton loads 8 at a time for 16 tokens. Whether more is to be had is open.
    is_wide = is_wide or (is_packed and constants["STEP"] * constants["BITS"] // 8 >= 64)
    is_half = dtype != "float32"
    checks = {
        f"{spilled_bytes} bytes spilled": spilled_bytes > 0,
        f"{registers} registers": registers > 255,
        f"{shared_bytes} bytes of shared memory": shared_bytes > MOST_SHARED_BYTES,
        "no load of 16 bytes": is_wide and not WIDE.search(sass),
        "no tensor cores": is_product and is_half and not TENSOR_CORES.search(sass),
        # Of few rows and of many, or a token's bits would depend on how many there are.
        "not one kind of products": kernel in GROUPED
        and is_half
        and not (ALIKE.search(sass) and not OTHERWISE.search(sass)),
        "no tensor cores 64 rows at a time": is_packed and is_half and "HGMMA.64x" not in sass,
        "loads that wait": is_packed and is_half and not LATER.search(sass),
        "tensor cores for float32": not is_half and bool(TENSOR_CORES.search(sass)),
    }
    return [what for what, is_so in checks.items() if is_so]


def work(model: Model, dtype: str) -> Iterator[tuple[Any, dict[str, Any], Tile, str]]:
    """All that is compiled: a kernel, its constants, its threads, and the type of scales."""
    for kernel, constants, tile in variants(model, dtype):
        yield kernel, constants, tile, "*fp32"
    for product in products(model, dtype):
        yield packed_kernel, product.constants, product.tile, product.scales


def main(names: list[str]) -> int:
    """A line for each variant; whether any is at fault."""
    num_bad, known = 0, set()
    for name in names or MODELS:
        for dtype in ("bfloat16", "float32"):
            for kernel, constants, tile, scales in work(MODELS[name], dtype):
                key = kernel.__name__, dtype, str(constants), tile, scales
                if key in known:
                    continue
                known.add(key)
                built = compile_kernel(kernel, dtype, constants, tile, scales)
                sass, used = disassemble(built.asm["cubin"]), resources(built)
                found = faults(kernel, dtype, constants, sass, used)
                num_bad += bool(found)
                loads = Counter(re.findall(r"\b(?:LDG|LDGSTS)\.[\w.]*", sass))
                products = Counter(re.findall(r"\b(?:HMMA|HGMMA)\.\w+", sass))
                what = ", ".join(found) or "ok"
                print(name, kernel.__name__, dtype, *used, dict(loads), dict(products), what)
                sys.stdout.flush()
    print(f"{len(known)} variants, {num_bad} at fault")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
