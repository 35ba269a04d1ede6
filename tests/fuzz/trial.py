"""What every trial counts: inputs, refusals, the slowest input and the memory at its peak. Anything else ends it."""

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sparsevd.errors import SparseVDError


@dataclass
class Trial:
    """A row of hostile inputs. `SLOWEST` is what one of them may take, in seconds of its thread."""

    name: str
    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    slowest_input: str = ""
    begun: float = field(default_factory=time.perf_counter)
    counts: dict[str, int] = field(default_factory=dict)

    SLOWEST = 10.0

    @contextmanager
    def one(self, described: str, *refusals: type[SparseVDError]) -> Iterator[None]:
        """One input: it is taken, or refused with one of these errors. Any other error names the input and ends all."""
        started = time.thread_time()  # the process may be stopped for a while, and its own clock takes long to read
        self.inputs += 1
        try:
            yield
        except refusals:
            self.refused += 1
        except BaseException as error:
            error.add_note(f"{self.name}, input {self.inputs}: {described}")
            raise
        seconds = time.thread_time() - started
        if seconds > self.SLOWEST:
            raise TimeoutError(f"{self.name}, input {self.inputs}: {seconds:.1f} s for {described}")
        if seconds > self.slowest:
            self.slowest, self.slowest_input = seconds, described[:200]

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def __str__(self) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        figures = {
            "inputs": self.inputs,
            "refused": self.refused,
            **self.counts,
            "seconds": round(time.perf_counter() - self.begun),
            "slowest": round(self.slowest, 4),
            "slowest_input": self.slowest_input,
            "peak_mb": peak,
        }
        return json.dumps(figures)
