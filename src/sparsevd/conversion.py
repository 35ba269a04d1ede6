"""From a plain network to its Sparse VD twin and back.

`sparsify` swaps modules and never patches methods; which types it knows is the registry `SPARSE_TYPES`, keyed by the
exact type, because a subclass may use its weight in ways of its own. `preview` says beforehand what would happen.
"""

import copy
import fnmatch
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from sparsevd.errors import ArgumentError, ConversionError, SparseVDWarning
from sparsevd.layers import INITIAL_LOG_SIGMA2, SPARSE_TYPES, SparseLayer
from sparsevd.layers.functional_use import weights_read
from sparsevd.layers.layer import OWN_ATTRIBUTES
from sparsevd.layers.registry import overridden, sparse_type
from sparsevd.layers.surgery import leave_fast_paths, restore_fast_paths, swap
from sparsevd.layers.wrapping import bare_model
from sparsevd.posterior import (
    THRESHOLD,
    NoisyModule,
    checked_threshold,
    noisy_modules,
    required_posteriors,
    threshold_for,
)

logger = logging.getLogger("sparsevd")

DROPOUT_TYPES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

Selector = str | type[nn.Module]
# For each parameter the modules that hold it, with its name there and in the model.
Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]

_COMPUTED = "computed (weight_norm, a parametrization, torch's pruning); remove that first"


@dataclass(frozen=True)
class Conversion:
    """What `sparsify` does with a model: names of modules, and for what stays dense the reason."""

    replaced: tuple[str, ...]
    dropout_removed: tuple[str, ...]
    skipped: dict[str, str]
    frozen: tuple[str, ...] = ()  # of those replaced
    read_elsewhere: dict[str, str] = field(default_factory=dict)  # and whose forward it is that reads its weight too

    def __str__(self) -> str:
        lines = [f"to Sparse VD: {', '.join(self.replaced) or 'nothing'}"]
        if self.dropout_removed:
            lines.append(f"dropout set to p = 0: {', '.join(self.dropout_removed)}")
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """What a user should know: a line for each layer that stays dense, that cannot learn, or that is bypassed."""
        lines = [f"left dense: {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [
            f"frozen: {name}: its weights require no gradient, so neither they nor their noise change, and all stay"
            for name in self.frozen
        ]
        return lines + [
            f"read elsewhere: {name}: the forward of {reader} uses its weight by itself, where that has no noise in "
            "training and no zeros before prune; exclude it, or call the layer"
            for name, reader in self.read_elsewhere.items()
        ]


def preview(
    model: nn.Module,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] = (),
    keep_dropout: bool = False,
) -> Conversion:
    """What `sparsify` would do with this model, without doing it. The arguments are those of `sparsify`."""
    model = bare_model(model)
    names: dict[nn.Module, list[str]] = defaultdict(list)  # a shared module has several names
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    included = {model} if include is None else _matches(names, include, "include")
    excluded = _matches(names, exclude, "exclude")
    owners = _owners(model)
    views = _views(owners)
    kinds: dict[nn.Module, type[SparseLayer]] = {}
    replaced: list[str] = []
    dropout_removed: list[str] = []
    skipped: dict[str, str] = {}
    for module, aliases in names.items():
        if _is_below(aliases, names, excluded) or not _is_below(aliases, names, included):
            continue
        if type(module) in DROPOUT_TYPES:
            if not keep_dropout:
                dropout_removed += aliases
        elif not isinstance(module, NoisyModule):
            reason, kind = _why_not(module, owners), sparse_type(module)
            if reason:
                skipped[aliases[0] or "(model)"] = reason
            elif kind is not None:
                kinds[module] = kind
    while lost := {
        module: reason for module in kinds if (reason := _why_not_alone(module, kinds, names, owners, views))
    }:
        for module, reason in lost.items():  # which may be a reason for others
            del kinds[module]
            skipped[names[module][0] or "(model)"] = reason
    for module in kinds:
        replaced += names[module]
        rate = getattr(module, "dropout", 0.0)  # that inside of an RNN or attention, which is no module
        if not keep_dropout and isinstance(rate, int | float) and rate > 0:
            dropout_removed += names[module]
    frozen = [name for name in replaced if not any(p.requires_grad for p in _noisy_to_be(model.get_submodule(name)))]
    elsewhere = {
        names[read][0]: type(module).__name__
        for module in names
        if module not in kinds  # whose own forward is not called
        for read, weight in weights_read(module)
        if read in kinds and weight in kinds[read].names(read)[0]
    }
    return Conversion(tuple(replaced), tuple(dropout_removed), skipped, tuple(frozen), elsewhere)


