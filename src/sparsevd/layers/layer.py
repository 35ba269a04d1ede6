"""What all Sparse VD layers share: a torch layer whose weights each carry a learned Gaussian noise.

A layer is built from its plain torch twin and takes over its parameters as they are: `weight` is θ, `bias` stays a
plain parameter without noise, and `log_sigma2` (log σ², float32) is new; a layer with several weights has a log σ² for
each. In training the output is sampled; in eval mode it is the twin's output with every weight of log α > threshold put
to zero. `plain()` gives that twin.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from sparsevd.posterior import THRESHOLD, NoisyModule, Posterior, checked_threshold, noise_name

# Small against a usual weight (σ = 0.018), so that a converted network starts out almost as itself.
INITIAL_LOG_SIGMA2 = -8.0


# Names that an attribute of a plain layer cannot have, since a forward that reads it would find ours.
OWN_ATTRIBUTES = ("threshold", "weights", "others", "attributes", "part", "initial_log_sigma2", "variance_dtype")


class SparseLayer(NoisyModule):
    """A layer with the parameters of its plain twin, and noise on those that `weights` names."""

    plain_type: type[nn.Module]  # of a registered class, that class
    options: ClassVar[tuple[str, ...]]  # constructor arguments of the plain twin, kept as attributes of the same name
    weights: tuple[str, ...] = ("weight",)  # parameters that carry noise ...
    others: tuple[str, ...] = ("bias",)  # ... and those that do not
    children_kept: ClassVar[tuple[str, ...]] = ()  # modules inside the plain twin that the layer takes over
    _shown: Sequence[str] = ()  # attributes of the twin that this layer has too
    unit_axis: ClassVar[int] = 0  # of the weights; the inputs are at the other of the first two

    def __init__(
        self,
        twin: nn.Module,
        *,
        threshold: float = THRESHOLD,
        initial_log_sigma2: float = INITIAL_LOG_SIGMA2,
        variance_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        every = {*vars(nn.Module())}
        if type(twin) is not self.plain_type:  # a class that was registered: its constructor may be like no other
            self.plain_type = type(twin)
        else:
            every |= {name for name in vars(twin) if name.startswith("_")}  # torch's own
        self.attributes: dict[str, Any] = {name: value for name, value in vars(twin).items() if name not in every}
        self.weights, self.others = self.names(twin)
        for option in self.options:
            setattr(self, option, getattr(twin, option))
        named = (*self.weights, *self.others)
        for name in sorted(named, key=[*twin._parameters, *named].index):  # in the twin's order
            self.register_parameter(name, cast(nn.Parameter | None, getattr(twin, name)))
        self.threshold = checked_threshold(threshold)
        self.initial_log_sigma2 = initial_log_sigma2
        # Of A² and σ² in δ = A²·σ²; None: that of log σ², or where it is faster and `fit` found the CPU fit for it ...
        self.variance_dtype = variance_dtype
        self.bfloat16_where_faster = False  # ... bfloat16
        for name in self.weights:
            weight = self.get_parameter(name)
            # Half precision is too coarse for log σ², which Adam moves in small steps.
            wide = torch.promote_types(weight.dtype, torch.float32)
            noise = torch.full_like(weight, initial_log_sigma2, dtype=wide)
            # A frozen layer stays frozen as a whole.
            self.register_parameter(noise_name(name), nn.Parameter(noise, requires_grad=weight.requires_grad))
        # A forward may read what its owner has put there.
        self._shown = [name for name in self.attributes if not name.startswith("_") and not hasattr(self, name)]
        for name in self._shown:
            setattr(self, name, self.attributes[name])
        self.train(twin.training)

    @classmethod
    def refusal(cls, twin: nn.Module) -> str:
        """Why this very module of the plain type cannot be converted, or an empty string."""
        return ""

    @classmethod
    def refusal_untied(cls, twin: nn.Module) -> str:
        """The same, unless its weight is that of another layer too."""
        return ""

    @classmethod
    def names(cls, twin: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parameters of this very module that carry noise, and those that do not."""
        return cls.weights, cls.others

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The twin's output: sampled in training mode, with pruned weights in eval mode."""

    def posteriors(self) -> Sequence[Posterior]:
        return [
            Posterior(self, name, contractible=self.can_contract(), unit_axis=self.unit_axis) for name in self.weights
        ]

    def can_contract(self) -> bool:
        """Whether the layer can compute with a part of its inputs and units: `weight` is [unit, input, ...] then."""
        return False

    def pruned_weight(self, name: str = "weight") -> Tensor:
        """A weight as eval mode uses it."""
        return Posterior(self, name).pruned()

    def plain(self, threshold: float | None = None) -> nn.Module:
        """The plain torch layer with exact zeros, which computes what this layer computes in eval mode."""
        twin = self._empty_twin()
        for posterior in self.posteriors():
            pruned = posterior.pruned(threshold).detach()
            twin.register_parameter(posterior.weight, nn.Parameter(pruned, posterior.theta.requires_grad))
        for name in self.others:
            other = cast(nn.Parameter | None, getattr(self, name))
            if other is not None:
                twin.register_parameter(name, copy.deepcopy(other))
        return twin.train(self.training)

    def _empty_twin(self) -> nn.Module:
        """The plain twin but for its parameters."""
        if type(self).plain_type is self.plain_type:
            with torch.device("meta"):  # its parameters, soon replaced, take no room
                twin = self.plain_type(**self.arguments())
            twin.__dict__.update({name: value for name, value in self._attributes() if not hasattr(twin, name)})
            return twin
        twin = self.plain_type.__new__(self.plain_type)
        nn.Module.__init__(twin)
        twin.__dict__.update(self._attributes())
        noise = {posterior.noise for posterior in self.posteriors()}
        for name in self._parameters:  # in their order
            if name not in noise and not hasattr(twin, name):
                twin.register_parameter(name, None)
        return twin

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """What the twin had beside its parameters, as it is now."""
        for name, value in self.attributes.items():
            now = getattr(self, name, value) if name in self._shown else value
            yield name, now

    def arguments(self) -> dict[str, Any]:
        """What the twin's constructor takes."""
        return {option: getattr(self, option) for option in self.options}

    def reset_parameters(self) -> None:
        """Fresh weights as the plain twin would draw them, and fresh noise: for layers made on the meta device."""
        cast(Any, self.plain_type).reset_parameters(self)
        for posterior in self.posteriors():
            nn.init.constant_(posterior.log_sigma2, self.initial_log_sigma2)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """Move or cast the parameters, as `.to()` and `.half()` do; log σ² never becomes narrower than float32."""
        before = {posterior.noise: posterior.log_sigma2.detach() for posterior in self.posteriors()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, noise in before.items():
            now = self.get_parameter(name)
            if now.dtype.itemsize < 4:
                now.data = noise.to(now.device, torch.float32)
        return self

    def extra_repr(self) -> str:
        settings = self.arguments() | {"threshold": self.threshold}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())
