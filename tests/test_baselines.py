"""The rivals: a contract that every one of them keeps, and the equations of each."""

import copy
import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from networks import small_network as network
from networks import small_problem as problem
from sparsevd import baselines
from sparsevd.baselines import METHODS, Training
from sparsevd.baselines.binary_dropout import BinaryDropout, dropout_rates
from sparsevd.baselines.checkpoint import Checkpoint
from sparsevd.baselines.gaussian_dropout import GaussianDropout
from sparsevd.baselines.gradual import GradualPruning, kept, ramped
from sparsevd.baselines.noise import noisy_outputs
from sparsevd.baselines.pruning import Pruning
from sparsevd.baselines.soft_weight_sharing import Mixture, SoftWeightSharing
from sparsevd.baselines.surgery import Surgery, renew
from sparsevd.baselines.training import named_weights, weight_layers
from sparsevd.baselines.variational_dropout import VariationalDropout, multiplicative_noise
from sparsevd.conversion import sparsify
from sparsevd.errors import ArgumentError, CheckpointError
from sparsevd.layers import SparseLayer
from sparsevd.posterior import equations
from sparsevd.reporting.summary import summary
from sparsevd.training.evaluation import elbo, evaluate
from sparsevd.training.recipes import FitConfig
from sparsevd.training.teacher import Teacher

pytestmark = pytest.mark.usefixtures("one_thread")
SPARSE = ["pruning", "surgery", "gradual", "soft-weight-sharing", "variational-dropout-unrestricted", "sparse-vd"]
# Thresholds and priors are made for layers with many weights, of which most do not matter.
FOR_SMALL_NETWORKS = {
    "pruning": {"quality": 0.6, "learning_rate": 1e-2, "retraining_rate": 5e-3},
    "surgery": {"c": 0.0, "dense_rate": 1e-2},
    "gradual": {"sparsity": 0.7, "learning_rate": 1e-2},
    "soft-weight-sharing": {"batch_size_factor": 2, "tau": 0.1, "learning_rate": 1e-2},
    "binary-dropout": {"rate": 0.2, "learning_rate": 5e-3},
    "gaussian-dropout": {"rate": 0.2, "learning_rate": 5e-3},
    "variational-dropout-unrestricted": {"learning_rate": 1e-2, "log_alpha_lr_ratio": 2.0},
    "sparse-vd": {"recipe": FitConfig(learning_rate=2e-2)},
}


def trained(name, epochs=3, seed=0, batch_size=100, **settings):
    data = problem()
    method = METHODS[name](**settings)
    return baselines.train(method, network(), data, epochs=epochs, seed=seed, batch_size=batch_size, progress=False)


@pytest.mark.parametrize("name", METHODS)
def test_the_outcome_is_a_plain_network_and_nothing_else_changes(name):
    model = network()
    model[4] = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = baselines.train(METHODS[name](), model, problem(), epochs=2, progress=False).network
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    types = [str(module) for module in model.modules() if not list(module.children())]
    if name == "sparse-vd":  # as `sparsify` does, and its card says
        types = [re.sub(r"^Dropout\(p=[\d.]+", "Dropout(p=0.0", kind) for kind in types]
    assert [str(module) for module in result.modules() if not list(module.children())] == types
    assert {k: v.shape for k, v in result.state_dict().items()} == {k: v.shape for k, v in before.items()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in result.modules())
    assert not result.training
    x = problem()[0]
    assert torch.equal(result(x), result(x))  # no noise is left


@pytest.mark.parametrize("name", METHODS)
def test_the_seed_decides(name):
    first, again, other = trained(name), trained(name), trained(name, seed=1)
    keys = first.network.state_dict()
    assert all(torch.equal(value, again.network.state_dict()[key]) for key, value in keys.items())
    assert any(not torch.equal(value, other.network.state_dict()[key]) for key, value in keys.items())


@pytest.mark.parametrize("epochs", [1, 2, 5])
@pytest.mark.parametrize("name", METHODS)
def test_the_budget_is_spent_and_not_more(name, epochs):
    training = Training(problem(100), epochs=epochs, progress=False)
    METHODS[name]().train(network(), training)
    assert training.spent == epochs


