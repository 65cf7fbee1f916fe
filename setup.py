"""A wheel's compiled kernels and its tag; everything else is in pyproject.toml."""

import platform
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # a build in an environment of its own does not have it

from kunserve.engine.cpu.kernels.build import SHIPPED, build_shipped  # noqa: E402
from kunserve.engine.cpu.kernels.levels import levels_of  # noqa: E402


class BuildPython(build_py):
    """Compiles the kernels into what becomes a wheel. An editable install compiles its own."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / SHIPPED.relative_to(ROOT)
        for library in build_shipped(target):
            self.announce(f"compiled {library.name}", level=2)


class BuildWheel(bdist_wheel):
    """Any Python 3, one platform: the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


class KernelDistribution(Distribution):
    """Belongs to one platform wherever it brings kernels."""

    def has_ext_modules(self) -> bool:
        return bool(levels_of(platform.machine()))


setup(distclass=KernelDistribution, cmdclass={"build_py": BuildPython, "bdist_wheel": BuildWheel})