def _noisy_to_be(module: nn.Module) -> list[nn.Parameter]:
    kind = sparse_type(module)
    return [module.get_parameter(name) for name in kind.names(module)[0]] if kind else []


def _owners(model: nn.Module) -> Owners:
    owners: Owners = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[parameter].append((module, key, f"{name}.{key}" if name else key))
    return owners


def sparsify(
    model: nn.Module,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] = (),
    keep_dropout: bool = False,
    inplace: bool = False,
    threshold: float = THRESHOLD,
    initial_log_sigma2: float | Literal["relative"] = INITIAL_LOG_SIGMA2,
    variance_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The Sparse VD twin of a network: Linear, Conv, LSTM, attention and others get a learned noise on each weight.

        model = sparsevd.sparsify(dense)
        model = sparsevd.sparsify(dense, exclude=["head", nn.Conv1d])

    Weights, names and state_dict keys stay; `<layer>.log_sigma2` is added. Tied weights stay tied, and have one noise.
    Dropout modules stay with p = 0, and so does the dropout inside of RNNs and attention, since the noise takes its
    place, unless `keep_dropout`. What cannot be converted stays dense and is named, with the reason, in one
    `SparseVDWarning`; `sparsevd.conversion.preview` takes the same arguments and only tells.

    Args:
        model: any network; it is copied unless `inplace`. Of one that is wrapped by torch.compile or
            DistributedDataParallel the network inside is converted and returned; wrap that again.
        include: convert only these: module names, which may hold wildcards as in `"encoder.*.fc?"`, or layer types.
            A name stands for everything below it.
        exclude: leave these as they are, by name or type.
        keep_dropout: leave dropout in place.
        inplace: change the given model instead of a copy, for models too large to have twice.
        threshold: weights of log α above it are zero in eval mode and after `prune`.
        initial_log_sigma2: log σ² of every weight at the start, or "relative": small against the weights of each layer,
            which a trained network needs, and which `fit` chooses by itself for one.
        variance_dtype: type of the inputs of the variance product: torch.bfloat16 is faster where the hardware has it.
            None means that of log σ², float32 or wider.
    """
    if variance_dtype is not None and not variance_dtype.is_floating_point:
        raise ArgumentError(f"variance_dtype={variance_dtype} must be a floating-point type, such as torch.bfloat16")
    if isinstance(initial_log_sigma2, str) and initial_log_sigma2 != "relative":
        raise ArgumentError(f'initial_log_sigma2={initial_log_sigma2!r} must be a number or "relative"')
    model = bare_model(model)
    conversion = preview(model, include=include, exclude=exclude, keep_dropout=keep_dropout)
    if not conversion.replaced and (noisy := noisy_modules(model)):
        raise ConversionError(
            f"nothing to convert in {type(model).__name__}: it is converted already, and its Sparse VD layers are "
            f"{', '.join(name or '(model)' for name in noisy)}" + "".join(f"\n{line}" for line in conversion.remarks())
        )
    if not conversion.replaced:
        raise ConversionError(
            f"nothing to convert in {type(model).__name__}; Sparse VD knows "
            f"{', '.join(plain.__name__ for plain in SPARSE_TYPES)} (exact types, selected by include and exclude)"
            + "".join(f"\n{line}" for line in conversion.remarks())
        )
    if not inplace:
        model = copied(model)
    logger.info("%s", conversion)
    if remarks := conversion.remarks():
        warnings.warn("\n".join(remarks), SparseVDWarning, stacklevel=2)
    relative = initial_log_sigma2 == "relative"
    first = INITIAL_LOG_SIGMA2 if isinstance(initial_log_sigma2, str) else initial_log_sigma2
    for name in conversion.dropout_removed:
        module = model.get_submodule(name)
        setattr(module, "p" if type(module) in DROPOUT_TYPES else "dropout", 0.0)  # not Identity: models read p
    swaps: dict[nn.Module, SparseLayer] = {}
    for name in conversion.replaced:
        layer = model.get_submodule(name)
        kind = sparse_type(layer)
        if layer not in swaps and kind is not None:
            swaps[layer] = kind(layer, threshold=threshold, initial_log_sigma2=first, variance_dtype=variance_dtype)
    for name in conversion.read_elsewhere:
        swaps[model.get_submodule(name)].read_elsewhere = True
    _tie_noise(swaps.values())
    for posterior in (each for layer in swaps.values() for each in layer.posteriors() if relative):
        posterior.quieten()
    model = swap(model, swaps)
    leave_fast_paths(model, lambda module: isinstance(module, NoisyModule))
    return model


def _tie_noise(layers: Iterable[NoisyModule]) -> None:
    """Layers with the same θ get the same log σ²."""
    noise: dict[torch.Tensor, nn.Parameter] = {}
    for layer in layers:
        for posterior in layer.posteriors():
            own = layer.get_parameter(posterior.noise)
            shared = noise.setdefault(posterior.theta, own)
            if shared is not own:
                layer.register_parameter(posterior.noise, shared)
                # Transformers saves a tensor that has two names only if a module says so, in this way.
                layer.__dict__.setdefault("_tied_weights_keys", {})[posterior.noise] = posterior.noise


class Cut(Protocol):
    """Says where to cut log α; `sparsevd.Budget` is one. None: each layer at its own threshold."""

    @property
    def threshold_of(self) -> Callable[..., float | None]:
        """A method of the model, the data or None, and `loss` and `forward` as for `evaluate`."""


# Cuts that `prune(threshold=...)` knows by name. "auto" measures, which is for rooms below: the package adds it.
CUTS: dict[str, Cut] = {}


def prune(
    model: nn.Module,
    *,
    threshold: float | str | None = None,
    sparsity: float | None = None,
    budget: Cut | None = None,
    data: Any = None,
    inplace: bool = False,
    **how: Any,
) -> nn.Module:
    """The plain torch network with exact zeros where log α exceeds the threshold, and the original state_dict keys.

        pruned = sparsevd.prune(model)
        pruned = sparsevd.prune(model, threshold="auto", data=held_out)
        pruned = sparsevd.prune(model, sparsity=0.95)
        pruned = sparsevd.prune(model, budget=sparsevd.Budget(max_error_increase=0.5), data=held_out)

    Args:
        model: a Sparse VD network; it is copied unless `inplace`. Of one that is wrapped by torch.compile or
            DistributedDataParallel the network inside is pruned and returned.
        threshold: overrides the threshold of every layer (3.0 unless `sparsify` was told otherwise); infinity keeps
            every weight. "auto" cuts lower, as far as that costs next to nothing in the bound.
        sparsity: instead of a threshold, the share of all weights to make zero: those with the largest log α.
        budget: instead of both, what may be lost, or how large the file may be: the sparsest network that keeps to it.
        data: held-out data, as `evaluate` takes it, that a budget is measured on. "auto" is checked by it: where the
            error rises by more than the noise of measuring, the model's own threshold is kept.
        inplace: change the given model instead of a copy.
        how: `loss` and `forward`, as for `evaluate`, for what is measured.
    """
    model = bare_model(model)
    limit = _limit(model, threshold, sparsity, budget, data, how)
    if not inplace:
        model = copied(model)
    for posterior in required_posteriors(model):
        if not posterior.theta.is_meta and torch.isnan(posterior.log_alpha()).any():
            raise ArgumentError(
                f"{posterior.name} or its log σ² holds NaN, which no threshold can judge: training has diverged; prune "
                "an earlier state"
            )
    owners = _owners(model)
    swaps: dict[nn.Module, nn.Module] = {}
    for name, layer in noisy_modules(model).items():
        swaps[layer] = layer.plain(limit)
        for posterior in layer.posteriors():
            left = swaps[layer].get_parameter(posterior.weight)
            if not left.is_meta and not torch.any(left):
                lost = f"lost every one of its {left.numel():,} weights"
                warnings.warn(
                    f"layer {name or '(model)'} {lost}: its output no longer depends on its input"
                    if len(layer.posteriors()) == 1
                    else f"{posterior.weight} of layer {name or '(model)'} {lost}: nothing passes through it any more",
                    SparseVDWarning,
                    stacklevel=2,
                )
        if layer._forward_hooks or layer._forward_pre_hooks:
            warnings.warn(
                f"the forward hooks of layer {name or '(model)'} are not carried over", SparseVDWarning, stacklevel=2
            )
    _tie_again(owners, swaps)
    model = swap(model, swaps)
    restore_fast_paths(model.modules())
    return model


def _tie_again(owners: Owners, swaps: dict[nn.Module, nn.Module]) -> None:
    """What layers shared before, their plain twins share: a pruned weight, or a bias, also with a module that stays."""
    for parameter, places in owners.items():
        new = [(swaps[module], key) for module, key, _ in places if module in swaps]
        new = [(twin, key) for twin, key in new if key in twin._parameters]  # not log σ²
        if len(places) < 2 or not new:
            continue
        shared = new[0][0].get_parameter(new[0][1])
        if len(new) < len(places):
            if not torch.equal(shared, parameter):
                continue  # whoever reads the weight without noise, tied to it afterwards, reads what it read
            shared = parameter
        for twin, key in new:
            setattr(twin, key, shared)  # an RNN has a list of them too


def _limit(
    model: nn.Module,
    threshold: float | str | None,
    sparsity: float | None,
    budget: Cut | None,
    data: Any,
    how: dict[str, Any],
) -> float | None:
    """Where to cut log α, from what `prune` was given; None: each layer at its own threshold."""
    if sum(given is not None for given in (threshold, sparsity, budget)) > 1:
        raise ArgumentError("threshold, sparsity and budget each say where to cut; give one of them")
    cut = _named_cut(threshold) if isinstance(threshold, str) else budget
    if cut is not None and not hasattr(cut, "threshold_of"):
        raise ArgumentError(f"budget={cut!r} must be a sparsevd.Budget, such as Budget(max_error_increase=0.5)")
    if cut is None and (data is not None or how):
        raise ArgumentError(f"{', '.join(['data', *how][data is None :])}: only a budget is measured; give budget= too")
    if cut is not None:
        return cut.threshold_of(model, data, **how)
    if sparsity is not None:
        return threshold_of_sparsity(model, sparsity)
    return None if threshold is None else checked_threshold(float(threshold))


def _named_cut(name: str) -> Cut:
    if name not in CUTS:
        raise ArgumentError(f"threshold={name!r} must be a number or {' or '.join(map(repr, CUTS))}")
    return CUTS[name]


def threshold_of_sparsity(model: nn.Module, sparsity: float) -> float:
    """The threshold that makes this share of all weights zero."""
    found, lost = required_posteriors(model), lost_already(model)
    threshold = threshold_for([(each.theta, each.log_sigma2) for each in found], sparsity)
    if sparsity >= lost:
        return threshold
    warnings.warn(
        f"sparsity={sparsity:g} is below the {100 * lost:.2f} % of the weights that the network has lost for good "
        "already; they stay zero, and nothing else is pruned",
        SparseVDWarning,
        stacklevel=3,
    )
    return math.inf


def lost_already(model: nn.Module) -> float:
    """The share of the weights that are zero whatever the threshold."""
    found = required_posteriors(model)
    return sum(int((each.theta == 0).sum()) for each in found) / sum(each.theta.numel() for each in found)


def copied(model: nn.Module) -> nn.Module:
    """A copy; torch makes none of a tensor that was computed, as its pruning and the older weight_norm leave them."""
    try:
        with torch.no_grad():  # torch.jit copies its parameters by a computation, of which nothing can be trained
            result = copy.deepcopy(model)
        for given, own in zip(model.parameters(), result.parameters(), strict=True):
            own.requires_grad_(given.requires_grad)
        return result
    except RuntimeError as error:
        computed = [
            f"{name or '(model)'}: its {key} is {_COMPUTED}"
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and not value.is_leaf
        ]
        if not computed:
            raise
        raise ConversionError(
            f"{type(model).__name__} cannot be copied; remove what is named here, or give inplace=True\n"
            + "\n".join(computed)
        ) from error


def _matches(
    names: dict[nn.Module, list[str]], selectors: Selector | Iterable[Selector], argument: str
) -> set[nn.Module]:
    """The modules that these names, wildcards and types select; a selector that selects nothing is a mistake."""
    found: set[nn.Module] = set()
    for selector in [selectors] if isinstance(selectors, str | type) else selectors:
        if isinstance(selector, str):
            hits = {m for m, aliases in names.items() if any(fnmatch.fnmatchcase(a, selector) for a in aliases)}
        else:
            hits = {m for m in names if isinstance(m, selector)}
        if not hits:
            known = [a for m, aliases in names.items() if sparse_type(m) for a in aliases]
            raise ArgumentError(f"{argument}={selector!r} selects no module; the layers are {', '.join(known)}")
        found |= hits
    return found


def _is_below(aliases: list[str], names: dict[nn.Module, list[str]], selected: set[nn.Module]) -> bool:
    """Whether a module, or under any of its names a module above it, is selected."""
    roots = {alias for module in selected for alias in names[module]}
    return any(not root or alias == root or alias.startswith(f"{root}.") for alias in aliases for root in roots)


def _why_not(module: nn.Module, owners: Owners) -> str:
    """Why a module with weights of its own cannot be converted, or an empty string."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    matrices = [name for name, p in own.items() if is_lazy(p) or p.ndim >= 2]
    parents = [plain for plain in SPARSE_TYPES if isinstance(module, plain)]
    kind = sparse_type(module)
    reasons = []
    if isinstance(module, ParametrizationList):
        pass  # its owner is named
    elif is_parametrized(module) or (
        parents and any(name not in own for name in SPARSE_TYPES[parents[0]].names(module)[0])
    ):
        reasons.append(f"its weight is {_COMPUTED}")
    elif kind is not None:
        if lacks := _lacks(module, kind):
            return f"{type(module).__name__} lacks {', '.join(lacks)}, which the layer that it is registered like has"
        weights = {name: own[name] for name in kind.names(module)[0]}
        tied = any(len(owners[weight]) > 1 for weight in weights.values())
        if unreal := [f"{name} is {w.dtype}" for name, w in weights.items() if not w.is_floating_point()]:
            reasons.append(f"its {unreal[0]}, and the noise is for real floating-point numbers")
        elif refusal := kind.refusal(module) or ("" if tied else kind.refusal_untied(module)):
            reasons.append(refusal)
        elif extra := _extras(module, kind):
            reasons.append(f"it carries more than a weight and a bias ({', '.join(extra)}), which a swap would lose")
        elif taken := [name for name in OWN_ATTRIBUTES if name in vars(module) and name not in kind.options]:
            reasons.append(f"Sparse VD layers have a {taken[0]} of their own; give this attribute another name")
        elif module._forward_hooks or module._forward_pre_hooks:
            reasons.append("it has forward hooks, which a swap would lose; register them after sparsify")
    elif any(is_lazy(p) for p in own.values()):
        reasons.append(f"{type(module).__name__} has no weights yet; run the model once first")
    elif matrices and parents:
        reasons.append(_why_not_derived(type(module), parents[0]))
    elif matrices:
        reasons.append(f"{type(module).__name__} has no Sparse VD twin for {', '.join(matrices)}")
    if reasons and isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
        reasons.append(f"its functional dropout of {module.dropout} stays active in training")
    return "; ".join(reasons)


