"""Zeros that stay through fine-tuning, of whatever network they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune as torch_prune

import sparsevd
from sparsevd.errors import ArgumentError, SparseVDWarning

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rprop": torch.optim.Rprop,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def halved(net):
    with torch.no_grad():
        for module in net:
            if isinstance(module, nn.Linear):
                module.weight[::2] = 0
    return net


def steps(net, optimizer, count=5):
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)


def zeros(net):
    return {name: p == 0 for name, p in net.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_stay_and_the_rest_learns(name):
    net = halved(network())
    optimizer = OPTIMIZERS[name](net.parameters())
    steps(net, optimizer, 1)  # momentum from before, when they could still move
    halved(net)
    before, bias = zeros(net), net[0].bias.clone()
    weight = net[0].weight.clone()
    kept = sparsevd.keep_zeros(optimizer, net)
    steps(net, optimizer)
    assert all((zeros(net)[key] == mask).all() for key, mask in before.items())
    assert not torch.equal(net[0].bias, bias)
    assert not torch.equal(net[0].weight, weight)
    kept.detach()
    steps(net, optimizer)
    assert not all((zeros(net)[key] == mask).all() for key, mask in before.items())


def test_masks_of_torch_itself():
    net = network()
    torch_prune.l1_unstructured(net[0], "weight", 0.5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sparsevd.keep_zeros(optimizer, net)
    gone = net[0].weight == 0
    steps(net, optimizer)
    torch_prune.remove(net[0], "weight")
    assert (net[0].weight[gone] == 0).all()


def test_recurrent_weights_count_too():
    net = nn.LSTM(4, 5)
    with torch.no_grad():
        net.weight_hh_l0[:, 1] = 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsevd.keep_zeros([optimizer], net)
    net(torch.randn(3, 2, 4))[0].sum().backward()
    optimizer.step()
    assert (net.weight_hh_l0[:, 1] == 0).all()


def test_a_tensor_of_zeros_is_mentioned():
    net = network()
    nn.init.zeros_(net[2].weight)
    with pytest.warns(SparseVDWarning, match="2.weight: nothing but zeros"):
        sparsevd.keep_zeros(torch.optim.SGD(net.parameters()), net)


def test_what_is_no_optimizer():
    with pytest.raises(ArgumentError, match="must be a torch.optim.Optimizer"):
        sparsevd.keep_zeros(network().parameters(), network())
    with pytest.raises(ArgumentError, match="empty list"):
        sparsevd.keep_zeros([], network())


def test_a_network_that_is_loaded_brings_its_zeros():
    pruned, net = halved(network()), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparsevd.keep_zeros(optimizer, net)
    net.load_state_dict(pruned.state_dict())
    steps(net, optimizer)
    assert all((zeros(net)[key] == mask).all() for key, mask in zeros(pruned).items())


def test_an_optimizer_of_another_network():
    with pytest.raises(ArgumentError, match="no parameter of this network"):
        sparsevd.keep_zeros(torch.optim.SGD(network().parameters()), halved(network()))


def test_fit_dense_keeps_them_by_itself(capsys):
    net = halved(network())
    before = zeros(net)
    data = torch.randn(64, 6), torch.randint(0, 3, (64,))
    config = sparsevd.FitConfig(epochs=2, learning_rate=1e-2)
    sparsevd.fit_dense(net, data, config=config)
    assert "55.6 % of the weights are zero and stay so" in capsys.readouterr().out
    assert all((zeros(net)[key] == mask).all() for key, mask in before.items())
    sparsevd.fit_dense(net, data, config=config, keep_zeros=False, progress=False)
    assert not all((zeros(net)[key] == mask).all() for key, mask in before.items())


def test_fit_dense_lets_a_layer_learn_that_begins_with_zeros():
    net = network()
    nn.init.zeros_(net[2].weight)
    data = torch.randn(64, 6), torch.randint(0, 3, (64,))
    sparsevd.fit_dense(net, data, config=sparsevd.FitConfig(epochs=1), progress=False)
    assert (net[2].weight != 0).any()
