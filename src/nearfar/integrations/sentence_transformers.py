"""`Loss`: a loss of nearfar in sentence-transformers' `SentenceTransformerTrainer`."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nearfar._utils.checks import check_whole
from nearfar._utils.process_group import Group, several
from nearfar.distributed import Distributed
from nearfar.distributed._cached_step import Chunks, cut_samples
from nearfar.distributed._gather import JointRows
from nearfar.integrations._text_ids import group_texts, hash_texts
from nearfar.losses.scored import takes_scores

__all__ = ["Loss"]

Features = Mapping[str, Any]
ROWS = "sentence_embedding"


class Loss(nn.Module):
    """A loss of nearfar with the call of a loss of sentence-transformers: `loss(sentence_features, labels)`.

    The columns of the data set say what the rows are:

        text, label                     a class: loss(rows, labels)
        anchor, positive                a pair; the positives of the other anchors are negatives
        anchor, positive, negative, ... as many hard negatives as there are further columns
        text, text, score               scored pairs, for `losses.CoSENT`
        text, text, label               1 for a positive pair and 0 for a negative one, for losses of pairs

    Equal texts are found by their tokens: a document that occurs several times in the batch, or that belongs to another
    anchor with the same text, is a positive of all of these anchors. No sampler has to keep duplicates apart.

    With several processes the loss is computed over the rows of all of them (`nearfar.Distributed`).

    Args:
        model: the SentenceTransformer that is trained.
        loss: any loss of nearfar.
        chunk: hold the activations of only so many texts at a time (gradient caching, as in their Cached losses); the
            texts are embedded twice. None embeds the batch at once.
        in_batch: False compares an anchor with its own negatives only, as their TripletLoss does.
        duplicates: False takes equal texts as different ones, as their losses do.

    Example:
        >>> import nearfar as nf
        >>> from nearfar.integrations.sentence_transformers import Loss
        >>> class Model(torch.nn.Linear):  # stands for a SentenceTransformer
        ...     def forward(self, features):
        ...         return {"sentence_embedding": super().forward(features["input_ids"].float())}
        >>> loss = Loss(Model(3, 2), nf.losses.NTXent(temperature=0.05), chunk=2)
        >>> anchors, positives = ({"input_ids": torch.randint(9, (4, 3))} for _ in range(2))
        >>> loss([anchors, positives], None).backward()
    """

    def __init__(
        self, model: nn.Module, loss: Any, *, chunk: int | None = None, in_batch: bool = True, duplicates: bool = True
    ) -> None:
        super().__init__()
        if chunk is not None:
            check_whole("Loss", "chunk", chunk)
        self.model = model
        self.loss = loss if isinstance(loss, Distributed) else Distributed(loss)
        self.chunk, self.in_batch, self.duplicates = chunk, in_batch, duplicates

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, given the tokens of each column, and the labels or scores if the data have any."""
        columns = [dict(features) for features in sentence_features]
        rows = self._embed(columns)
        value: Tensor
        if len(rows) == 1:
            if labels is None:
                raise ValueError("Loss: one column of texts needs a column of labels, or another column of texts.")
            value = self.loss(rows[0], labels.reshape(-1))
        elif labels is not None:
            value = self._of_pairs(rows, labels.reshape(-1))
        elif self.in_batch:
            names, others = self._names(columns, len(rows[0]))
            value = self.loss(rows[0], names, ref_emb=torch.cat(rows[1:]), ref_labels=others)
        else:
            value = self._of_triplets(rows)
        return value

    def _embed(self, columns: list[dict[str, Any]]) -> list[Tensor]:
        """The rows [n, d] of each column."""
        if self.chunk is None:
            return [_rows(self.model, features) for features in columns]
        cut = [cut_samples("Loss", features, self.chunk) for features in columns]
        chunks = Chunks("Loss", self.model, [part for parts in cut for part in parts], embed=_rows)
        # torch calls `backward` only if an argument has a gradient
        learns = torch.ones((), requires_grad=torch.is_grad_enabled())
        rows: Tensor = _Chunked.apply(learns, chunks)  # type: ignore[no-untyped-call]
        return list(torch.split(rows, len(rows) // len(columns)))

    def _of_pairs(self, rows: list[Tensor], labels: Tensor) -> Tensor:
        """The loss of pairs of two columns with a score, or with a label 1 or 0."""
        if len(rows) != 2:
            raise ValueError(f"Loss: labels need one or two columns of texts, but {len(rows)} came; remove the labels.")
        if takes_scores(self.loss):
            value: Tensor = self.loss(rows[0], labels.to(torch.float64), ref_emb=rows[1])
            return value
        if labels.is_floating_point() and not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError("Loss: pairs with scores other than 0 and 1 need a loss of scores, nf.losses.CoSENT().")
        positive, negative = (torch.nonzero(labels == sign).flatten() for sign in (1, 0))
        return self._alone(rows[0], None, (positive, positive, negative, negative), ref_emb=rows[1])

    def _of_triplets(self, rows: list[Tensor]) -> Tensor:
        """The loss of each anchor with its positive and its own negatives."""
        n, each = len(rows[0]), torch.arange(len(rows[0]), device=rows[0].device)
        if len(rows) < 3:
            raise ValueError("Loss: in_batch=False needs a column of negatives after the anchor and the positive.")
        anchors = each.repeat(len(rows) - 2)
        negatives = torch.arange(n, n * (len(rows) - 1), device=each.device)
        return self._alone(rows[0], None, (anchors, anchors, negatives), ref_emb=torch.cat(rows[1:]))

    def _alone(self, *call: Any, **more: Any) -> Tensor:
        """The loss of listed pairs, which stay within a process: the gradient is averaged over processes."""
        value: Tensor = self.loss.loss(*call, **more)
        return value

    def _names(self, columns: list[dict[str, Any]], n: int) -> tuple[Tensor, Tensor]:
        """Labels of the anchors [n] and of the documents [m], equal for an anchor and its positives."""
        device = next(x.device for x in columns[0].values() if isinstance(x, Tensor))
        ranks = Group("Loss", self.loss.group) if several(self.loss.group) else None
        if not self.duplicates:
            each = torch.arange(n * (len(columns) - 1), device=device)
            if ranks is not None:
                each = each * ranks.world + ranks.rank
            return each[:n], each
        texts = torch.stack([hash_texts(features) for features in columns])
        mine = slice(None)
        if ranks is not None:
            joint = JointRows(ranks, ranks.gather(torch.tensor(n, device=device)).tolist())
            texts, mine = joint(texts.T).T, joint.mine
        anchors, documents = group_texts(texts[0], texts[1:])
        return anchors[mine], documents[:, mine].reshape(-1)

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card says of the loss."""
        return {"loss": repr(self.loss.loss), "chunk": self.chunk, "in_batch": self.in_batch}


class _Chunked(torch.autograd.Function):
    """The rows of all chunks, which are embedded again when their gradient is known."""

    @staticmethod
    def forward(ctx: Any, learns: Tensor, chunks: Chunks) -> Tensor:
        ctx.chunks = chunks
        return chunks.embed()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[None, None]:
        ctx.chunks.pull(grad[0])
        return None, None


def _rows(model: nn.Module, features: Features) -> Tensor:
    """The embeddings of a column or of a part of it."""
    rows: Tensor = model(dict(features))[ROWS]  # the modules write into the dictionary
    return rows
