"""Two encoders, query x reference: pictures of a character in one face look for the same character in another.

Queries and references have networks of their own; the loss gets the references as `ref_emb`.

python examples/two_encoders.py --steps 200
"""

import argparse

import numpy as np
import torch

import nearfar as nf
from nearfar import models


def main(steps: int) -> None:
    split = nf.data.glyphs().train
    pictures, labels, faces = split.images[:, None].float() / 255, split.labels, split.faces
    left, right = (torch.nonzero(faces == face).flatten() for face in (0, 4))  # two faces, most characters in both
    common = np.intersect1d(labels[left].numpy(), labels[right].numpy())
    query = left[torch.from_numpy(np.isin(labels[left].numpy(), common))]
    reference = right[torch.from_numpy(np.isin(labels[right].numpy(), common))]

    one, other = (models.build("small", inputs=(1, 32, 32), embedding_dim=64) for _ in range(2))
    loss = nf.losses.NTXent(temperature=0.1)
    optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()], lr=1e-3)
    random = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        rows = torch.randperm(len(query), generator=random)[:128]
        a, b = query[rows], reference[rows]  # both are in the order of their labels, one picture a character
        value = loss(one(pictures[a]), labels[a], ref_emb=other(pictures[b]), ref_labels=labels[b])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"step {step}  loss {value.item():.4f}")

    one.eval()
    other.eval()
    with torch.no_grad():
        found = nf.evaluate(
            one(pictures[query]),
            labels[query],
            ref_emb=other(pictures[reference]),
            ref_labels=labels[reference],
            resamples=0,
        )
    print(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