@pytest.mark.parametrize("name", METHODS)
def test_it_learns(name):
    result = trained(name, epochs=20, batch_size=20, **FOR_SMALL_NETWORKS.get(name, {})).network
    assert evaluate(result, problem()).error < 12
    assert (summary(result).ratio > 1.1) == (name in SPARSE), summary(result).ratio


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_card(name):
    text = baselines.card(METHODS[name])
    assert all(part in text for part in ("Suggested settings", "Departs from"))


def test_a_budget_is_checked():
    with pytest.raises(ArgumentError, match="epochs=0"):
        Training(problem(), epochs=0)
    training = Training(problem(), epochs=1)
    with pytest.raises(ArgumentError, match="2 more are not in the budget"):
        training.run(network(), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 2)
    with pytest.raises(ArgumentError, match="nothing to make sparse"):
        baselines.train(Pruning(), nn.Sequential(nn.Flatten(), nn.Bilinear(2, 2, 2)), problem(), progress=False)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dense", {"learning_rate": -1}),
        ("pruning", {"quality": math.nan}),
        ("pruning", {"rounds": 0}),
        ("pruning", {"dense_part": 3.0}),
        ("surgery", {"c": math.nan}),
        ("surgery", {"power": "1"}),
        ("gradual", {"sparsity": 1.0}),
        ("gradual", {"every": 0}),
        ("gradual", {"l1": -1e-5}),
        ("soft-weight-sharing", {"zero_proportion": 1.0}),
        ("soft-weight-sharing", {"batch_size_factor": 0}),
        ("binary-dropout", {"rate": 1.0}),
        ("gaussian-dropout", {"input_rate": -0.1}),
        ("variational-dropout", {"warm_up_end": 2.0}),
    ],
)
def test_settings_are_checked(method, settings):
    (name,) = settings
    with pytest.raises(ArgumentError, match=name if name != "warm_up_end" else "2.0"):
        METHODS[method](**settings)


def test_data_without_a_length_or_without_a_batch():
    data = problem(200)
    unknown = torch.utils.data.DataLoader(Stream([]), batch_size=None)
    with pytest.raises(ArgumentError, match="n_train"):
        Training(unknown, progress=False)
    training = Training(unknown, n_train=200, epochs=1, progress=False)
    with pytest.raises(ArgumentError, match="no batch"):
        METHODS["dense"]().train(network(), training)
    counted = torch.utils.data.DataLoader(Stream([data]), batch_size=None)
    training = Training(counted, n_train=200, epochs=1, progress=False)
    METHODS["dense"]().train(network(), training)
    assert training.spent == 1


class Stream(torch.utils.data.IterableDataset):
    """Whole batches, of which it does not say how many."""

    def __init__(self, given):
        self.given = given

    def __iter__(self):
        return iter(self.given)


class Inputs(Training):
    """Keeps what the layers saw in place of their inputs of ones, many times."""

    def run(self, model, *arguments, **keywords):
        self.seen = []
        layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        model.train()
        for layer in layers:
            size = (100, 1, 4, 4) if isinstance(layer, nn.Conv2d) else (4000, layer.in_features)
            # A hook on top of the method's: it is told what those before it made of the input.
            with torch.no_grad():
                handle = layer.register_forward_pre_hook(lambda _, inputs: self.seen.append(inputs[0]))
                layer(torch.ones(size))
                handle.remove()


@pytest.mark.parametrize(("method", "binary"), [(BinaryDropout, True), (GaussianDropout, False)])
def test_dropout_noise_has_the_mean_one_and_the_variance_of_its_rate(method, binary):
    training = Inputs(problem(), progress=False)
    torch.manual_seed(0)
    method(rate=0.4, input_rate=0.1).train(network(), training)
    assert len(training.seen) == 3
    for noise, p in zip(training.seen, (0.1, 0.4, 0.4), strict=True):
        tolerance = 6 * (p / (1 - p) / noise.numel()) ** 0.5
        assert noise.mean().item() == pytest.approx(1, abs=tolerance)
        assert noise.var().item() == pytest.approx(p / (1 - p), rel=0.15)
        assert (noise.unique().numel() == 2) == binary


