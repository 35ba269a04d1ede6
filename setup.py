"""Builds the C kernels with the package: a library for ctypes, which knows no version of Python.

So one wheel per platform serves every Python: py3-none-<platform>. Without a compiler the build goes on and the wheel
is pure, py3-none-any: everything works, and training takes the slower way.
"""

import hashlib
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/sparsevd/kernels")
FILES = sorted(KERNELS.glob("*.[ch]"))


class Library(build_ext):
    """Named without a Python in it; kernels/loading.py looks for exactly this name."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        # What an earlier build left must not get into the wheel of a build that fails.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)


class Wheel(bdist_wheel):
    """Tagged by what was built."""

    def run(self) -> None:
        self.run_command("build")
        built = self.get_finalized_command("build_ext").get_outputs()
        self.root_is_pure = not any(Path(path).exists() for path in built)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": Library, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "sparsevd.kernels._kernels",
            sources=[path.as_posix() for path in FILES if path.suffix == ".c"],
            depends=[path.as_posix() for path in FILES if path.suffix == ".h"],
            # The sources as a number: tests/test_project.py sees by it whether the kernels are those of today.
            define_macros=[
                ("SPARSEVD_SOURCES", f'"{hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()}"')
            ],
            # No -march: the instruction set is chosen at run time. Wide vectors only pass between inlined functions.
            extra_compile_args=["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wno-psabi"],
            # Not linked with an OpenMP on Linux: kernels/openmp.py gives it the one that torch has brought.
            extra_link_args=[] if sys.platform == "linux" else ["-fopenmp"],
            optional=True,
        )
    ],
)
