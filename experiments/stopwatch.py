"""What a step of training costs, told by the loop itself."""

import resource
import time

from sparsevd.training.progress import Callback, Moment


class Stopwatch(Callback):
    """A callback of `fit` and `fit_dense` that takes CPU seconds: what else the machine does hardly changes them."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, moment: Moment) -> None:
        self.times.append(time.process_time())

    def read(self, steps: int) -> str:
        """A step, but for the first ones, which make room in memory; an epoch of so many; and the memory until now."""
        mean = (self.times[-1] - self.times[1]) / (len(self.times) - 2)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return f"{mean:.3f} s a step, {mean * steps / 60:.1f} min an epoch of {steps} steps, at most {peak:.1f} GB"
