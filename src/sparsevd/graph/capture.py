"""From a torch module to a graph, through torch.export.

torch.export gives a graph of ATen calls, without in-place operations after `run_decompositions({})`. Here each call
becomes a node of our own short list (`aten` says which), or a constant where it depends on no input, or nothing where
it does nothing in inference (dropout, clone).
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import GraphError
from sparsevd.graph import names
from sparsevd.graph.aten import HANDLERS
from sparsevd.graph.operations import DTYPE_NAMES
from sparsevd.graph.outputs import Output, difference, returning_tensors
from sparsevd.graph.structure import Graph
from sparsevd.graph.translation import STILL_WORKS, Translation
from sparsevd.layers.modes import in_eval_mode
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import NoisyModule

TOLERANCE = 1e-4  # of the largest output
_PROBE = 13  # a batch size that no network has in its shapes


def capture(model: nn.Module | Graph, example: Tensor | tuple[Tensor, ...]) -> Graph:
    """The graph of a network in eval mode, for any batch size.

        graph = sparsevd.capture(pruned, torch.zeros(1, 1, 28, 28))
        print(graph)

    Args:
        model: a plain network, such as `sparsevd.prune` returns. It is left as it is, and the graph has copies of its
            tensors. It must return a tensor, or a tuple, list, dict or dataclass of tensors; the graph then returns a
            tuple or a dict. A graph is checked and comes back as it is.
        example: an input as the network takes it, with the batch as its first axis; a tuple for several inputs. The
            sizes of the other axes are fixed.

    What is not on the list of operations is refused with a `GraphError` that names the operation and the place.
    """
    if isinstance(model, Graph):
        return model.check()
    model = bare_model(model)
    examples = example if isinstance(example, tuple) else (example,)
    _check_arguments(model, examples)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with in_eval_mode(model):
        torch.backends.mha.set_fastpath_enabled(False)  # a fused operation that hides the whole layer
        try:
            with returning_tensors(model) as seen:
                graph = _translate(model, examples)
            graph = replace(graph, keys=seen.keys).check()
            with torch.no_grad():
                found = graph(*examples)  # first, since it says what it cannot compute
                expected = model(*examples)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
    _check_same(expected, found)
    return graph


def _check_arguments(model: nn.Module, examples: tuple[Tensor, ...]) -> None:
    for module_name, module in model.named_modules():
        if isinstance(module, NoisyModule):
            raise GraphError(f"{module_name or 'the model'} is a Sparse VD layer; call sparsevd.prune first")
    paths = [name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()) if name]
    for path in paths:
        bad = names.unfit(path)
        if bad is not None:
            raise GraphError(
                f"{path!r} needs another name: torch.export writes names into code, and {bad!r} is a word of Python, "
                f"an attribute of torch's modules, or no plain word. {STILL_WORKS}"
            )
    batches = {value.shape[0] if isinstance(value, Tensor) and value.ndim else None for value in examples}
    if len(batches) != 1 or None in batches or 0 in batches:
        raise GraphError("example must be a tensor, or a tuple of tensors, with the same batch size as first axis")
    for value in examples:
        if value.dtype not in DTYPE_NAMES:
            raise GraphError(f"an input of {value.dtype} is not supported; there are {', '.join(DTYPE_NAMES.values())}")


def _check_same(expected: Any, found: Output) -> None:
    """The graph is the oracle of everything built on it, so it is compared with the network once, here."""
    off = difference(found, expected)
    if off > TOLERANCE:
        raise GraphError(
            f"the captured graph differs from the network by {off:.2g} of its largest output; it is not deterministic "
            f"in eval mode, or torch.export does not see all it does. {STILL_WORKS}"
        )


def _translate(model: nn.Module, examples: tuple[Tensor, ...]) -> Graph:
    from torch.export import Dim, export

    # Only shapes matter here: nothing is computed, and one row stands for all.
    probes = tuple(value[:1].expand(_PROBE, *value.shape[1:]) for value in examples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own internals
        try:
            program = export(model, probes, dynamic_shapes=tuple({0: Dim.AUTO} for _ in probes))
            program = program.run_decompositions({})
        except GraphError:
            raise  # about what the network returns
        except Exception as error:  # torch.export raises all kinds, among them its own without a common parent
            message = str(error).strip().splitlines() or [type(error).__name__]
            raise GraphError(
                f"torch.export cannot follow {type(model).__name__}: {message[0]}. {STILL_WORKS}"
            ) from error
    return Translation(program, HANDLERS).graph()
