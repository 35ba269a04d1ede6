"""Builds the C kernels with the package. Without a compiler the build goes on, and training takes the slower way."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

KERNELS = Path("src/sparsevd/kernels")
FILES = sorted(KERNELS.glob("*.[ch]"))

setup(
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
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
