"""A plain PyTorch loop: our sampler, our loss, your optimizer.

python examples/plain_loop.py --steps 200
"""

import argparse

import torch
from torch.utils.data import DataLoader

import nearfar as nf
from nearfar import models
from nearfar.data import View, collate, open_data, transforms


def main(steps: int) -> None:
    data = open_data("glyphs")
    sampler = nf.batches.MPerClass(data.train.labels, classes=32, samples=4)
    view = View(data.train, transforms.get("glyphs", train=True))
    loader = DataLoader(view, batch_sampler=sampler, collate_fn=collate)
    network = models.build("small", inputs=(1, 32, 32), embedding_dim=64)
    loss = nf.losses.DroTopK(k=160, pair=nf.pairs.Logistic())
    optimizer = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=1e-3)

    step = 0
    while step < steps:
        for pictures, labels, _ in loader:
            value = loss(network(pictures), labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            step += 1
            print(f"step {step}  loss {value.item():.4f}")
            if step == steps:
                break

    network.eval()
    with torch.no_grad():
        pictures, labels, _ = View(data.test, transforms.get("none", train=False)).__getitems__(range(1000))
        print(nf.evaluate(network(pictures), labels))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