def test_which_layers_have_which_rate():
    conv = nn.Conv2d(4, 4, 3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), conv, nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    rates = dropout_rates(model, 0.5, 0.2)
    assert list(rates.values()) == [0.2, 0.5, 0.5]
    assert conv not in rates


def test_pruning_removes_what_is_below_the_threshold_and_never_brings_it_back():
    removed: list[set] = []
    dense: list = []

    class Watched(Training):
        def run(self, model, *arguments, **keywords):
            if len(removed) == 1:  # the first round has just cut
                cut = [p.detach() == 0 for p in model.parameters() if p.ndim > 1]
                for zeros, weight in zip(cut, dense, strict=True):
                    assert torch.equal(zeros, weight.abs() <= 1.5 / 3 * weight.std())
            super().run(model, *arguments, **keywords)
            dense[:] = dense or [p.detach().clone() for p in model.parameters() if p.ndim > 1]
            zeros = torch.cat([p.flatten() for p in model.parameters() if p.ndim > 1]) == 0
            removed.append(set(zeros.nonzero().flatten().tolist()))

    Pruning(quality=1.5, rounds=3).train(network(), Watched(problem(), epochs=8, progress=False))
    assert len(removed) == 4
    assert not removed[0]
    assert all(earlier < later for earlier, later in itertools.pairwise(removed))


def test_gradual_pruning_follows_its_ramp_and_never_brings_a_weight_back():
    zeros = []

    class Watched(Training):
        def run(self, model, optimizer, epochs, *, after_step, decay=True, **keywords):
            def watch(done):
                after_step(done)
                weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1])
                zeros.append(weights == 0)

            super().run(model, optimizer, epochs, after_step=watch, decay=decay, **keywords)

    method = GradualPruning(sparsity=0.8, begin=0.1, end=0.5, every=3)
    result = method.train(network(), Watched(problem(), epochs=10, batch_size=50, progress=False)).network
    assert summary(result).sparsity == pytest.approx(80, abs=0.2)
    assert not any(mask.any() for mask in zeros[:20])  # one epoch of ten
    assert all((later | ~earlier).all() for earlier, later in itertools.pairwise(zeros))
    halfway = zeros[60].float().mean().item()  # at 0.3 of the run, a half of the ramp
    assert halfway == pytest.approx(0.8 * (1 - 0.5**3), abs=0.03)
    assert ramped(0.8, 0.0) == 0
    assert ramped(0.8, 1.0) == ramped(0.8, 2.0) == 0.8
    assert zeros[99].float().mean() < 0.8 + 1e-3
    assert all(mask.float().mean() == pytest.approx(0.8, abs=2e-3) for mask in zeros[100:])


def test_gradual_pruning_cuts_all_layers_together():
    weights = [nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.1]])), nn.Parameter(torch.tensor([[0.2, 5.0]]))]
    first, second = kept(weights, 0.5)
    assert first.tolist() == [[False, True], [True, False]]
    assert second.tolist() == [[False, True]]
    assert all(mask.all() for mask in kept(weights, 0.0))


def test_gradual_pruning_of_some_layers_leaves_the_others_whole():
    method = GradualPruning(sparsity=0.8, every=3, include=("3",))
    result = method.train(network(), Training(problem(), epochs=3, batch_size=50, progress=False)).network
    zeros = {name: (weight == 0).float().mean().item() for name, weight in named_weights(result).items()}
    assert zeros.pop("3.weight") == pytest.approx(0.8, abs=0.01)
    assert not any(zeros.values())
    with pytest.raises(ArgumentError, match="selects no module"):
        named_weights(network(), ("encoder",))


