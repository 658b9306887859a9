"""`QueriesToDocuments`: a loss over batches that hold queries and then their documents."""

from typing import Any

from torch import Tensor, nn


class QueriesToDocuments(nn.Module):
    """A loss that compares the queries of a batch with its documents, and neither with their own kind.

    Args:
        loss: a loss that takes reference rows: all but those with proxies.
        documents: documents for each query; the queries are the first 1 / (1 + documents) of the rows.
    """

    def __init__(self, loss: Any, documents: int) -> None:
        super().__init__()
        if hasattr(loss, "proxies") or hasattr(getattr(loss, "loss", None), "proxies"):
            raise ValueError("config: a loss with proxies is for classes, and the data hold pairs; take --loss NTXent.")
        self.loss, self.documents = loss, documents

    def forward(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None) -> Tensor:
        """The loss of rows [b, d] with their classes [b]."""
        value: Tensor = self.loss(**self._sides(embeddings, labels))
        return value

    def explain(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None) -> Any:
        """The explanation of the loss for these rows."""
        return self.loss.explain(**self._sides(embeddings, labels))

    def _sides(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        count = len(x) // (1 + self.documents)
        return {"embeddings": x[:count], "labels": y[:count], "ref_emb": x[count:], "ref_labels": y[count:]}
