"""Recurrent layers: a forward pass draws one sample of the weights, and torch's own recurrence runs on it.

Noise per output, as in other layers, would be another one at every time step; but a recurrence has the same weights at
all of them. A cell, or a layer that a decoder calls step by step, has them too while `one_sample` lasts: that is around
each pass of `fit` and `attach`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsevd.errors import ArgumentError
from sparsevd.layers.layer import SparseLayer
from sparsevd.layers.sampling import sample_weights
from sparsevd.posterior import Posterior


class SparseRecurrent(SparseLayer):
    """What layers and cells share. A state goes from step to step: of an LSTM two tensors, of the others one."""

    states: ClassVar[int] = 1

    input_size: int
    hidden_size: int
    bias: bool
    # The noise while `one_sample` lasts, by weight and device, empty before the first call.
    _held: dict[tuple[str, torch.device], Tensor] | None = None

    def recurrence(self, *arguments: Any) -> Any:
        """torch's own function of inputs, states and parameters."""
        raise NotImplementedError

    def drawn(self) -> dict[str, Tensor]:
        """The weights that this forward pass computes with: a sample of them, or in eval mode those that are kept."""
        if not self.draws_noise:
            return {name: self.pruned_weight(name) for name in self.weights}
        return {
            each.weight: sample_weights(each.theta, each.log_sigma2, self._epsilon(each)) for each in self.posteriors()
        }

    def _epsilon(self, posterior: Posterior) -> Tensor:
        """Fresh, or what is held. Not the weights themselves are: a part of the network that is computed once more in
        the backward pass, to save memory, needs a graph of its own. It is drawn in any case, so that what comes after
        it has the same noise in both passes."""
        fresh = torch.randn_like(posterior.log_sigma2)
        if self._held is None:
            return fresh
        return self._held.setdefault((posterior.weight, fresh.device), fresh)

    def hold(self, on: bool) -> None:
        """Keep the next noise for all calls that follow, or draw it for each call again."""
        self._held = {} if on else None

    def _check_width(self, input: Tensor, dimensions: tuple[int, ...]) -> None:
        if input.dim() not in dimensions or input.shape[-1] != self.input_size:
            raise ArgumentError(
                f"{self.plain_type.__name__} takes an input of {' or '.join(map(str, dimensions))} dimensions, the "
                f"last of size {self.input_size}, and was given one of shape {tuple(input.shape)}"
            )

    def _as_list(self, hx: Any) -> list[Tensor]:
        """The tensors of a state as the caller has it."""
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        if len(states) != self.states:
            raise ArgumentError(f"{self.plain_type.__name__} has a state of {self.states} tensors, not {len(states)}")
        return states

    def _as_given(self, states: Sequence[Tensor]) -> Any:
        return states[0] if self.states == 1 else tuple(states)

    def _check_states(self, states: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        for state, shape in zip(states, shapes, strict=True):
            if tuple(state.shape) != shape:
                raise ArgumentError(
                    f"the initial state of {self.plain_type.__name__} has shape {tuple(state.shape)}; with this input "
                    f"it must have {shape}"
                )


@contextmanager
def one_sample(model: nn.Module) -> Iterator[None]:
    """While it lasts, a recurrent layer or cell draws its weights once, however often it is called.

        with sparsevd.one_sample(model):  # a mini-batch
            loss = sparsevd.elbo_loss(F.cross_entropy(model(x), y), model, n_train=60_000)
            loss.backward()

    `fit` and `attach` do this for each pass of the network; a loop with `elbo_loss` does it by itself. The backward
    pass belongs to it where that computes a part of the network once more (`torch.utils.checkpoint`).
    """
    before = {layer: layer._held for layer in recurrent_layers(model)}
    for layer in before:
        layer.hold(True)
    try:
        yield
    finally:
        for layer, held in before.items():
            layer._held = held


def recurrent_layers(model: nn.Module) -> list[SparseRecurrent]:
    return [module for module in model.modules() if isinstance(module, SparseRecurrent)]


class SparseSequenceLayer(SparseRecurrent):
    """Layers that read a whole sequence, in one or two directions, some on top of each other."""

    num_layers: int
    batch_first: bool
    bidirectional: bool
    proj_size: int = 0

    def __init__(self, twin: nn.Module, **settings: Any):
        super().__init__(twin, **settings)
        self.dropout = twin.dropout  # between layers; `sparsify` sets it to 0
        for name in ("_flat_weights", "_flat_weight_refs"):  # torch's lists of the parameters
            self.attributes.pop(name, None)

    @classmethod
    def names(cls, twin: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        names = _names(twin)
        return tuple(n for n in names if n.startswith("weight")), tuple(n for n in names if n.startswith("bias"))

    def plain(self, threshold: float | None = None) -> nn.Module:
        twin = super().plain(threshold)
        twin.dropout = self.dropout  # not an option: torch warns again of one that does nothing
        twin._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # lists its parameters anew
        return twin

    def flatten_parameters(self) -> None:
        """For callers of `nn.LSTM.flatten_parameters`: there is nothing to flatten, since each sample is new."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch does for its own
    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Tensor | PackedSequence, Any]:
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        self._check_width(input, (2, 3))
        alone, batch = input.dim() == 2, 0 if self.batch_first else 1
        given = None if hx is None else self._as_list(hx)
        if alone:
            input = input.unsqueeze(batch)
            given = None if given is None else [state.unsqueeze(1) for state in given]
        states = self._first(input, input.shape[batch], given)
        output, *last = self.recurrence(input, self._as_given(states), *self._settings(), self.batch_first)
        if alone:
            output, last = output.squeeze(batch), [state.squeeze(1) for state in last]
        return output, self._as_given(last)

    def _packed(self, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        data, sizes, order, back = input
        self._check_width(data, (2,))
        given = None if hx is None else [_reordered(state, order) for state in self._as_list(hx)]
        states = self._first(data, int(sizes[0]), given)
        output, *last = self.recurrence(data, sizes, self._as_given(states), *self._settings())
        return PackedSequence(output, sizes, order, back), self._as_given([_reordered(state, back) for state in last])

    def _first(self, input: Tensor, batch: int, given: list[Tensor] | None) -> list[Tensor]:
        """The state before the first step: zeros unless the caller has one."""
        layers = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)[: self.states]
        shapes = [(layers, batch, size) for size in sizes]
        states = [input.new_zeros(shape) for shape in shapes] if given is None else given
        self._check_states(states, shapes)
        return states

    def _settings(self) -> tuple[Any, ...]:
        drawn = self.drawn()
        parameters = [drawn[name] if name in drawn else getattr(self, name) for name in _names(self)]
        return parameters, self.bias, self.num_layers, self.dropout, self.training, self.bidirectional


def _names(layer: Any) -> list[str]:
    """The parameters of a layer or its twin, in the order that torch's recurrence takes them."""
    kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if layer.bias else [])]
    kinds += ["weight_hr"] if getattr(layer, "proj_size", 0) else []
    ends = ["", "_reverse"] if layer.bidirectional else [""]
    return [f"{kind}_l{number}{end}" for number in range(layer.num_layers) for end in ends for kind in kinds]