def test_gradual_pruning_lets_a_layer_learn_that_begins_with_zeros():
    model = network()
    nn.init.zeros_(model[5].weight)
    method = GradualPruning(sparsity=0.5, every=3, begin=0.3)
    result = method.train(model, Training(problem(), epochs=3, batch_size=50, progress=False)).network
    assert result[5].weight.any()


@pytest.mark.parametrize("stopped_after", [1, 3, 5])  # in the ramp, at its end, and after it
def test_gradual_pruning_goes_on_where_it_was_stopped(tmp_path, stopped_after, monkeypatch):
    method = GradualPruning(sparsity=0.8, begin=0.1, end=0.5, every=3, learning_rate=1e-2)
    settings = {"epochs": 6, "batch_size": 50, "progress": False}  # four steps in an epoch: no multiple of `every`

    def start():
        return network().to(memory_format=torch.channels_last)

    whole = method.train(start(), Training(problem(), **settings)).network
    write = Checkpoint.write

    def write_and_stop(self, model, optimizer, spent):
        write(self, model, optimizer, spent)
        if spent == stopped_after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            method.train(start(), Training(problem(), **settings, run_dir=tmp_path))
    training = Training(problem(), **settings, run_dir=tmp_path)
    again = method.train(start(), training).network
    assert training.spent == 6
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in whole.state_dict().items())
    with pytest.raises(CheckpointError, match=r"epochs: 6 then, 7 now\); give another run_dir"):
        method.train(start(), Training(problem(), **{**settings, "epochs": 7}, run_dir=tmp_path))
    with pytest.raises(CheckpointError, match=r"sparsity: 0\.8 then, 0\.5 now"):
        replace(method, sparsity=0.5).train(start(), Training(problem(), **settings, run_dir=tmp_path))
    other = nn.Sequential(nn.Flatten(), nn.Linear(problem()[0][0].numel(), 4))
    with pytest.raises(CheckpointError, match="is of another network"):
        method.train(other, Training(problem(), **settings, run_dir=tmp_path))
    (tmp_path / "rival.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        method.train(start(), Training(problem(), **settings, run_dir=tmp_path))


def test_surgery_renews_a_mask_outside_of_a_band():
    mask = torch.tensor([1.0, 1, 0, 1, 0, 0])
    renew(mask, torch.tensor([0.17, -0.19, 0.21, 0.21, -0.23, 0.0]), h=0.2)
    assert mask.tolist() == [0, 1, 0, 1, 1, 0]


class Renewals(Training):
    """Tells the method of 200 steps, each with other weights, and keeps which of them changed a mask."""

    def run(self, model, optimizer, epochs, *, weights=None, after_step=None, **keywords):
        self.spent += epochs
        self.renewed = []
        if not after_step:
            return
        for _ in range(200):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            before = [w != 0 for w in weights().values()]
            after_step(0.0)
            self.renewed.append(any((b != (w != 0)).any() for b, w in zip(before, weights().values(), strict=True)))


def test_surgery_renews_masks_less_and_less_often():
    """With γ = 1 and power 1 the chance at step t is 1 / (1 + t); with γ = 0 every step renews."""
    always, seldom = (Renewals(problem(), epochs=2) for _ in range(2))
    torch.manual_seed(0)
    Surgery(gamma=0.0).train(network(), always)
    assert all(always.renewed)
    Surgery(gamma=1.0).train(network(), seldom)
    expected = sum(1 / (1 + t) for t in range(1, 201))
    assert sum(seldom.renewed) == pytest.approx(expected, abs=3 * expected**0.5)
    assert sum(seldom.renewed[100:]) < sum(seldom.renewed[:100])


def test_surgery_lets_masked_weights_learn_and_return():
    """A masked weight keeps its value and gets the gradient of the product; a mask that is never renewed stays."""
    torch.manual_seed(0)
    masks = []

    class Watched(Training):
        def run(self, model, optimizer, epochs, *, weights=None, after_step=None, **keywords):
            def look(done):
                after_step(done)
                masks.append(torch.cat([(w != 0).flatten() for w in weights().values()]))

            look = look if after_step else None
            super().run(model, optimizer, epochs, weights=weights, after_step=look, **keywords)

    Surgery(c=1.0).train(network(), Watched(problem(), epochs=8, progress=False))
    steps = torch.stack(masks).float().diff(dim=0)
    assert (steps == -1).any()  # pruned
    assert (steps == 1).any()  # spliced
    assert not steps[-10:].any()  # held at the end


def test_the_mixture_is_the_density_of_torch():
    torch.manual_seed(0)
    weights = 0.3 * torch.randn(50)
    mixture = Mixture(weights, SoftWeightSharing(components=4, zero_proportion=0.99))
    with torch.no_grad():
        mixture.logits.copy_(torch.randn(4))
    proportions = torch.cat([torch.tensor([0.99]), 0.01 * mixture.logits.softmax(0)])
    oracle = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(proportions),
        torch.distributions.Normal(
            torch.cat([torch.zeros(1), mixture.means]), torch.exp(-0.5 * mixture.log_precisions)
        ),
    )
    ours = torch.logsumexp(mixture.log_components(weights), -1)
    torch.testing.assert_close(ours, oracle.log_prob(weights))
    shape, rate = (torch.tensor([a, *[b] * 4]) for a, b in ((5e3, 2.5e2), (2.0, 0.1)))
    precisions = mixture.log_precisions.detach().exp()
    gamma = torch.distributions.Gamma(shape, rate)
    shift = (torch.lgamma(shape) - shape * rate.log()).sum()  # the constant that is left out
    expected = -oracle.log_prob(weights).sum() - gamma.log_prob(precisions).sum() - shift
    torch.testing.assert_close(mixture.complexity(weights), expected, rtol=1e-4, atol=1e-2)
    assert set(mixture.quantised(weights).tolist()) <= {0.0, *mixture.means.tolist()}