def _why_not_derived(kind: type[nn.Module], parent: type[nn.Module]) -> str:
    """What to do about a subclass of a layer that Sparse VD knows."""
    known = f"{kind.__name__} is a subclass of {parent.__name__}"
    register = f"call sparsevd.register({kind.__name__}, like=nn.{parent.__name__}) first"
    if method := overridden(kind, parent):
        return (
            f"{known} with a {method} of its own, which a Sparse VD layer does not call: what it adds, such as a "
            f"scale, would be lost in training. Only if it computes the very same, {register}; for anything else "
            "register it like a SparseLayer that you write for it"
        )
    return f"{known}, whose weight may be read in other ways; if it is not, {register}"


def _why_not_alone(
    module: nn.Module,
    kinds: dict[nn.Module, type[SparseLayer]],
    names: dict[nn.Module, list[str]],
    owners: Owners,
    views: dict[nn.Parameter, nn.Parameter],
) -> str:
    """Why a module cannot be converted while others, those not among `kinds`, are not; or an empty string."""
    for parameter in _noisy_to_be(module):
        for other, _, name in owners[parameter]:
            if other not in kinds or not any(parameter is each for each in _noisy_to_be(other)):
                tied = " = ".join(name for *_, name in owners[parameter])
                return f"tied parameters ({tied}): {name} stays dense, and pruning one would change the other"
        if parameter in views:
            return (
                f"its weight lies in the same memory as {owners[views[parameter]][0][2]}, a tensor of its own: read "
                "transposed, or in part, it would have two noises; tie the parameters themselves, or exclude one"
            )
    for parent in names:
        if isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module and parent not in kinds:
            return f"{type(parent).__name__} {names[parent][0] or '(model)'} reads its weight, and stays dense"
    return ""


