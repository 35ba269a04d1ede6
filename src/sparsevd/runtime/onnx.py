"""A network as an ONNX file, checked against onnxruntime before it is written.

torch's own exporter makes the file, so this is not limited to the operations of a graph. What is added here: any batch
size, weights that are zero stay zero, a comparison with the network, and optionally sparse initializers.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd.errors import ExportError
from sparsevd.files import atomic
from sparsevd.graph.outputs import parts, returning_tensors
from sparsevd.layers.modes import in_eval_mode
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import NoisyModule

TOLERANCE = 1e-4  # of the largest output; onnxruntime sums in another order
_LARGEST = 2**31 - 1  # protobuf holds no more in one file


def export_onnx(
    model: nn.Module, example: Tensor | tuple[Tensor, ...], path: str | Path, *, sparse_initializers: bool = False
) -> None:
    """Write a network as an ONNX file for any batch size.

        sparsevd.export_onnx(pruned, torch.zeros(1, 1, 28, 28), "lenet.onnx")

    The file is written only if onnxruntime gives the network's outputs, for two batch sizes. The network is left as it
    is. Needs the extra: pip install "sparsevd[onnx]".

    Args:
        model: a plain network, such as `sparsevd.prune` or `sparsevd.compact` returns; it is exported in eval mode.
        example: an input with the batch as its first axis; a tuple for several inputs.
        path: where to write.
        sparse_initializers: store tensors with more than two thirds zeros as ONNX sparse tensors, for a smaller file.
            onnxruntime reads them; some other tools do not.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError as error:
        raise ExportError(f'{error.name} is not installed; run: pip install "sparsevd[onnx]"') from error
    model = bare_model(model)
    examples = example if isinstance(example, tuple) else (example,)
    for name, module in model.named_modules():
        if isinstance(module, NoisyModule):
            raise ExportError(f"{name or 'the model'} is a Sparse VD layer; call sparsevd.prune first")
    if any(not isinstance(value, Tensor) or not value.ndim or not len(value) for value in examples):
        raise ExportError("example must be a tensor, or a tuple of tensors, with the batch as first axis")
    with _quiet_exporter(), in_eval_mode(model):
        try:
            with returning_tensors(model) as seen, torch.no_grad():
                model(*examples)
                content = _converted(model, examples, seen.keys)
        except Exception as error:  # torch's exporter raises all kinds
            message = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
            raise ExportError(f"torch cannot export {type(model).__name__} to ONNX: {message}") from error
        if sparse_initializers:
            _make_sparse(content, onnx)
        if content.ByteSize() > _LARGEST:
            raise ExportError(f"the network takes {content.ByteSize():,} bytes; an ONNX file holds up to {_LARGEST:,}")
        serialised = content.SerializeToString()
        for count in (len(examples[0]), len(examples[0]) + 1):
            _compare(model, tuple(_repeated(value, count) for value in examples), serialised, onnxruntime)
    atomic.write(Path(path), serialised)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it names every package that is not installed
    try:
        yield
    finally:
        exporter.setLevel(level)


def _repeated(value: Tensor, count: int) -> Tensor:
    return value.repeat(-(-count // len(value)), *[1] * (value.ndim - 1))[:count]


def _converted(model: nn.Module, examples: tuple[Tensor, ...], keys: tuple[str, ...]) -> Any:
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own internals
        program = torch.onnx.export(
            model,
            tuple(_repeated(value, max(2, len(value))) for value in examples),  # a batch of one would be taken as fixed
            dynamic_shapes=tuple({0: batch} for _ in examples),
            output_names=keys or None,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _make_sparse(content: Any, onnx: Any) -> None:
    """Replace initializers by sparse ones where those are smaller: a value and an index of 8 bytes for each nonzero."""
    import numpy as np

    dense = list(content.graph.initializer)
    del content.graph.initializer[:]
    for tensor in dense:
        array = onnx.numpy_helper.to_array(tensor)
        (index,) = np.nonzero(array.ravel())
        smaller = array.dtype == np.float32 and len(index) * 12 < array.nbytes
        if not smaller or not len(index):
            content.graph.initializer.append(tensor)
            continue
        values = onnx.numpy_helper.from_array(array.ravel()[index], tensor.name)
        indices = onnx.numpy_helper.from_array(index.astype(np.int64), f"{tensor.name}_indices")
        content.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, list(array.shape)))


def _compare(model: nn.Module, examples: tuple[Tensor, ...], serialised: bytes, onnxruntime: Any) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(serialised, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        found = session.run(None, {name: value.numpy(force=True) for name, value in zip(names, examples, strict=True)})
    except Exception as error:  # onnxruntime's errors have no common parent
        raise ExportError(f"onnxruntime cannot run the exported network: {error}") from error
    with torch.no_grad():
        _, expected = parts(model(*examples))
    for ours, theirs in zip((tensor.cpu().double() for tensor in expected), map(torch.from_numpy, found), strict=True):
        difference = (ours - theirs.double()).abs().max().item() if ours.numel() else 0.0
        largest = ours.abs().max().item() if ours.numel() else 0.0
        if not difference <= TOLERANCE * max(largest, 1e-30):
            raise ExportError(
                f"onnxruntime gives outputs that differ by {difference:.2g} from the network's for a batch of "
                f"{len(examples[0])}; nothing was written"
            )
