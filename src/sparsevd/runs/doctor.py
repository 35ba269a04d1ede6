"""What this installation has, and what is wrong with it: a line for each thing that sparsevd needs or could use."""

import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsevd import kernels
from sparsevd.errors import DataError
from sparsevd.kernels import loading, openmp
from sparsevd.layers.sampling import multiplies_bfloat16
from sparsevd.posterior import equations
from sparsevd.reporting.table import table
from sparsevd.zoo import datasets

OK, NOTE, PROBLEM = "ok", "note", "problem"
_PACKAGE = "sparsevd"
_REQUIREMENT = re.compile(r"""([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['"]([\w-]+)['"])?""")
_NOT_FOR_USERS = ("test", "package", "docs")  # extras of those who work on sparsevd
_TOLERANCE = 1e-4  # of the largest value, between the kernels and torch


@dataclass(frozen=True)
class Finding:
    """One thing: `state` is ok, note (something works less well than it could) or problem; `advice` says what to do."""

    name: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings of this installation."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; notes are none."""
        return not self.count(PROBLEM)

    def count(self, state: str) -> int:
        return sum(finding.state == state for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; `name` and `state` are words that stay."""
        findings = [{key: getattr(each, key) for key in Finding.__dataclass_fields__} for each in self.findings]
        return {"healthy": self.healthy, "findings": findings}

    def __str__(self) -> str:
        rows = [
            (each.state, each.name, f"{each.found}. {each.advice}" if each.advice else each.found)
            for each in self.findings
        ]
        problems, notes = self.count(PROBLEM), self.count(NOTE)
        verdict = "all that sparsevd needs is here" if self.healthy else f"{problems} to mend"
        return f"{table(('state', 'what', 'found'), rows)}\n{verdict}" + (f"; {notes} could be better" if notes else "")


def examine(data_dir: Path | None = None) -> Diagnosis:
    """Look at everything. Takes seconds: data sets are read and checked whole."""
    return Diagnosis(
        (
            *_packages(),
            _kernels(),
            _bfloat16(),
            _threads(),
            _openmp(),
            *_extras(),
            *_data(data_dir),
        )
    )


def _packages() -> Iterator[Finding]:
    """sparsevd itself, Python, and what it cannot do without."""
    import sparsevd

    yield Finding(_PACKAGE, OK, f"{sparsevd.__version__} in {Path(sparsevd.__file__).parent}")
    yield Finding("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name, least in _requirements().get("", {}).items():
        yield _package(name, least)


def _package(name: str, least: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, PROBLEM, "missing", f"Install {name}>={least}")
    if _numbers(version) < _numbers(least):
        return Finding(name, PROBLEM, f"{version}, and sparsevd needs {least}", f"Install {name}>={least}")
    return Finding(name, OK, version)


def _requirements() -> dict[str, dict[str, str]]:
    """What sparsevd says it needs: by extra, and for "" always, the packages and their least versions."""
    try:
        lines = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # a folder of sources that was never installed
        return {}
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match:
            found.setdefault(match[3] or "", {})[match[1]] = match[2] or "0"
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """The first numbers of a version, which is all that the least ones here have."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _kernels() -> Finding:
    """Whether they are there, load, and compute what torch does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = kernels.available()
    chosen = os.environ.get("SPARSEVD_KERNELS", "")
    if there:
        difference = _difference()
        sets = kernels.instruction_sets()
        found = f"{sets[-1].name} of {', '.join(each.name for each in sets)}" + (f", from {chosen}" if chosen else "")
        if difference > _TOLERANCE:
            return Finding(
                "kernels", PROBLEM, f"{found}: results differ from torch's by {difference:.0e}", loading.BUILD
            )
        return Finding("kernels", OK, found)
    if chosen == "0":
        return Finding("kernels", NOTE, "switched off by SPARSEVD_KERNELS=0", "Unset it to train twice as fast")
    if not chosen and not loading.BUILT.exists():
        return Finding("kernels", NOTE, "none: training takes about twice as long", loading.BUILD)
    reason = str(said[0].message) if said else "they do not load"
    return Finding("kernels", PROBLEM, reason)


def _difference() -> float:
    """Between the KL's gradient of the kernels and that of torch."""
    theta = torch.linspace(-1, 1, 1000).requires_grad_()
    log_sigma2 = torch.linspace(-9, 3, 1000).requires_grad_()
    equations.kl(theta, log_sigma2).backward()  # type: ignore[no-untyped-call]
    _, grad_theta, grad_log_sigma2 = kernels.kl_with_gradients(theta.detach(), log_sigma2.detach())
    pairs = (grad_theta, theta.grad), (grad_log_sigma2, log_sigma2.grad)
    return max(((one - two).abs().max() / two.abs().max()).item() for one, two in pairs if two is not None)


def _bfloat16() -> Finding:
    if multiplies_bfloat16():
        return Finding("bfloat16", OK, "this CPU has instructions for it: large variance products use them")
    return Finding("bfloat16", OK, "this CPU has no instructions for it: products stay in float32")


def _threads() -> Finding:
    threads, cores = torch.get_num_threads(), cores_of_this_process()
    waiting = os.environ.get("OMP_WAIT_POLICY", "")
    found = f"{threads} on {cores} cores" + (f", OMP_WAIT_POLICY={waiting}" if waiting else "")
    if threads > cores:
        return Finding("threads", NOTE, found, f"They wait for each other: set OMP_NUM_THREADS={cores}")
    return Finding("threads", OK, found)


def cores_of_this_process() -> int:
    """Those that it may run on, where the system says."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _openmp() -> Finding:
    """Asked after the kernels: what is loaded by then is what a training has."""
    loaded, torchs, ours = openmp.loaded(), openmp.of_torch(), openmp.of_kernels()
    if loaded is None:
        return Finding("openmp", OK, "unknown: this system does not show which runtimes are loaded")
    found = ", ".join(loaded) or "none"
    if kernels.available() and torchs and ours and not os.path.samefile(torchs, ours):
        found = f"torch computes with {torchs}, the kernels with {ours}"
        return Finding("openmp", PROBLEM, found, "Their threads get in each other's way: look what LD_PRELOAD loads")
    if len(loaded) > 1:
        return Finding("openmp", NOTE, found, "One is enough: look what LD_PRELOAD loads")
    return Finding("openmp", OK, found)


def _extras() -> Iterator[Finding]:
    for extra, packages in _requirements().items():
        if extra and extra not in _NOT_FOR_USERS:
            each = [_package(name, least) for name, least in packages.items()]
            lacking = [finding.advice.removeprefix("Install ") for finding in each if finding.state != OK]
            found = ", ".join(f"{finding.name} {finding.found}" for finding in each)
            advice = f"For these functions install {' '.join(lacking)}" if lacking else ""
            yield Finding(f"extra {extra}", NOTE if lacking else OK, found, advice)


def _data(data_dir: Path | None) -> Iterator[Finding]:
    """Data sets in the named folder or the cache, read and checked."""
    given = data_dir or os.environ.get("SPARSEVD_DATA")
    folders = [Path(given).expanduser()] if given else []
    if folders and not folders[0].is_dir():
        yield Finding("data", PROBLEM, f"the data folder {folders[0]} does not exist", "Correct SPARSEVD_DATA")
        folders = []
    for name, dataset in datasets.DATASETS.items():
        yield _data_set(name, dataset, [*folders, datasets.cache_folder()])


def _data_set(name: str, dataset: datasets.DataSet, folders: list[Path]) -> Finding:
    for folder in folders:
        try:
            if folder.is_dir() and datasets.find(folder, dataset):
                return Finding(f"data {name}", OK, f"whole, in {folder}")
        except DataError as error:
            return Finding(f"data {name}", PROBLEM, str(error))
    return Finding(
        f"data {name}", NOTE, "not here", "It is fetched when it is first used, or put it in the folder SPARSEVD_DATA"
    )