def _reordered(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)


_OPTIONS = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")


@final
class SparseRNN(SparseSequenceLayer):
    """Sparse VD twin of `nn.RNN`."""

    plain_type = nn.RNN
    options = (*_OPTIONS, "nonlinearity")
    nonlinearity: str

    def recurrence(self, *arguments: Any) -> Any:
        return (torch.rnn_tanh if self.nonlinearity == "tanh" else torch.rnn_relu)(*arguments)


@final
class SparseLSTM(SparseSequenceLayer):
    """Sparse VD twin of `nn.LSTM`."""

    plain_type = nn.LSTM
    options = (*_OPTIONS, "proj_size")
    states = 2

    def recurrence(self, *arguments: Any) -> Any:
        return torch.lstm(*arguments)


@final
class SparseGRU(SparseSequenceLayer):
    """Sparse VD twin of `nn.GRU`."""

    plain_type = nn.GRU
    options = _OPTIONS

    def recurrence(self, *arguments: Any) -> Any:
        return torch.gru(*arguments)


class SparseCell(SparseRecurrent):
    """One step of a recurrence."""

    options: ClassVar[tuple[str, ...]] = ("input_size", "hidden_size", "bias")
    weights = ("weight_ih", "weight_hh")
    others = ("bias_ih", "bias_hh")

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        self._check_width(input, (1, 2))
        alone = input.dim() == 1
        batch = input.unsqueeze(0) if alone else input
        shape = (len(batch), self.hidden_size)
        if hx is None:
            states = [batch.new_zeros(shape)] * self.states
        else:
            states = [state.unsqueeze(0) if alone else state for state in self._as_list(hx)]
        self._check_states(states, [shape] * self.states)
        parameters = (*self.drawn().values(), self.bias_ih, self.bias_hh)
        after = self._as_list(self.recurrence(batch, self._as_given(states), *parameters))
        return self._as_given([state.squeeze(0) for state in after] if alone else after)


@final
class SparseRNNCell(SparseCell):
    """Sparse VD twin of `nn.RNNCell`."""

    plain_type = nn.RNNCell
    options = (*SparseCell.options, "nonlinearity")
    nonlinearity: str

    def recurrence(self, *arguments: Any) -> Any:
        return (torch.rnn_tanh_cell if self.nonlinearity == "tanh" else torch.rnn_relu_cell)(*arguments)


@final
class SparseLSTMCell(SparseCell):
    """Sparse VD twin of `nn.LSTMCell`."""

    plain_type = nn.LSTMCell
    states = 2

    def recurrence(self, *arguments: Any) -> Any:
        return torch.lstm_cell(*arguments)


@final
class SparseGRUCell(SparseCell):
    """Sparse VD twin of `nn.GRUCell`."""

    plain_type = nn.GRUCell

    def recurrence(self, *arguments: Any) -> Any:
        return torch.gru_cell(*arguments)
