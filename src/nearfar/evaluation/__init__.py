"""Evaluation: neighbors, scores with error bars, comparison, clustering, verification; embed, index, export."""

from nearfar.data._benchmarks import KS
from nearfar.evaluation._bootstrap import Interval
from nearfar.evaluation._calibration import Calibration
from nearfar.evaluation._disk_build import build_index
from nearfar.evaluation._disk_index import DiskIndex, open_index
from nearfar.evaluation._embed import embed
from nearfar.evaluation._evaluate import ClassRow, Comparison, Evaluation, compare, evaluate
from nearfar.evaluation._exact_search import Neighbors
from nearfar.evaluation._export import Exported, export_onnx
from nearfar.evaluation._index import Index, SearchIndex
from nearfar.evaluation._judged import RetrievalEvaluation, evaluate_retrieval
from nearfar.evaluation._judgements import Collection, read_beir
from nearfar.evaluation._k_means import Clusters, k_means
from nearfar.evaluation._mine import Mined, mine
from nearfar.evaluation._neighbors import neighbors
from nearfar.evaluation._thresholds import calibrate, evaluate_pairs
from nearfar.evaluation._vectors import Vectors
from nearfar.evaluation._verification import Verification, verification

__all__ = [
    "KS",
    "Calibration",
    "ClassRow",
    "Clusters",
    "Collection",
    "Comparison",
    "DiskIndex",
    "Evaluation",
    "Exported",
    "Index",
    "Interval",
    "Mined",
    "Neighbors",
    "RetrievalEvaluation",
    "SearchIndex",
    "Vectors",
    "Verification",
    "build_index",
    "calibrate",
    "compare",
    "embed",
    "evaluate",
    "evaluate_pairs",
    "evaluate_retrieval",
    "export_onnx",
    "k_means",
    "mine",
    "neighbors",
    "open_index",
    "read_beir",
    "verification",
]
