"""A teacher: another network's view of every example, beside the label, while the KL acts (Hinton et al., 2015).

The objective's data term becomes  w·T²·KL(teacher_T ‖ student_T) + (1 − w)·NLL,  where both distributions over the
classes are softmax(logits / T). T² keeps the gradients of the first term at the size of the second's for any T. That
term weighs more than the likelihood it stands for, so a taught network keeps more weights: compare at equal sparsity.
"""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.modes import in_eval_mode
from sparsevd.training.data import Augmented, Batch, Data, Taught
from sparsevd.training.inputs import Forward

TEMPERATURE, WEIGHT = 3.0, 0.5


@dataclass(frozen=True)
class Teacher:
    """Who teaches, and how much.

    Args:
        source: a network, which sees each batch as the student does, or its logits, one row per training example.
        temperature: T; above 1 the teacher says more about the classes that it holds unlikely.
        weight: w, from 0 (no teacher) to 1 (no labels).
    """

    source: nn.Module | Tensor
    temperature: float = TEMPERATURE
    weight: float = WEIGHT

    def __post_init__(self) -> None:
        if not isinstance(self.source, nn.Module | Tensor):
            raise ArgumentError(f"teacher is a {type(self.source).__name__}; give a network, or a tensor of its logits")
        if isinstance(self.source, Tensor) and (self.source.ndim < 2 or not self.source.is_floating_point()):
            raise ArgumentError(
                f"teacher is a tensor of {self.source.dtype} {tuple(self.source.shape)}; logits are floating-point "
                "numbers (example, class)"
            )
        if not (0 < self.temperature < math.inf):
            raise ArgumentError(f"temperature={self.temperature!r} must be a positive number")
        if not (0 <= self.weight <= 1):
            raise ArgumentError(f"teacher_weight={self.weight!r} must lie between 0 and 1")

    def __str__(self) -> str:
        """Who it is, to the last bit, for people and for a run that is resumed."""
        if isinstance(self.source, Tensor):
            who, tensors = f"logits {tuple(self.source.shape)}", [self.source]
        else:
            who, tensors = type(self.source).__name__, list(self.source.state_dict().values())
        checksum = 0
        for tensor in tensors:
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            checksum = zlib.crc32(content.numpy().tobytes(), checksum)
        return f"{who} ({checksum:08x}), temperature {self.temperature:g}, weight {self.weight:g}"

    def beside(self, train: Data) -> Data:
        """The training data, with the logits of each example where they are given as a tensor."""
        if isinstance(self.source, nn.Module):
            return train
        if isinstance(train, Augmented):
            raise ArgumentError(
                "the teacher's logits are of the images as they are, and training changes them; give the teacher's "
                "network, which then sees them as the student does"
            )
        if not isinstance(train, tuple):
            raise ArgumentError(
                f"a {type(train).__name__} does not say which row of the teacher's logits belongs to an example; give "
                "train as a pair (x, y) of tensors, or the teacher's network"
            )
        if len(train[1]) != len(self.source):
            raise ArgumentError(f"the teacher has {len(self.source)} rows of logits for {len(train[1])} examples")
        return Taught(train, self.source)

    def mixed(self, nll: Tensor, output: object, batch: Batch, forward: Forward) -> Tensor:
        """The data term of the objective, from the student's likelihood and output on a batch, and that batch."""
        logits = self._logits(batch, forward)
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape != logits.shape:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ArgumentError(
                f"the teacher's logits are {tuple(logits.shape)} and the network's output is {shape}; both must be "
                "(example, class)"
            )
        return self.weight * self.divergence(output, logits) + (1 - self.weight) * nll

    def divergence(self, output: Tensor, logits: Tensor) -> Tensor:
        """T²·KL(teacher_T ‖ student_T), the mean over examples; classes are counted along the second dimension."""
        student = F.log_softmax(output / self.temperature, dim=1)
        teacher = F.log_softmax(logits.to(output) / self.temperature, dim=1)
        return self.temperature**2 * F.kl_div(student, teacher, reduction="none", log_target=True).sum(1).mean()

    @torch.no_grad()
    def _logits(self, batch: Batch, forward: Forward) -> Tensor:
        if isinstance(self.source, Tensor):
            return batch.logits  # type: ignore[attr-defined,no-any-return]  # of a Taught pair: see `beside`
        with in_eval_mode(self.source):
            output = forward(self.source, batch[0])
        if not isinstance(output, Tensor):
            raise ArgumentError(f"the teacher's output is a {type(output).__name__}; give one whose output is logits")
        return output
