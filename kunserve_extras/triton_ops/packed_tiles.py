"""How much of a product with a quantised weight one program holds."""

from dataclasses import dataclass

from kunserve_extras.torch_body.quantised import Part

PRODUCT_TOKENS = (1, 17, 65)
"""From so many tokens on a program has the next larger tile."""
_STEP = 128
"""Columns at a time, if a group has so many."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """What a program multiplies at once, and with how many threads."""

    rows: int
    """Of the weight. Tensor cores of compute capability 9.0 take 64 at a time."""
    tokens: int
    step: int
    """Columns. The same however many tokens there are, because sums depend on it."""
    num_warps: int
    num_stages: int


def product_tile(num_tokens: int, part: Part, dtype: str) -> ProductTile:
    """What fits registers and shared memory of compute capability 9.0 without spilling."""
    if dtype == "float32":  # without tensor cores
        return ProductTile(64, 16, 32, 4, 2)
    step = min(part.form.group or _STEP, _STEP)
    if num_tokens < PRODUCT_TOKENS[1]:
        return ProductTile(64, 16, step, 4, 4)
    if num_tokens < PRODUCT_TOKENS[2]:
        return ProductTile(64, 64, step, 4, 4)
    return ProductTile(128, 128, step, 8, 3)