def test_gradients_of_the_mixture_are_those_of_autograd():
    torch.manual_seed(0)
    weights = (0.1 * torch.randn(5000)).requires_grad_()
    mixture = Mixture(weights.detach(), SoftWeightSharing())
    with torch.no_grad():
        mixture.logits.add_(torch.randn(16))
    # The Gamma priors go through autograd in both.
    twin = -torch.logsumexp(mixture.log_components(weights), -1).sum() + mixture.complexity(weights.detach()[:0])
    learned = [mixture.means, mixture.log_precisions, mixture.logits]
    mine = torch.autograd.grad(mixture.complexity(weights), [weights, *learned])
    for got, wanted in zip(mine, torch.autograd.grad(twin, [weights, *learned]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-2)


def test_soft_weight_sharing_leaves_few_values():
    result = trained("soft-weight-sharing", epochs=4).network
    values = {value for p in result.parameters() if p.ndim > 1 for value in p.flatten().tolist()}
    assert len(values) <= 17


@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Conv2d(2, 3, 3, stride=2, padding=1, groups=1)])
def test_multiplicative_noise_is_that_of_sampled_weights(layer):
    """The local reparametrisation has the mean and variance of w = θ(1 + √α·ε), measured over many draws of w."""
    torch.manual_seed(0)
    x = torch.randn(1, 5) if isinstance(layer, nn.Linear) else torch.randn(1, 2, 4, 4)
    log_alpha = torch.randn_like(layer.weight)
    layer.train()
    with torch.no_grad():
        with noisy_outputs({layer: multiplicative_noise(layer, log_alpha)}):
            local = torch.stack([layer(x) for _ in range(4000)])
        sampled = []
        for _ in range(4000):
            weight = layer.weight * (1 + torch.exp(log_alpha / 2) * torch.randn_like(log_alpha))
            sampled.append(torch.func.functional_call(layer, {"weight": weight}, (x,)))
        sampled = torch.stack(sampled)
        layer.eval()
        quiet = layer(x)
    scale = sampled.std(0).max()
    assert (local.mean(0) - quiet).abs().max() < 0.1 * scale
    assert (local.std(0) - sampled.std(0)).abs().max() < 0.1 * scale


