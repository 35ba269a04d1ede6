"""The first pass of a run shows, with real data, which weights a forward reads outside of their layer.

There they have no noise and no zeros, which is said. And a layer that contraction has made smaller would give them in a
shape that the reader does not expect, so these layers stay whole, and so do those of which others ask only the shape.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from sparsevd.layers.watched_use import Watch
from sparsevd.layers.wrapping import bare_model, is_compiled
from sparsevd.posterior import NoisyModule, noisy_modules
from sparsevd.training import generator
from sparsevd.training.inputs import Forward
from sparsevd.training.processes import Alone


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Around a forward pass."""
    with torch.compiler.set_stance("force_eager"), watch:  # else what is compiled would be so anew, for this pass alone
        yield


def watched_by_itself(model: nn.Module, forward: Forward, inputs: Iterable[Any], device: torch.device) -> Watch:
    """What a pass with these inputs shows, which leaves everything as it was."""
    watch = Watch(model)
    with (
        suppress(Exception),  # the first step will say it in a sentence
        generator.reserved(device),
        _left_as_it_was(model),
        warnings.catch_warnings(action="ignore"),  # the first step gives them
        watching(watch),
    ):
        for x in inputs:
            forward(model, x)
    return watch


def holds_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has made something of it that a watched step would not compute to the same bits."""
    return any(is_compiled(module) or module._compiled_call_impl is not None for module in model.modules())


def mark(model: nn.Module, watch: Watch) -> str:
    """Marks the layers that others were seen to read, or to ask for a shape, and returns a warning of those that are
    read and were not known to be; empty if there are none."""
    layers = {name: (layer, {each.theta for each in layer.posteriors()}) for name, layer in _layers(model).items()}
    known = {theta for layer, weights in layers.values() if layer.read_elsewhere for theta in weights}
    for layer in watch.read:
        layer.read_elsewhere = True
    for layer in watch.measured:
        layer.measured_elsewhere = True
    found = {name: layer for name, (layer, weights) in layers.items() if known.isdisjoint(weights)}
    return _text({name: watch.read[layer] for name, layer in found.items() if layer in watch.read})


def agree(model: nn.Module, team: Alone) -> None:
    """What one process has seen holds for all: all must drop the same."""
    layers = _layers(model).values()
    marks = [float(each) for layer in layers for each in (layer.read_elsewhere, layer.measured_elsewhere)]
    counts = iter(team.total(marks)())
    for layer in layers:
        layer.read_elsewhere, layer.measured_elsewhere = next(counts) > 0, next(counts) > 0


def _layers(model: nn.Module) -> dict[str, NoisyModule]:
    return noisy_modules(bare_model(model))


def _text(readers: dict[str, str]) -> str:
    if not readers:
        return ""
    lines = [f"read elsewhere: {name}: {reader} uses its weight by itself" for name, reader in readers.items()]
    return "\n".join(lines) + (
        "\nWhere a weight is used so, it has no noise in training and no zeros before prune, and prune changes what is "
        f"computed there. Leave it dense, with sparsify(model, exclude={list(readers)}), or call the layer"
    )


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Statistics of batch norms and other buffers, and what a forward keeps in attributes, or counts there."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    owned = [vars(module) for module in model.modules()]
    inside = [value for attributes in owned for value in attributes.values()]
    dicts = [(each, dict(each)) for each in (*owned, *(value for value in inside if type(value) is dict))]
    lists = [(each, list(each)) for each in inside if type(each) is list]
    try:
        yield
    finally:
        for changed, entries in dicts:
            for name in changed.keys() - entries.keys():
                del changed[name]
            changed.update(entries)
        for grown, values in lists:
            grown[:] = values
        for buffer, numbers in buffers:
            buffer.data.copy_(numbers)
