"""Hugging Face Trainer: the model returns a dict with its loss; our sampler goes in through the data loader.

python examples/hugging_face_trainer.py --steps 200
"""

import argparse
import tempfile

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import nearfar as nf
from nearfar import models
from nearfar.data import View, open_data, transforms


class Retrieval(nn.Module):
    """The trainer calls it with a batch and reads the key `loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = models.build("small", inputs=(1, 32, 32), width=64)
        self.loss = nf.losses.SupCon()

    def forward(self, pictures: Tensor, labels: Tensor) -> dict[str, Tensor]:
        embeddings = self.network(pictures)
        return {"loss": self.loss(embeddings, labels), "embeddings": embeddings}


def named(batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Name the parts of a batch as `Retrieval.forward` does."""
    return {"pictures": batch[0], "labels": batch[1]}


class ByClass(Trainer):
    """Draws batches by class; everything else is the trainer's."""

    def get_train_dataloader(self) -> DataLoader:
        sampler = nf.batches.PerClass(self.train_dataset.samples.labels, classes=32, samples=4)
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=named)


def main(steps: int) -> None:
    data = open_data("glyphs")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, learning_rate=1e-3, report_to=[], save_strategy="no", logging_steps=1
        )
        view = View(data.train, transforms.get("glyphs", train=True))
        done = ByClass(model=Retrieval(), args=arguments, train_dataset=view).train()
    print(f"loss {done.training_loss:.4f} on average over {done.global_step} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
