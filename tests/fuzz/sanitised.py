"""The C kernels with the address and undefined-behaviour sanitisers, for a Python process that loads them."""

import shutil
import subprocess
from pathlib import Path

from sparsevd import kernels

SOURCES = Path(kernels.__file__).parent


def environment(folder: Path) -> dict[str, str] | None:
    """What to add to a process' environment so that it runs on them; None where the compiler has no sanitisers."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "_kernels_sanitised.so"
    command = [compiler, "-std=gnu11", "-g", "-O1", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wno-psabi"]
    command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    command += ["-shared", "-fPIC", *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    # And C++'s library, or the sanitiser does not find how torch throws exceptions.
    preload = [_found(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if built.returncode != 0 or not all(path.is_absolute() for path in preload):
        return None
    # Python itself keeps memory until its end: only what is read or written wrongly counts here.
    options = "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1"
    return {"SPARSEVD_KERNELS": str(library), "LD_PRELOAD": " ".join(map(str, preload)), "ASAN_OPTIONS": options}


def _found(compiler: str, library: str) -> Path:
    """Where the compiler has a library; only its name where it has none."""
    result = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=False)
    return Path(result.stdout.strip())