def test_multiplicative_noise_is_finite_where_alpha_is_not():
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.weight, 1e-25)
    with noisy_outputs({layer: multiplicative_noise(layer, torch.full((3, 4), 100.0))}):
        assert layer(torch.ones(2, 4)).isfinite().all()


class Watched(Training):
    """Keeps the log α of Variational Dropout."""

    def run(self, model, optimizer, epochs, **keywords):
        super().run(model, optimizer, epochs, **keywords)
        self.log_alphas = optimizer.param_groups[1]["params"]


@pytest.mark.parametrize("restricted", [True, False])
def test_the_bound_of_variational_dropout_is_that_of_sparse_vd_with_the_same_posterior(restricted):
    training = Watched(problem(), epochs=5, progress=False)
    outcome = VariationalDropout(restricted=restricted).train(network(), training)
    twin = sparsify(outcome.before_threshold)
    layers = [module for module in twin.modules() if isinstance(module, SparseLayer)]
    with torch.no_grad():
        for layer, log_alpha in zip(layers, training.log_alphas, strict=True):
            layer.log_sigma2.copy_(log_alpha + 2 * layer.weight.abs().log())
    bounds = [elbo(twin, training.data) for _ in range(10)]
    assert outcome.elbo == pytest.approx(sum(bounds) / 10, abs=3 * (max(bounds) - min(bounds)))
    assert max(bounds) - min(bounds) < 0.02 * abs(outcome.elbo)


def test_variational_dropout_turns_other_dropout_off_while_it_trains():
    rates = []

    class Looking(Training):
        def run(self, model, *arguments, **keywords):
            rates.append(model[2].p)
            super().run(model, *arguments, **keywords)

    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    VariationalDropout().train(model, Looking(problem(), epochs=1, progress=False))
    assert rates == [0]
    assert model[2].p == 0.5


def test_the_restricted_rate_stays_below_one():
    limits = {}
    for restricted in (True, False):
        training = Watched(problem(), epochs=5, progress=False)
        VariationalDropout(restricted=restricted, initial_log_alpha=-0.1, learning_rate=1e-2).train(network(), training)
        limits[restricted] = max(log_alpha.max().item() for log_alpha in training.log_alphas)
    assert limits[True] <= 0 < limits[False]


def test_the_two_divergences_agree_where_both_hold():
    log_alpha = torch.linspace(-8, 0, 50)
    difference = equations.negative_kl_kingma_cubic(log_alpha) - equations.negative_kl(log_alpha)
    assert (difference - difference.mean()).abs().max() < 0.1
    assert math.isfinite(difference.sum().item())


def test_tied_weights_are_one_and_what_attention_reads_gets_no_noise():
    net = nn.ModuleDict({"words": nn.Embedding(6, 4), "attention": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 6)})
    net["out"].weight = net["words"].weight
    assert list(named_weights(net)) == ["words.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    assert list(weight_layers(net)) == ["words", "out"]


@pytest.mark.parametrize("name", SPARSE)
def test_a_teacher_and_bfloat16_are_for_every_method(name):
    """Both change what is learned; a method that passed over one of them would win or lose a comparison by it."""
    torch.manual_seed(1)
    teacher = Teacher(network(), weight=0.9)
    settings = FOR_SMALL_NETWORKS.get(name, {})

    def outputs(**given):
        given = {"epochs": 3, "progress": False, **given}
        found = baselines.train(METHODS[name](**settings), network(), problem(), **given).network
        return found(problem()[0])

    with pytest.raises(ArgumentError, match="4 rows of logits"):
        outputs(teacher=Teacher(torch.zeros(4, 2)))
    plain = outputs()
    assert torch.equal(plain, outputs())
    taught = outputs(teacher=teacher)
    assert not torch.equal(plain, taught)
    with torch.no_grad():
        logits = teacher.source.eval()(problem()[0])
    torch.testing.assert_close(outputs(teacher=Teacher(logits, weight=0.9)), taught, rtol=1e-2, atol=1e-3)
    assert not torch.equal(plain, outputs(autocast=True))
