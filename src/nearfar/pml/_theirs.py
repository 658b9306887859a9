"""Names of PML that are not made here: they are PML's own objects, fetched from it when somebody asks for them.

A module of `nearfar.pml` ends with the line

    __getattr__, __dir__ = theirs(__name__)

and then has every public name of PML's module: those that it defines itself (ours), and PML's own for the rest. A
module of PML of which nothing is made here is replaced by PML's, so that what a script sets on it counts:

    sys.modules[__name__] = whole(__name__)
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from nearfar._utils.extras import need

__all__ = ["MODULES", "NAMES", "WHOLE", "is_ours", "pml", "theirs", "whole"]

PACKAGE = "pytorch_metric_learning"
HERE = "nearfar.pml"

NAMES = {
    "losses": """
        AngularLoss ArcFaceLoss BaseLossWrapper BaseMetricLossFunction CircleLoss ContrastiveLoss CosFaceLoss
        CrossBatchMemory DynamicSoftMarginLoss EmbeddingRegularizerMixin FastAPLoss GeneralizedLiftedStructureLoss
        GenericPairLoss HistogramLoss InstanceLoss IntraPairVarianceLoss LargeMarginSoftmaxLoss LiftedStructureLoss
        ManifoldLoss MarginLoss MultiSimilarityLoss MultipleLosses NCALoss NPairsLoss NTXentLoss NormalizedSoftmaxLoss
        P2SGradLoss PNPLoss ProxyAnchorLoss ProxyNCALoss RankedListLoss SelfSupervisedLoss
        SignalToNoiseRatioContrastiveLoss SmoothAPLoss SoftTripleLoss SphereFaceLoss SubCenterArcFaceLoss SupConLoss
        ThresholdConsistentMarginLoss TripletMarginLoss TupletMarginLoss VICRegLoss WeightRegularizerMixin
    """,
    "miners": """
        AngularMiner BaseMiner BatchEasyHardMiner BatchHardMiner DistanceWeightedMiner
        EmbeddingsAlreadyPackagedAsTriplets HDCMiner MultiSimilarityMiner PairMarginMiner TripletMarginMiner
        UniformHistogramMiner
    """,
    "distances": "BaseDistance BatchedDistance CosineSimilarity DotProductSimilarity LpDistance SNRDistance",
    "reducers": """
        AvgNonZeroReducer BaseReducer ClassWeightedReducer DivisorReducer DoNothingReducer MeanReducer MultipleReducers
        PerAnchorReducer SumReducer ThresholdReducer
    """,
    "regularizers": """
        BaseRegularizer CenterInvariantRegularizer LpRegularizer RegularFaceRegularizer SparseCentersRegularizer
        ZeroMeanRegularizer
    """,
    "samplers": "FixedSetOfTriplets HierarchicalSampler MPerClassSampler TuplesToWeightsSampler",
    "testers": """
        BaseTester GlobalEmbeddingSpaceTester GlobalTwoStreamEmbeddingSpaceTester WithSameParentLabelTester
    """,
    "trainers": """
        BaseTrainer CascadedEmbeddings DeepAdversarialMetricLearning MetricLossOnly TrainWithClassifier
        TwoStreamMetricLoss
    """,
    "datasets": "BaseDataset CUB Cars196 INaturalist2018 StanfordOnlineProducts",
    "utils.accuracy_calculator": """
        AccuracyCalculator get_label_match_counts get_lone_query_labels get_relevance_mask get_unique_labels
        maybe_get_avg_of_avgs mean_average_precision mean_reciprocal_rank nan_accuracy precision_at_k r_precision
        try_getting_not_lone_labels
    """,
    "utils.distributed": """
        DistributedLossWrapper DistributedMinerWrapper all_gather all_gather_embeddings_and_labels gather
        gather_emb_and_ref gather_enqueue_mask get_indices_tuple is_distributed select_ref_or_regular
    """,
    "utils.inference": """
        CustomKNN FaissKMeans FaissKNN InferenceModel MatchFinder add_to_index_and_search convert_to_cpu_index
        convert_to_gpu_index get_topk mask_reshape_knn_idx return_results run_pca try_gpu
    """,
}
"""The public names of PML 2.9, by module; a test compares them with the installed one."""

WHOLE = (
    "utils.common_functions",
    "utils.key_checker",
    "utils.logging_presets",
    "utils.loss_and_miner_utils",
    "utils.loss_tracker",
    "utils.module_with_records",
    "utils.module_with_records_and_reducer",
)
"""Modules that are PML's as a whole."""

MODULES = (*NAMES, *WHOLE)


def pml(part: str, whose: str) -> Any:
    """Import a module of PML, such as "losses".

    Args:
        part: its name below `pytorch_metric_learning`.
        whose: who asks, for the error of a missing package.

    Raises:
        ImportError: PML is not installed; one sentence says what to install.
    """
    return need(f"{PACKAGE}.{part}", whose, "pml")


def whole(module: str) -> ModuleType:
    """PML's own module in the place of one here: `whole("nearfar.pml.utils.loss_tracker")`."""
    found: ModuleType = pml(module.removeprefix(f"{HERE}."), module)
    return found


def theirs(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module of `nearfar.pml` with the names of PML's module of the same path."""
    part = module.removeprefix(f"{HERE}.")
    known = NAMES[part].split()

    def fetch(name: str) -> Any:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near and not name.startswith("_") else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        return getattr(pml(part, f"{module}.{name}"), name)

    return fetch, lambda: sorted({*vars(sys.modules[module]), *known})


def is_ours(part: str, name: str) -> bool:
    """Whether `nearfar.pml` makes a name itself; else it hands PML's own object through.

    >>> is_ours("losses", "ContrastiveLoss"), is_ours("losses", "ManifoldLoss")
    (True, False)
    """
    return part not in WHOLE and name in vars(import_module(f"{HERE}.{part}"))
