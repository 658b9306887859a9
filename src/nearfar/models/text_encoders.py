"""Text encoders by name: `static`, a folder, or one for queries beside one for documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nearfar.data._tokens import read_tokenizer, vocabulary_of
from nearfar.models.sentence_folder import read_folder
from nearfar.models.text import About, Static, TextTrunk, Transformer, Two, read_vectors, static_about

__all__ = ["text_trunk"]


def text_trunk(
    name: str,
    *,
    pretrained: bool = True,
    weights: Path | None = None,
    tokenizer: Path | None = None,
    length: int | None = None,
    texts: Iterable[str] | None = None,
    saved: Mapping[str, About] | None = None,
) -> nn.Module:
    """A trunk by the name of its encoder: "static", a folder, or "QUERY|DOCUMENT" with two of these.

    Args:
        name: the name without "text:".
        pretrained: load the weights of the folder; else they begin at random.
        weights: of "static": a .safetensors or .npz file with the token vectors [n, d].
        tokenizer: of "static" with weights: the file tokenizer.json; None: the one beside the weights.
        length: the most tokens of a text; None: as the folder says, else `LENGTH`.
        texts: of "static" without weights: the texts whose words make the vocabulary.
        saved: the descriptions of saved trunks (`described`), in place of all others.
    """
    if saved:
        made = {side: _from_about(about) for side, about in saved.items()}
        return Two(made["query"], made["document"]) if "query" in made else made[""]
    names = name.split("|text:")
    given: Any = {"weights": weights, "tokenizer": tokenizer, "texts": texts, "pretrained": pretrained}
    if len(names) == 2:
        return Two(*(_named(each, length, given) for each in names))
    return _named(name, length, given)


def _from_about(about: About) -> TextTrunk:
    kinds: dict[str, Callable[[About], TextTrunk]] = {"static": Static, "transformer": Transformer}
    if about.get("kind") not in kinds:
        raise ValueError("its text encoder is of an unknown kind")
    return kinds[about["kind"]](about)


def _named(name: str, length: int | None, given: dict[str, Any]) -> TextTrunk:
    if name == "static":
        return static(given["weights"], given["tokenizer"], given["texts"], length)
    if given["weights"] is not None or given["tokenizer"] is not None:
        raise ValueError(f"models: text:{name} brings its weights and its tokenizer; leave model.weights out.")
    return read_folder(Path(name), length, given["pretrained"])


def static(weights: Path | None, tokenizer: Path | None, texts: Iterable[str] | None, length: int | None) -> Static:
    """Static token vectors: those of a file, or random ones of the words of some texts."""
    if weights is None:
        if tokenizer is None and texts is None:
            raise ValueError("models: text:static needs weights=, a tokenizer= or texts= whose words it learns.")
        text = vocabulary_of(texts or ()) if tokenizer is None else read_tokenizer(tokenizer)
        return Static(static_about(text, None, length))
    vectors = read_vectors(weights)
    text = read_tokenizer(weights.parent / "tokenizer.json" if tokenizer is None else tokenizer)
    return Static(static_about(text, vectors, length), vectors)
