"""KERNEL_FLAGS in the environment has the C kernels compiled otherwise: ``make test-kernels``.

They come before those of any level then.
"""

import os

from kunserve.engine.cpu.kernels import build

if kernel_flags := os.environ.get("KERNEL_FLAGS"):
    build.NATIVE = tuple(kernel_flags.split())
    build.fitting_levels = tuple
