"""Hugging Face Trainer: the model returns a dict with its loss; our sampler goes in through the data loader.

python examples/hugging_face_trainer.py --steps 200

It trains, keeps checkpoints, goes on from the last one (run it again with --resume), and scores unseen characters.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer, TrainingArguments

import nearfar as nf
from nearfar import models
from nearfar.data import View, collate, open_data, transforms


class Retrieval(nn.Module):
    """The trainer calls it with a batch and reads the key `loss`; what a loss learns is saved with the network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = models.build("small", inputs=(1, 32, 32), embedding_dim=64)
        self.loss = nf.losses.Margin()

    def forward(self, pictures: Tensor, labels: Tensor) -> dict[str, Tensor]:
        embeddings = self.network(pictures)
        return {"loss": self.loss(embeddings, labels), "embeddings": embeddings}


def named(batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Name the parts of a batch as `Retrieval.forward` does."""
    pictures, labels, _ = collate(batch)
    return {"pictures": pictures, "labels": labels}


class ByClass(Trainer):
    """Draws batches by class; everything else is the trainer's."""

    def get_train_dataloader(self) -> DataLoader:
        sampler = nf.batches.MPerClass(self.train_dataset.samples.labels, classes=32, samples=4)
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=named)


def recall(found: EvalPrediction) -> dict[str, float]:
    """R@1 of all embeddings together, as the trainer hands them over."""
    scores = nf.evaluate(torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids), ks=(1,))
    return {"recall@1": scores.recall[1]}


def main(steps: int, folder: Path, resume: bool) -> None:
    data = open_data("glyphs")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=1e-3,
        report_to=[],
        logging_steps=1,
        save_strategy="steps",
        save_steps=max(1, steps // 2),
        per_device_eval_batch_size=256,
    )
    trainer = ByClass(
        model=Retrieval(),
        args=arguments,
        train_dataset=View(data.train, transforms.get("glyphs", train=True)),
        eval_dataset=View(data.test, transforms.get("glyphs", train=False)),
        data_collator=named,
        compute_metrics=recall,
    )
    done = trainer.train(resume_from_checkpoint=resume or None)
    scores = trainer.evaluate()
    print(f"loss {done.training_loss:.4f} on average over {done.global_step} steps")
    print(f"R@1 on unseen characters {100 * scores['eval_recall@1']:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder if it is left out")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.steps, given.folder or Path(temporary), given.resume)
