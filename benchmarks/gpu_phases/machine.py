"""The device that phases run on: a GPU, or the stand-in for its driver with torch on the CPU."""

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_kit import parts
from benchmarks.gpu_kit.parts import NOTHING_KNOWN, Known, Part
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.driver import LIBRARY, Driver
from tests.specs import model_spec

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FAKE_GRANULARITY_BYTES = 8 * KIB
REHEARSED_ROUNDS = 2
"""Of whatever is timed, at most: times of the stand-in say nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a phase runs. Rehearsals are the same code with small sizes."""

    is_real: bool
    library: str
    """libcuda, or its stand-in."""
    folder: Path
    """What phases leave for those after them."""
    limit_s: float = math.inf
    """After which the phase is stopped."""
    known: Known = NOTHING_KNOWN
    """Parts that earlier calls have done."""

    @classmethod
    def named(
        cls, device: str, folder: Path, limit_s: float = math.inf, known: Known | None = None
    ) -> "Machine":
        """``cuda`` or ``fake``. The stand-in needs gcc and this project's tests."""
        known = known or NOTHING_KNOWN
        if device == "cuda":
            return cls(True, LIBRARY, folder, limit_s, known)
        from tests.fakecuda.library import build

        os.environ["FAKECUDA_GRANULARITY_BYTES"] = str(FAKE_GRANULARITY_BYTES)
        torch.set_num_threads(1)
        return cls(False, build(), folder, limit_s, known)

    def do(self, *wanted: Part) -> None:
        """The parts of a phase that are asked for and not done; see ``parts.do``."""
        parts.do(wanted, self.known, self.is_alive, self.forget)

    def is_alive(self) -> bool:
        """Whether the device still does what it is told: after some errors it never does again."""
        try:
            self.synchronize()
            is_right = int(torch.ones(1, device=self.torch_device).add_(1).item()) == 2
            self.driver().memory_bytes()
        except (RuntimeError, OSError):
            return False
        return is_right

    def forget(self) -> None:
        """Give back what nobody refers to."""
        gc.collect()
        if self.is_real:
            with contextlib.suppress(RuntimeError):  # a device that is lost has nothing to give
                torch.cuda.empty_cache()

    @property
    def torch_device(self) -> torch.device:
        """Where torch computes."""
        return torch.device("cuda", 0) if self.is_real else torch.device("cpu")

    @property
    def instance_device(self) -> str:
        """``InstanceConfig.device`` of instances on it."""
        return "cuda" if self.is_real else f"stand-in:{self.library}"

    def driver(self) -> Driver:
        """The driver, with torch's context where torch uses the device."""
        if self.is_real:
            torch.cuda.set_device(self.torch_device)
        return Driver(0, self.library)

    def synchronize(self) -> None:
        """Wait for everything that torch was given."""
        if self.is_real:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], rounds: int) -> tuple[float, float]:
        """Median time of one call until the device is done, and until it has only been asked.

        A rehearsal asks for fewer rounds.
        """
        rounds = rounds if self.is_real else min(rounds, REHEARSED_ROUNDS)
        work()
        self.synchronize()
        whole, asked = [], []
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            asked.append(time.perf_counter() - began)
            self.synchronize()
            whole.append(time.perf_counter() - began)
        return median(whole), median(asked)


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


def _qwen2(
    name: str,
    sizes: tuple[int, int, int, int, int],
    heads: tuple[int, int, int],
    dtype: str = "bfloat16",
) -> ModelSpec:
    layers, hidden, intermediate, vocab, positions = sizes
    return model_spec(
        name=name,
        architecture="Qwen2ForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        max_position=positions,
        rope_theta=1e6,
        rms_eps=1e-6,
        tied_embeddings=False,
        attention_bias=True,
        dtype=dtype,
    )


def _qwen3_moe(
    name: str,
    sizes: tuple[int, int, int, int, int],
    heads: tuple[int, int, int],
    experts: Experts,
) -> ModelSpec:
    return replace(
        _qwen2(name, sizes, heads),
        architecture="Qwen3MoeForCausalLM",
        attention_bias=False,
        qk_norm=True,
        experts=experts,
    )


SHAPES = {
    "tiny": _qwen2("tiny", (4, 64, 96, 160, 512), (4, 2, 32)),
    "tiny-words": _qwen2("tiny-words", (4, 64, 96, 32_768, 512), (4, 2, 32)),
    "1.5b": _qwen2("qwen2.5-1.5b", (28, 1536, 8960, 151_936, 32_768), (12, 2, 128)),
    "7b": _qwen2("qwen2.5-7b", (28, 3584, 18_944, 152_064, 32_768), (28, 4, 128)),
    "14b": _qwen2("qwen2.5-14b", (48, 5120, 13_824, 152_064, 32_768), (40, 8, 128)),
    "tiny-sparse": _qwen3_moe(
        "tiny-sparse", (4, 64, 32, 160, 512), (4, 2, 32), Experts(6, 2, True)
    ),
    "30b-a3b": _qwen3_moe(
        "qwen3-30b-a3b", (48, 2048, 768, 151_936, 32_768), (32, 4, 128), Experts(128, 8, True)
    ),
}
"""Shapes of Qwen2.5, and of Qwen3 with experts; the weights are random."""
