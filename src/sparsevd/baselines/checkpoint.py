"""Where a rival's training was after an epoch: one safetensors file, checked before it is used."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from sparsevd.errors import CheckpointError
from sparsevd.files import atomic
from sparsevd.files.tensors import read_tensors
from sparsevd.training.checkpoint import check_fit

_NETWORK, _OPTIMIZER = "network/", "optimizer/"


class Checkpoint:
    """The network and its optimizer in a file.

    Args:
        path: the file.
        about: whose it is: a run with anything else is refused.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self._about = path, json.loads(json.dumps(about))

    def write(self, model: nn.Module, optimizer: torch.optim.Optimizer, spent: int) -> None:
        tensors = {_NETWORK + name: tensor for name, tensor in model.state_dict().items()}
        for place, parameter in enumerate(_trained_by(optimizer)):
            tensors |= {f"{_OPTIMIZER}{place}/{name}": value for name, value in optimizer.state[parameter].items()}
        whole = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        said = {"about": json.dumps(self._about), "epochs": str(spent)}
        atomic.write(self.path, safetensors.torch.save(whole, said))

    def put_back(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Puts both where they were, and gives the epochs that were spent; 0 if there is no checkpoint yet."""
        if not self.path.exists():
            return 0
        tensors, said = read_tensors(self.path)
        then = json.loads(said.get("about", "{}"))
        differing = [name for name in self._about if then.get(name) != self._about[name]]
        if differing:
            what = ", ".join(f"{name}: {then.get(name)!r} then, {self._about[name]!r} now" for name in differing)
            raise CheckpointError(f"{self.path} is of another run ({what}); give another run_dir")
        network = _part(tensors, _NETWORK)
        check_fit(network, model.state_dict(), f"{self.path} is of another network", exact=True)
        model.load_state_dict(network)
        for place, parameter in enumerate(_trained_by(optimizer)):
            for name, value in _part(tensors, f"{_OPTIMIZER}{place}/").items():
                # In the order in memory of the parameter: Adam's fused kernel takes both as they lie there.
                like = parameter.detach() if value.ndim else value
                optimizer.state[parameter][name] = torch.empty_like(like, dtype=value.dtype).copy_(value)
        return int(said["epochs"])


def _trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
