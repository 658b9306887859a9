"""Trunks for texts: static token vectors, transformers, and one encoder for queries beside one for documents.

A trunk takes token numbers [b, t], filled up with -1, and gives features [b, d]. It holds a description of itself as a
buffer, with its tokenizer, so that any file of its weights is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_choice, printable
from nearfar._utils.extras import need
from nearfar._utils.files import first_line
from nearfar._utils.memory import check_room
from nearfar.data._tokens import LENGTH, SIDE, Tokens, TwoTokens

__all__ = ["About", "Static", "TextTrunk", "Transformer", "Two", "described", "read_vectors", "static_about"]

KEY = "description"
WIDTH = 256  # dimension of token vectors that begin at random
About = dict[str, Any]
Pool = Callable[[Tensor, Tensor], Tensor]
POOLS: dict[str, Pool] = {
    "mean": lambda h, there: (h * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1),
    "cls": lambda h, there: h[:, 0],
    "max": lambda h, there: h.masked_fill(~there[..., None], -torch.inf).amax(1),
    "lasttoken": lambda h, there: h[torch.arange(len(h), device=h.device), there.sum(1) - 1],
}
"""Vectors of tokens [b, t, d], and which of them are there [b, t] -> [b, d]; the names are sentence-transformers'."""


class TextTrunk(nn.Module):
    """Base class of an encoder with one tokenizer; `about` is its description."""

    takes = torch.int64
    description: Tensor

    def __init__(self, about: About) -> None:
        super().__init__()
        self.about = about
        self.transform = Tokens(about["tokenizer"], about["length"], special=about["special"])
        text = json.dumps(about, sort_keys=True).encode()
        self.register_buffer(KEY, torch.frombuffer(bytearray(text), dtype=torch.uint8).clone())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        held, problems = state.get(f"{prefix}{KEY}"), rest[-1]
        if held is not None and not torch.equal(held.cpu(), self.description.cpu()):
            problems.append(
                "the tokenizer, the length or the kind of the text encoder differs from that of the weights"
            )
            return
        super()._load_from_state_dict(state, prefix, *rest)


class Static(TextTrunk):
    """Static token vectors: the mean of one vector for each token, as in WordLlama and model2vec."""

    def __init__(self, about: About, vectors: Tensor | None = None) -> None:
        super().__init__(about)
        rows, width = about["size"]
        if vectors is None:
            check_room("models", f"token vectors [{rows:,}, {width:,}]", 4 * rows * width)
            vectors = torch.randn(rows, width)
        self.vectors = nn.Parameter(vectors)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [b, t] -> features [b, d]."""
        there = (tokens >= 0).to(self.vectors.dtype)
        each = there / there.sum(1, keepdim=True).clamp(min=1)
        return nn.functional.embedding_bag(tokens.clamp(min=0), self.vectors, mode="sum", per_sample_weights=each)


class Transformer(TextTrunk):
    """A transformer of the package transformers, with pooling and perhaps linear layers after it."""

    def __init__(self, about: About, network: Any = None) -> None:
        super().__init__(about)
        package = need("transformers", "models: text:FOLDER", "text")
        if network is None:
            config = {name: value for name, value in about["config"].items() if name != "auto_map"}  # which names code
            network = package.AutoModel.from_config(package.AutoConfig.for_model(**config), trust_remote_code=False)
        check_choice("models", "the pooling of a text encoder", about["pooling"], POOLS)
        self.network = network.float()
        if getattr(network, "pooler", None) is not None:
            self.network.pooler = None  # not used, and often not trained
        self.filler = getattr(network.config, "pad_token_id", None) or 0  # positions of some networks depend on it
        self.dense = nn.Sequential(*(layer for each in about["dense"] for layer in _dense(each)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [b, t] -> features [b, d]."""
        there = tokens >= 0
        numbers = torch.where(there, tokens, self.filler)
        h = self.network(input_ids=numbers, attention_mask=there.long()).last_hidden_state
        features: Tensor = self.dense(POOLS[self.about["pooling"]](h, there))
        return features


