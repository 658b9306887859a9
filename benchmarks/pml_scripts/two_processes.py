"""A training script with pytorch-metric-learning on two processes: DistributedDataParallel, and its two wrappers.

    python benchmarks/pml_scripts/two_processes.py     some seconds

benchmarks/speed/pml_scripts.py runs it as it is, and with the import replaced by nearfar.pml.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import distributed as pml_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nearfar.data._glyphs import few_glyphs


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64)
    )


def train(rank, world, steps=20, batch_size=256):
    """CPU seconds of the steps on this process, and of the miner and the loss alone; the last loss."""
    torch.set_num_threads(1)
    data = few_glyphs().train
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_func = pml_dist.DistributedLossWrapper(losses.MultiSimilarityLoss())
    mining_func = pml_dist.DistributedMinerWrapper(miners.MultiSimilarityMiner())
    generator = torch.Generator().manual_seed(rank)
    taken, inside = 0.0, 0.0
    for step in range(steps):
        rows = torch.randint(len(data.labels), (batch_size,), generator=generator)
        start = time.process_time()
        embeddings = model(data.images[rows, None].float() / 255)
        leaf = embeddings.detach().requires_grad_()
        begun = time.process_time()
        loss = loss_func(leaf, data.labels[rows], mining_func(leaf, data.labels[rows]))
        loss.backward()
        middle = time.process_time()
        optimizer.zero_grad()
        embeddings.backward(leaf.grad)
        optimizer.step()
        if step:  # the first warms up
            taken, inside = taken + time.process_time() - start, inside + middle - begun
    return {"seconds": {"training": taken, "loss and miner": inside}, "loss": loss.item()}


def work(rank, world, file, steps):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    found = train(rank, world, steps)
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (2, str(Path(folder) / "meet"), given.steps), nprocs=2)
