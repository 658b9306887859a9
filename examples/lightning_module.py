"""Lightning: the loss is a module of the module, so its parameters are trained, moved and saved with it.

python examples/lightning_module.py --steps 200
"""

import argparse

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import nearfar as nf
from nearfar import models
from nearfar.data import View, collate, open_data, transforms


class Retrieval(lightning.LightningModule):
    """A network and a loss with a threshold that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.network = models.build("small", inputs=(1, 32, 32), embedding_dim=64)
        self.loss = nf.losses.Margin()

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], index: int) -> Tensor:
        pictures, labels, _ = batch
        value = self.loss(self.network(pictures), labels)
        self.log("loss", value, prog_bar=True)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(steps: int) -> None:
    data = open_data("glyphs")
    sampler = nf.batches.MPerClass(data.train.labels, classes=32, samples=4)
    loader = DataLoader(
        View(data.train, transforms.get("glyphs", train=True)), batch_sampler=sampler, collate_fn=collate
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,  # our samplers know rank and world themselves
    )
    trainer.fit(Retrieval(), loader)
    print(f"loss {trainer.callback_metrics['loss']:.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
