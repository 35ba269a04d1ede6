"""What test_distributed.py runs under torchrun: each case trains with `attach` and leaves its weights in a folder."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsevd
from loops import CONFIG, OPTIMIZERS, RATE, STEPS, N, batch, falling, network
from sparsevd.posterior import posteriors
from sparsevd.posterior.spread import whole

DROPPING = sparsevd.FitConfig(warm_up_end=0.0, drop_from=0.3, late_from=0.3, drop_patience=1, variance_dtype="float32")


def trained(model, net, optimizer, micro=1, fixed_noise=True):
    """Every process takes its part of each batch, in so many micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    scheduler = falling(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            state = torch.get_rng_state()
            x, y = batch(step, rank * micro + part, world * micro)
            if not fixed_noise:
                torch.set_rng_state(state)
            last = part == micro - 1
            if isinstance(net, DistributedDataParallel):
                net.require_backward_grad_sync = last
            else:
                net.set_requires_gradient_sync(last)
            (F.cross_entropy(net(x), y) / micro).backward()
        optimizer.step()
        scheduler.step()
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def case(kind, name, micro, config=CONFIG, fixed_noise=True):
    model = network()
    if config is DROPPING:
        for each in posteriors(model):
            each.layer.threshold = -4.5
    if kind == "ddp":
        net = DistributedDataParallel(model)
    else:
        net = model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[name](sparsevd.parameter_groups(model, RATE))
    schedule = sparsevd.attach(optimizer, net, n_train=N, total_steps=STEPS, steps_per_epoch=2, config=config)
    return model, optimizer, schedule, trained(model, net, optimizer, micro, fixed_noise)


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind in ("ddp", "fsdp"):
        for name in ("sgd", "adamw"):
            for micro in (1, 2):
                found = case(kind, name, micro)[3]
                torch.save(found, folder / f"{kind}-{name}-{micro}-{rank}.pt")
        # The same seed everywhere, as people have it: the noise must differ all the same, the weights must not.
        torch.manual_seed(5)
        model, optimizer, schedule, found = case(kind, "adamw", 1, DROPPING, fixed_noise=False)
        noise = torch.randn(3)
        report = schedule.report()
        torch.save((found, noise, report), folder / f"{kind}-dropping-{rank}.pt")
        networks, optimizers = get_state_dict(model, optimizer)
        state = {"model": networks, "optimizer": optimizers, "schedule": schedule.state_dict()}
        dcp.save(state, checkpoint_id=folder / kind)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, which is the end of some processes in ten


if __name__ == "__main__":
    main(Path(sys.argv[1]))
