"""sentence-transformers: their trainer with a loss of nearfar, gradient caching, and duplicates in the batch.

python examples/sentence_transformers_trainer.py --steps 100

Questions are trained to find sentences about the same topic. The network is a small transformer that is made here; with
a model of the hub write `model = SentenceTransformer("...")`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel

import nearfar as nf
from nearfar.integrations.sentence_transformers import Loss

TOPICS = {
    "card": "bank lost block payment pin money",
    "food": "soup oven recipe cook salt bread",
    "music": "song play loud radio concert band",
    "rain": "umbrella storm cloud wind wet sky",
    "trip": "flight hotel ticket beach passport train",
    "work": "boss meeting office salary contract desk",
}
ASKED, SAID = "what about the {} {}", "more on {} and {}"


def texts(form: str, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Sentences with two words of a topic, and the numbers of their topics."""
    random, numbers = torch.Generator().manual_seed(seed), [i % len(TOPICS) for i in range(count)]
    words = [list(TOPICS.values())[i].split() for i in numbers]
    chosen = [[each[place] for place in torch.randperm(6, generator=random)[:2]] for each in words]
    return [form.format(*pair) for pair in chosen], numbers


def small_model(folder: Path) -> SentenceTransformer:
    """A transformer of one layer over the words of this example, not trained."""
    words = ["[PAD]", "[UNK]", *ASKED.split(), *SAID.split(), *" ".join(TOPICS.values()).split()]
    vocabulary = {word: place for place, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    shape = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    BertModel(shape).save_pretrained(folder)
    return SentenceTransformer(str(folder), device="cpu")


def main(steps: int, folder: Path) -> None:
    model = small_model(folder)
    (asked, _), (said, _) = (texts(form, 600, seed) for seed, form in enumerate((ASKED, SAID)))
    loss = Loss(model, nf.losses.CLIP(temperature=0.05, learn=True), chunk=32)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        logging_steps=max(1, steps // 5),
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    pairs = Dataset.from_dict({"anchor": asked, "positive": said})
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
    done = trainer.train()
    print(f"loss {done.training_loss:.4f} on average over {done.global_step} steps")
    (queries, own), (documents, theirs) = (texts(form, 60, seed) for seed, form in ((8, ASKED), (9, SAID)))
    rows, others = (model.encode(x, convert_to_tensor=True) for x in (queries, documents))
    scores = nf.evaluate(rows, torch.tensor(own), ref_emb=others, ref_labels=torch.tensor(theirs), ks=(1,))
    print(f"R@1 of new sentences {100 * scores.recall[1]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(given.steps, Path(temporary))
