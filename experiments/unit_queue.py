"""A queue of long units of work: one at a time, in order, each in a process of its own, resumed after any stop.

A unit has a folder. Its process writes metrics.jsonl there, a line per finished epoch, and at the end result.json; the
queue watches, and turns the result into a record. Whatever is killed, and when, the next `run` goes on from the folder.
Time is CPU time: it does not count pauses, nor the work of others on the same machine.
"""

import fcntl
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from records import Records, commit
from work import RESULT, STOPPED, Unit, Work

from sparsevd.errors import ArgumentError, SparseVDError
from sparsevd.files import atomic
from sparsevd.training.folder import METRICS

STATE = "state.json"
LOG = "log.txt"
ALONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # one thread, and no spinning while it waits


class QueueError(SparseVDError):
    """The queue cannot do what was asked."""


@dataclass
class State:
    """What the queue keeps of a unit between two starts, in its folder."""

    commit: str  # of the code that began it
    cpu_seconds: float = 0.0  # also of what a kill made it do twice
    marks: list[tuple[int, float]] = field(default_factory=list)  # CPU seconds when an epoch was seen to be over
    failed: str = ""


class Queue:
    """Units in order, and the folder in which they are worked on.

    `command` makes the command line of a unit's process from "work" or "measure" and the unit.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        folder: Path,
        command: Callable[[str, Unit], list[str]],
        records: Callable[[str], Records] = Records,
        say: Callable[[str], None] = print,
        watch_every: float = 5.0,  # seconds; each time the state is written
    ):
        names = [unit.name for unit in units]
        if len(set(names)) < len(names):
            raise ArgumentError(f"two units have the same name: {', '.join(sorted(names))}")
        for i, unit in enumerate(units):
            if not set(unit.needs) <= set(names[:i]):
                raise ArgumentError(f"{unit.name} needs {', '.join(unit.needs)}: they must come before it")
            if (unit.work is None) != bool(unit.waits_for):
                raise ArgumentError(f"{unit.name} must have work, or the reason why it waits")
        self.units, self.folder = list(units), folder
        self._command, self._records, self._say, self._watch_every = command, cache(records), say, watch_every
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = -1
        self._stopping = False

    def find(self, name: str) -> Unit:
        for unit in self.units:
            if unit.name == name:
                return unit
        raise ArgumentError(f"no unit {name!r}; `list` shows them")

    def folder_of(self, unit: Unit) -> Path:
        return self.folder / unit.name

    # What is known of a unit.

    def finished(self, unit: Unit) -> bool:
        return bool(self._records(unit.item).find(unit=unit.name))

    def epochs_done(self, unit: Unit) -> int:
        """Also those of a dense training before the sparse one, in a folder inside."""
        files = self.folder_of(unit).rglob(METRICS)
        return sum(len(path.read_text().splitlines()) for path in files)

    def lacks(self, unit: Unit) -> list[str]:
        return [name for name in unit.needs if not self.finished(self.find(name))]

    def state_of(self, unit: Unit) -> str:
        """In a few words: finished, failed, running, stopped or waiting, and for what."""
        if unit.work is None:
            return f"waits for {unit.waits_for}"
        if self.finished(unit):
            return "finished"
        epochs = f"{self.epochs_done(unit)} of {unit.work.all_epochs} epochs done"
        if self.running() == unit.name:
            return f"running, {epochs}"
        state = self._read_state(unit)
        if state and state.failed:
            return f"failed, {epochs}: {state.failed}"
        if lacks := self.lacks(unit):
            return f"waits for {', '.join(lacks)}"
        return f"stopped, {epochs}" if state else "waiting"

    def hours_left(self, unit: Unit) -> float | None:
        """CPU hours, by its own epochs once two are measured, and before that by the short ones; None: not known."""
        if unit.work is None or self.finished(unit):
            return None
        seconds = self._seconds_an_epoch(unit, unit.work)
        return seconds and seconds * (unit.work.all_epochs - self.epochs_done(unit)) / 3600

    def _seconds_an_epoch(self, unit: Unit, work: Work) -> float | None:
        marks = state.marks if (state := self._read_state(unit)) else []
        if marks and marks[-1][0] - marks[0][0] >= 2:
            (first, begun), (last, ended) = marks[0], marks[-1]
            return (ended - begun) / (last - first)
        path = self.cost_file(work)
        return float(json.loads(path.read_text())["seconds_an_epoch"]) if path.exists() else None

    def cost_file(self, work: Work) -> Path:
        return self.folder / "costs" / f"{work.cost()}.json"

    # Work.

    def run(self, stage: str | None = None, only: str | None = None) -> list[str]:
        """Go through the queue, each unit once; returns the names of those that failed."""
        if only:
            self.find(only)  # says so if there is none
        failed = []
        with self._alone(), self._signals():
            for unit in self.units:
                chosen = (stage is None or unit.stage == stage) and (only is None or unit.name == only)
                if not chosen or unit.work is None or self.finished(unit):
                    continue
                if lacks := self.lacks(unit):
                    self._say(f"{unit.name}: waits for {', '.join(lacks)}")
                    continue
                problem = self._estimate(unit, unit.work) or self._go_through(unit)
                if self._stopping:
                    self._say(f"{unit.name}: stopped; the same command goes on")
                    break
                if problem:
                    failed.append(unit.name)
                    self._say(f"{unit.name}: FAILED, {problem}; see {self.folder_of(unit) / LOG}. The next one goes on")
        return failed

    def estimate(self, stage: str | None = None) -> None:
        """Measure what was not measured yet, for the units that could run."""
        with self._alone(), self._signals():
            for unit in self.units:
                if unit.work and not self.finished(unit) and (stage is None or unit.stage == stage):
                    if problem := self._estimate(unit, unit.work):
                        self._say(f"{unit.name}: FAILED, {problem}; see {self.folder_of(unit) / LOG}")
                    if self._stopping:
                        break

    def _estimate(self, unit: Unit, work: Work) -> str:
        """Short epochs in a process of their own, unless they were measured for this or a like unit."""
        if not self.cost_file(work).exists() and (code := self._process("measure", unit)):
            return self._failed(unit, code)
        hours = self.hours_left(unit)
        if hours is not None:
            self._say(f"{unit.name}: {self.epochs_done(unit)} of {work.all_epochs} epochs done, {hours:.2f} h left")
        return ""

    def _go_through(self, unit: Unit) -> str:
        """The unit to its record. One that was killed from outside starts again as long as it gets further."""
        while True:
            before = self.epochs_done(unit)
            code = 0 if (self.folder_of(unit) / RESULT).exists() else self._process("work", unit)
            if code == 0:
                self._record(unit)
                return ""
            killed = code < 0 or code == STOPPED
            if self._stopping:
                return ""
            if not (killed and self.epochs_done(unit) > before):
                return self._failed(unit, code)
            self._say(f"{unit.name}: was killed, goes on from epoch {self.epochs_done(unit)}")

    def _process(self, action: str, unit: Unit) -> int:
        """Start the process of a unit, watch it until it ends, and return its exit code."""
        folder = self.folder_of(unit)
        folder.mkdir(parents=True, exist_ok=True)
        state = self._read_state(unit) or State(commit())
        state.failed = ""
        before, children = state.cpu_seconds, _cpu_of_children()
        with (folder / LOG).open("ab") as log:
            # With the lock: as long as this process lives, also without its queue, no other queue starts.
            self._child = subprocess.Popen(
                self._command(action, unit),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[self._lock],
                env={**os.environ, **ALONE},
            )
        self._tell(unit)
        if self._stopping:  # asked while it was being started
            self._child.terminate()
        while self._child.poll() is None:
            if action == "work":
                state.cpu_seconds = before + _cpu_of(self._child.pid)
                done = self.epochs_done(unit)
                if done and (not state.marks or state.marks[-1][0] < done):
                    state.marks.append((done, state.cpu_seconds))
                self._write_state(unit, state)
            time.sleep(self._watch_every)
        if action == "work":
            state.cpu_seconds = before + _cpu_of_children() - children
            self._write_state(unit, state)
        code, self._child = self._child.returncode, None
        return code

    def _record(self, unit: Unit) -> None:
        state = self._read_state(unit)
        assert unit.work is not None
        assert state is not None
        result = json.loads((self.folder_of(unit) / RESULT).read_text())
        self._records(unit.item).add(
            unit=unit.name,
            **result,
            cpu_seconds=round(state.cpu_seconds, 1),
            threads=1,
            commit=state.commit,
            command=f"python experiments/long_runs.py run --only {unit.name}",
        )
        self._say(f"{unit.name}: finished, error {result['error']:.2f} %, {state.cpu_seconds / 3600:.2f} CPU hours")

    def _failed(self, unit: Unit, code: int) -> str:
        if self._stopping:
            return ""
        lines = (self.folder_of(unit) / LOG).read_text(errors="replace").strip().splitlines()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        state = self._read_state(unit) or State(commit())
        state.failed = how + (f", {lines[-1]}" if lines and code > 0 else "")
        self._write_state(unit, state)
        return state.failed

    def _read_state(self, unit: Unit) -> State | None:
        path = self.folder_of(unit) / STATE
        return State(**json.loads(path.read_text())) if path.exists() else None

    def _write_state(self, unit: Unit, state: State) -> None:
        atomic.write(self.folder_of(unit) / STATE, json.dumps(asdict(state)) + "\n")

    # One queue at a time.

    def running(self) -> str | None:
        """The name of the unit that is worked on now."""
        return self._now().get("unit")

    def process_group(self) -> int | None:
        """Of the queue that runs now, to pause it with its unit."""
        return self._now().get("process_group")

    def _now(self) -> dict[str, Any]:
        if not (self.folder / "now.json").exists():
            return {}
        with (self.folder / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return dict(json.loads((self.folder / "now.json").read_text()))
            return {}

    def _tell(self, unit: Unit) -> None:
        atomic.write(self.folder / "now.json", json.dumps({"unit": unit.name, "process_group": os.getpgrp()}) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise QueueError(
                    f"a queue, or a unit that outlived its queue, is at work in {self.folder}; `list` shows it"
                ) from None
            yield
        finally:
            os.close(self._lock)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM is passed on to the unit, which saves and ends. Ctrl-C in a terminal reaches it by itself."""

        def handle(number: int, frame: object) -> None:
            self._stopping = True
            if number == signal.SIGTERM and self._child:
                self._child.terminate()

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _cpu_of(process: int) -> float:
    """CPU seconds so far of a process that runs; 0 where the system does not tell, and then only the end does."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_of_children() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