class Two(nn.Module):
    """One encoder of queries and one of documents; which of them reads a text, its token numbers say."""

    takes = torch.int64

    def __init__(self, query: TextTrunk, document: TextTrunk) -> None:
        super().__init__()
        self.query, self.document = query, document
        self.transform = TwoTokens(query.transform, document.transform)
        with torch.no_grad():
            widths = [each(torch.zeros(1, 1, dtype=torch.int64)).shape[1] for each in (query, document)]
        if widths[0] != widths[1]:
            raise ValueError(
                f"models: query and document must give features of one width, but gave {widths[0]} and {widths[1]}; "
                "take encoders of the same width."
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [b, t] -> features [b, d]."""
        documents = tokens[:, 0] >= SIDE
        order = torch.cat([(~documents).nonzero()[:, 0], documents.nonzero()[:, 0]])
        asked = int((~documents).sum())
        plain = torch.where(tokens >= SIDE, tokens - SIDE, tokens)[order]
        parts = [
            each(rows) for each, rows in ((self.query, plain[:asked]), (self.document, plain[asked:])) if len(rows)
        ]
        return torch.cat(parts)[order.argsort()]


def _dense(about: About) -> list[nn.Module]:
    """A linear layer of sentence-transformers with its activation."""
    name = str(about["activation_function"]).rpartition(".")[2]
    check_choice("models", "the activation of a dense layer", name, ("Identity", "Tanh"))
    linear = nn.Linear(int(about["in_features"]), int(about["out_features"]), bias=bool(about["bias"]))
    return [linear, nn.Tanh()] if name == "Tanh" else [linear]


def described(state: Mapping[str, Any]) -> dict[str, About]:
    """The descriptions of text trunks in a state dict, by the name of the trunk: "", or "query" and "document"."""
    found = {}
    for name, value in state.items():
        if name.startswith("trunk.") and name.endswith(KEY):
            try:
                about = json.loads(value.cpu().numpy().tobytes())
                found[name.removeprefix("trunk.").removesuffix(KEY).strip(".")] = dict(about)
            except (ValueError, RecursionError, AttributeError):
                raise ValueError("the description of its text encoder cannot be read") from None
    return found


def static_about(tokenizer: str, vectors: Tensor | None, length: int | None) -> About:
    """The description of static token vectors."""
    about: About = {"kind": "static", "tokenizer": tokenizer, "length": length or LENGTH, "special": False}
    count = Tokens(tokenizer).size
    if vectors is not None and len(vectors) < count:
        raise ValueError(
            f"models: the tokenizer has {count:,} tokens, but the weights hold {len(vectors):,} vectors; name the "
            "tokenizer of these weights."
        )
    return {**about, "size": [count, WIDTH] if vectors is None else list(vectors.shape)}


def read_vectors(path: Path) -> Tensor:
    """The token vectors [n, d] of a file, as float32: its only matrix, or those of model2vec."""
    if not path.is_file():
        raise FileNotFoundError(f"models: there is no file of token vectors {path}.")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                held = {name: torch.from_numpy(file[name]) for name in file.files}
        else:
            from safetensors.torch import load_file

            held = load_file(path)
    except Exception as error:  # of many kinds, by the damage
        raise ValueError(
            f"models: {path} cannot be read ({printable(first_line(error))}); take another file."
        ) from None
    matrices = [value for value in held.values() if value.ndim == 2 and value.is_floating_point()]
    if len(matrices) != 1 or not torch.isfinite(matrices[0]).all():
        raise ValueError(
            f"models: {path} must hold one matrix [n, d] of finite token vectors, but holds {len(matrices)} matrices: "
            f"{printable(', '.join(held))[:80]}."
        )
    vectors = matrices[0].float()
    if "mapping" in held:  # of model2vec: the row of each token
        vectors = vectors[held["mapping"].long()]
    if "weights" in held and held["weights"].ndim == 1:
        vectors = vectors * held["weights"].float()[:, None]
    return vectors.contiguous()
