"""How much of a model's KV lies outside the windows of its layers, at lengths of real traffic.

    python -m benchmarks.local_kv

Arithmetic over data sets: every request's KV is counted at each token of its answer, because that
is how long it lies in memory. A layer with a window needs the tokens of its window only. Figures:

* ``outside``: KV that no step will read again, of all KV;
* ``room``: how many times the requests would fit if blocks were freed as they leave the window.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report, Setting
from kunserve.workload.data.catalog import SHIPPED_FOLDER
from kunserve.workload.traces import read_azure, read_lengths
from kunserve.workload.workload import Lengths

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A public model, as far as its KV goes."""

    name: str
    num_layers: int
    num_global: int
    window: int


SHAPES = (
    Shape("gemma-2-9b", 42, 21, 4096),
    Shape("gemma-3-1b", 26, 4, 512),
    Shape("gemma-3-4b", 34, 5, 1024),
    Shape("gemma-3-27b", 62, 10, 1024),
)


def data_sets() -> dict[str, Lengths]:
    """The shipped ones."""
    azure = read_azure(SHIPPED_FOLDER / "azure-2023-merged-640s.csv.gz")
    return {
        "azure-2023": azure.lengths,
        "sharegpt": read_lengths(SHIPPED_FOLDER / "sharegpt.csv.gz"),
        "longbench": read_lengths(SHIPPED_FOLDER / "longbench.csv"),
    }


def contexts_of(lengths: Lengths) -> npt.NDArray[np.int64]:
    """The context at every token of every answer."""
    return np.concatenate(
        [
            np.arange(num_in + 1, num_in + num_out + 1)
            for num_in, num_out in zip(lengths.input_tokens, lengths.output_tokens, strict=True)
        ]
    )


def main() -> None:
    """Print the figures."""
    with Report("local_kv", block=BLOCK_TOKENS) as report:
        for data, lengths in data_sets().items():
            contexts = contexts_of(lengths)
            blocks = -(-contexts // BLOCK_TOKENS)
            for shape in SHAPES:
                num_local = shape.num_layers - shape.num_global
                hidden = np.maximum(0, contexts - shape.window) * num_local
                # A window begins somewhere in a block.
                most = -(-shape.window // BLOCK_TOKENS) + 1
                kept = blocks * shape.num_global + np.minimum(blocks, most) * num_local
                of: dict[str, Setting] = {
                    "data": data,
                    "mean context": float(contexts.mean()),
                    "model": shape.name,
                }
                outside = float(hidden.sum() / (contexts.sum() * shape.num_layers))
                report.add("outside", 100 * outside, "%", **of)
                report.add("room", float(blocks.sum() * shape.num_layers / kept.sum()), "x", **of)


if __name__ == "__main__":
    main()
