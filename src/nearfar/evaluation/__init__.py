"""Evaluation: neighbors, scores with error bars, comparison, clustering, verification; embed, index, export."""

from nearfar.data.benchmarks import KS
from nearfar.evaluation._exact_search import Neighbors
from nearfar.evaluation.bootstrap import Interval
from nearfar.evaluation.disk_build import build_index
from nearfar.evaluation.disk_index import DiskIndex, open_index
from nearfar.evaluation.embed import embed
from nearfar.evaluation.evaluate import ClassRow, Comparison, Evaluation, compare, evaluate
from nearfar.evaluation.export import Exported, export_onnx
from nearfar.evaluation.index import Index, SearchIndex
from nearfar.evaluation.judged import RetrievalEvaluation, evaluate_retrieval
from nearfar.evaluation.judgements import Collection, read_beir
from nearfar.evaluation.k_means import Clusters, k_means
from nearfar.evaluation.neighbors import neighbors
from nearfar.evaluation.vectors import Vectors
from nearfar.evaluation.verification import Verification, verification

__all__ = [
    "KS",
    "ClassRow",
    "Clusters",
    "Collection",
    "Comparison",
    "DiskIndex",
    "Evaluation",
    "Exported",
    "Index",
    "Interval",
    "Neighbors",
    "RetrievalEvaluation",
    "SearchIndex",
    "Vectors",
    "Verification",
    "build_index",
    "compare",
    "embed",
    "evaluate",
    "evaluate_retrieval",
    "export_onnx",
    "k_means",
    "neighbors",
    "open_index",
    "read_beir",
    "verification",
]
