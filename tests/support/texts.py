"""Small text data, and a tiny transformer in a folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import torch
import vision

TOPICS = {
    "card": ("lost", "bank", "card", "block"),
    "food": ("soup", "oven", "recipe", "cook"),
    "music": ("song", "play", "loud", "radio"),
    "rain": ("rain", "umbrella", "storm", "cloud"),
    "trip": ("flight", "hotel", "ticket", "beach"),
    "work": ("boss", "meeting", "office", "salary"),
    "zoo": ("lion", "zebra", "parrot", "cage"),
    "health": ("doctor", "pill", "fever", "clinic"),
}
SHARED = ("please", "tell", "me", "the", "my", "what", "is", "now", "to", "a")


def sentences(each: int = 8, seed: int = 0) -> list[tuple[str, str]]:
    """Sentences of five shared words and one or two words of their topic, as (text, topic)."""
    random = np.random.default_rng(seed)
    rows = []
    for topic, words in TOPICS.items():
        for _ in range(each):
            said = [*random.choice(SHARED, 5), *random.choice(words, 2, replace=False)]
            rows.append((" ".join(random.permutation(said)), topic))
    return rows


def classes_file(path: Path, each: int = 8) -> Path:
    """A CSV file of texts and labels; the last three topics are for the test."""
    names = list(TOPICS)
    rows = [(text, topic, "test" if names.index(topic) > 4 else "train") for text, topic in sentences(each)]
    return write_csv(path, ("text", "label", "split"), rows)


def pairs_file(path: Path, negatives: int = 0, each: int = 6) -> Path:
    """A CSV file of queries, documents of the same topic words and, if asked for, of other topics."""
    random = np.random.default_rng(1)
    rows = []
    topics = list(TOPICS.values())
    for number, words in enumerate(topics):
        for turn in range(each):
            first, second = random.choice(words, 2, replace=False)
            other = topics[(number + 1 + turn % 3) % len(topics)]
            wrong = [f"{other[place]} about {number}{turn}" for place in range(negatives)]
            rows.append((f"what is {first} {number}{turn}", f"{second} {first} {number}{turn}", *wrong))
    names = ("query", "document", *(f"negative_{place}" for place in range(1, negatives + 1)))
    return write_csv(path, names, rows)


def write_csv(path: Path, names: tuple[str, ...], rows) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows(rows)
    return path


def encoder_folder(folder: Path, pooling: str | None = "mean", seed: int = 0, width: int = 16) -> Path:
    """A transformer of one layer over the words of the topics, as transformers or sentence-transformers saves it."""
    vision.mend()
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *SHARED, *(word for topic in TOPICS.values() for word in topic)]
    numbers = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    folder.mkdir(parents=True)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    if pooling is not None:
        kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        modules = [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        (folder / "1_Pooling").mkdir()
        (folder / "2_Normalize").mkdir()
        switch = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}[pooling]
        given = {"word_embedding_dimension": width, f"pooling_mode_{switch}": True}
        if pooling != "mean":
            given["pooling_mode_mean_tokens"] = False
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(given), encoding="utf-8")
        (folder / "sentence_bert_config.json").write_text(
            '{"max_seq_length": 6, "do_lower_case": false}', encoding="utf-8"
        )
    return folder
