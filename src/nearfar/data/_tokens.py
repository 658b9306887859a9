"""`Tokens`: the transform from a text to token numbers, and `pad`, which makes a batch of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar._utils.checks import check_whole, printable
from nearfar._utils.extras import need
from nearfar._utils.files import first_line

NOTHING = -1
"""Fills the rows of a batch up to the longest text; no token has a negative number."""
SIDE = 1 << 40
"""Added to the token numbers of a `Document` for a network with an encoder for each side."""
WORDS = 50_000  # the most words of a vocabulary
LENGTH = 256  # tokens of a text, unless the network or the configuration sets another limit


class Document(str):
    """A text on the documents' side of a pair; any other string is a query."""

    __slots__ = ()


class Tokens:
    """A transform from a text to the numbers of its tokens, int64 [t] with 1 <= t <= length.

    Args:
        text: the tokenizer, as the content of a `tokenizer.json` of the package tokenizers.
        length: the most tokens of a text, special tokens included; the rest of a longer text is not read.
        special: add the special tokens that the tokenizer defines, such as [CLS] and [SEP].
    """

    random = False

    def __init__(self, text: str, length: int = LENGTH, *, special: bool = True) -> None:
        check_whole("Tokens", "length", length)
        self.text, self.length, self.special = text, int(length), bool(special)
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, built on first use, also in worker processes."""
        if self._tokenizer is None:
            package = need("tokenizers", "texts", "text")
            try:
                self._tokenizer = package.Tokenizer.from_str(self.text)
            except Exception as error:  # the package raises plain Exceptions
                raise ValueError(
                    f"texts: the tokenizer cannot be read ({printable(first_line(error))}); take the tokenizer.json of "
                    "the network."
                ) from None
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(self.length)
        return self._tokenizer

    def __call__(self, text: Any, generator: np.random.Generator | None = None) -> Tensor:
        """One text; a text without tokens becomes the unknown token."""
        if not isinstance(text, str):
            raise TypeError(f"texts: the network takes texts, but {type(text).__name__} came; name data of texts.")
        numbers = self.tokenizer.encode(text, add_special_tokens=self.special).ids
        return torch.tensor(numbers or [self.unknown], dtype=torch.int64)

    @cached_property
    def unknown(self) -> int:
        """The number of the unknown token; 0 without one."""
        name = (json.loads(self.text).get("model") or {}).get("unk_token")
        found = None if name is None else self.tokenizer.token_to_id(name)
        return found or 0

    @property
    def size(self) -> int:
        """How many tokens there are: one more than the largest number."""
        return int(max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)) + 1

    def describe(self) -> dict[str, Any]:
        """Everything that changes the numbers of a text, in plain values."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:32]
        return {"name": "tokens", "tokenizer": digest, "length": self.length, "special": self.special}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}


class TwoTokens:
    """The transforms of two encoders, one of queries and one of documents, as one."""

    random = False

    def __init__(self, query: Tokens, document: Tokens) -> None:
        self.query, self.document = query, document
        self.length = max(query.length, document.length)

    def __call__(self, text: Any, generator: np.random.Generator | None = None) -> Tensor:
        """One text; the numbers of a `Document` have `SIDE` added."""
        return self.document(text) + SIDE if isinstance(text, Document) else self.query(text)

    def describe(self) -> dict[str, Any]:
        """Both descriptions."""
        return {"name": "two tokens", "query": self.query.describe(), "document": self.document.describe()}


def pad(rows: Sequence[Tensor]) -> list[Tensor]:
    """Fill token numbers [t] of different lengths up to the longest one; anything else is returned unchanged."""
    if not all(row.ndim == 1 and row.dtype == torch.int64 for row in rows):
        return list(rows)
    longest = max(map(len, rows), default=0)
    return [torch.nn.functional.pad(row, (0, longest - len(row)), value=NOTHING) for row in rows]


def read_tokenizer(path: Path) -> str:
    """The content of a tokenizer.json."""
    if not path.is_file():
        raise FileNotFoundError(f"models: there is no tokenizer {path}; name the file tokenizer.json of the network.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"models: {path} is not UTF-8 text; take the tokenizer.json of the network.") from None


def vocabulary_of(texts: Iterable[str]) -> str:
    """A tokenizer of the words of some texts, in small letters and without punctuation, most frequent first.

    Token 0 is every other word. Equal texts give equal tokenizers in any order.
    """
    package = need("tokenizers", "texts", "text")
    rules = package.normalizers.Sequence([package.normalizers.NFKC(), package.normalizers.Lowercase()])
    split = package.pre_tokenizers.Sequence(
        [package.pre_tokenizers.Whitespace(), package.pre_tokenizers.Punctuation("removed")]
    )
    counts = Counter(word for text in texts for word, _ in split.pre_tokenize_str(rules.normalize_str(str(text))))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    numbers = {"[UNK]": 0, **{word: place for place, word in enumerate(words, start=1) if word != "[UNK]"}}
    made = package.Tokenizer(package.models.WordLevel(numbers, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = rules, split
    text: str = made.to_str()
    return text