def _views(owners: Owners) -> dict[nn.Parameter, nn.Parameter]:
    """Parameters that share memory without being one, as a weight and its transpose do, each with such another."""
    spans: list[tuple[str, int, int, nn.Parameter]] = []
    for parameter in owners:
        if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel():
            start = parameter.data_ptr()
            spans.append((str(parameter.device), start, start + parameter.nbytes, parameter))
    spans.sort(key=lambda span: span[:3])
    found: dict[nn.Parameter, nn.Parameter] = {}
    last: tuple[str, int, nn.Parameter] | None = None  # of those before, the one that reaches furthest
    for place, start, end, parameter in spans:
        if last is not None and last[0] == place and start < last[1]:
            found[parameter] = last[2]
            found.setdefault(last[2], parameter)
        if last is None or last[0] != place or end > last[1]:
            last = place, end, parameter
    return found


def _lacks(module: nn.Module, kind: type[SparseLayer]) -> list[str]:
    """What a module lacks of a layer of this kind: options and children, or the parameters that these ask for."""
    found = [name for name in (*kind.options, *kind.children_kept) if not hasattr(module, name)]
    return found or [name for names in kind.names(module) for name in names if not hasattr(module, name)]


def _extras(module: nn.Module, kind: type[SparseLayer]) -> list[str]:
    """What hangs on a layer beyond its own: parameters, buffers, children, a patched forward."""
    named = [
        *dict(module.named_parameters(recurse=False)),
        *dict(module.named_buffers(recurse=False)),
        *module._modules,
    ]
    weights, others = kind.names(module)
    known = (*weights, *others, *kind.children_kept)
    return [name for name in named if name not in known] + ["forward"] * ("forward" in module.__dict__)
