"""Builds the C kernels with the package. Without a compiler the build goes on, and training takes the slower way."""

from setuptools import Extension, setup

KERNELS = "src/sparsevd/kernels"
SOURCES = ["kernels", "train_generic", "train_avx2", "train_avx512"]  # training
SOURCES += ["inference", "sparse_generic", "sparse_avx2", "sparse_avx512"]
SOURCES += ["pack"]  # the model file

setup(
    ext_modules=[
        Extension(
            "sparsevd.kernels._kernels",
            sources=[f"{KERNELS}/{name}.c" for name in SOURCES],
            depends=[f"{KERNELS}/{name}.h" for name in ("kernels", "train", "vectors", "inference", "sparse")],
            # No -march: the instruction set is chosen at run time. Wide vectors only pass between inlined functions.
            extra_compile_args=["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wno-psabi"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
