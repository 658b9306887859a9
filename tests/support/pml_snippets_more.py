"""More scripts like pml_snippets.py: evaluation, inference, trainers, and every loss of the page of losses."""

from __future__ import annotations

USES = {
    "scores": """
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        calculator = AccuracyCalculator(include=("precision_at_1", "mean_average_precision_at_r"), k="max_bin_count")
        found = calculator.get_accuracy(embeddings[:12], labels[:12], embeddings[12:], labels[12:])
        alone = calculator.get_accuracy(embeddings, labels, include=("precision_at_1",))
        out = sum(found.values()) + alone["precision_at_1"]
    """,
    "scores of all kinds": """
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        def clusters(x, k):
            return (x[:, 0] > 0).long()
        found = AccuracyCalculator(kmeans_func=clusters).get_accuracy(embeddings, labels)
        out = sum(found.values())
        assert set(found) >= {"NMI", "AMI", "mean_reciprocal_rank", "r_precision", "mean_average_precision"}
    """,
    "a score of one's own": """
        from pytorch_metric_learning.utils import accuracy_calculator
        class YourCalculator(accuracy_calculator.AccuracyCalculator):
            def calculate_precision_at_2(self, knn_labels, query_labels, **kwargs):
                how = self.avg_of_avgs, self.return_per_class, self.label_comparison_fn
                return accuracy_calculator.precision_at_k(knn_labels, query_labels[:, None], 2, *how)
            def requires_knn(self):
                return super().requires_knn() + ["precision_at_2"]
        out = YourCalculator(include=("precision_at_2",)).get_accuracy(embeddings, labels)["precision_at_2"]
    """,
    "a comparison of labels of one's own": """
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        def same_parity(x, y):
            return x % 2 == y % 2
        calculator = AccuracyCalculator(exclude=("NMI", "AMI"), label_comparison_fn=same_parity)
        out = calculator.get_accuracy(embeddings, labels)["r_precision"]
    """,
    "another search": """
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN
        knn_func = CustomKNN(CosineSimilarity(), batch_size=10)
        calculator = AccuracyCalculator(include=("mean_average_precision",), knn_func=knn_func, avg_of_avgs=True)
        out = calculator.get_accuracy(embeddings, labels)["mean_average_precision"]
    """,
    "inference": """
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.inference import InferenceModel, MatchFinder
        finder = MatchFinder(distance=CosineSimilarity(), threshold=0.7)
        inference = InferenceModel(model, match_finder=finder)
        inference.train_knn(dataset)
        inference.add_to_knn(images[:4])
        distances, indices = inference.get_nearest_neighbors(images[:5], k=3)
        out = distances.sum()
        assert inference.is_match(images[:1], images[:1]) is True
        assert inference.get_matches(images).shape == (32, 32)
        assert len(inference.get_matches(images, threshold=0.1, return_tuples=True)[0]) == 2
        inference.save_knn_func(str(folder / "index"))
        inference.load_knn_func(str(folder / "index"))
    """,
    "searches": """
        from pytorch_metric_learning.utils.inference import FaissKMeans, FaissKNN
        distances, indices = FaissKNN()(embeddings[:5], 3, embeddings)
        out = distances.sum() + indices.sum()
        assert len(FaissKMeans(niter=20)(embeddings, 3).unique()) == 3
    """,
    "a tester": """
        from pytorch_metric_learning import testers
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        told = []
        tester = testers.GlobalEmbeddingSpaceTester(
            dataloader_num_workers=0, accuracy_calculator=AccuracyCalculator(include=("precision_at_1",)),
            end_of_testing_hook=lambda tester: told.append(tester.all_accuracies),
        )
        found = tester.test({"train": dataset, "val": dataset}, 1, model, splits_to_eval=[("val", ["train"])])
        out = found["val"]["precision_at_1_level0"]
        embedded, names = tester.get_all_embeddings(dataset, model)
        assert len(told) == 1 and embedded.shape == (32, 8) and names.shape == (32, 1)
    """,
    "a trainer": """
        from pytorch_metric_learning import losses, miners, samplers, trainers
        optimizers = {"trunk_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        trainer = trainers.MetricLossOnly(
            {"trunk": model}, optimizers, 16, {"metric_loss": losses.MultiSimilarityLoss()}, dataset,
            mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()}, iterations_per_epoch=2,
            sampler=samplers.MPerClassSampler(labels, 4, 16, 64), dataloader_num_workers=0, data_device="cpu",
        )
        trainer.train(num_epochs=1)
    """,
    "several processes, but one": """
        from pytorch_metric_learning import losses
        from pytorch_metric_learning.utils import distributed as pml_dist
        loss_func = pml_dist.DistributedLossWrapper(losses.ContrastiveLoss())
        out = loss_func(embeddings, labels)
        assert not pml_dist.is_distributed()
    """,
    "switches": """
        from pytorch_metric_learning.utils import common_functions as c_f
        from pytorch_metric_learning import miners
        c_f.COLLECT_STATS = True
        try:
            miner = miners.PairMarginMiner()
        finally:
            c_f.COLLECT_STATS = False
        miner(embeddings, labels)
        out = miner.pos_pair_dist
    """,
    "data sets": """
        from pytorch_metric_learning.datasets import CUB, Cars196, INaturalist2018, StanfordOnlineProducts
        assert all(hasattr(kind, "DOWNLOAD_URL") or kind for kind in (CUB, Cars196, INaturalist2018))
    """,
    "logging": """
        from pytorch_metric_learning.utils import logging_presets
        assert logging_presets.get_record_keeper and logging_presets.HookContainer
    """,
}

CLASSES = {"num_classes": 4, "embedding_size": 8}
LOSSES = {
    "AngularLoss": {"alpha": 40},
    "ArcFaceLoss": {**CLASSES, "margin": 28.6, "scale": 64},
    "CircleLoss": {"m": 0.4, "gamma": 80},
    "ContrastiveLoss": {"pos_margin": 0, "neg_margin": 1},
    "CosFaceLoss": {**CLASSES, "margin": 0.35, "scale": 64},
    "DynamicSoftMarginLoss": {"min_val": -2.0, "num_bins": 10},
    "FastAPLoss": {"num_bins": 10},
    "GeneralizedLiftedStructureLoss": {"neg_margin": 1, "pos_margin": 0},
    "HistogramLoss": {"n_bins": 10},
    "InstanceLoss": {"gamma": 64},
    "IntraPairVarianceLoss": {"pos_eps": 0.01, "neg_eps": 0.01},
    "LargeMarginSoftmaxLoss": {**CLASSES, "margin": 4, "scale": 1},
    "LiftedStructureLoss": {"neg_margin": 1, "pos_margin": 0},
    "ManifoldLoss": {"l": 8, "K": 5, "lambdaC": 1.0, "alpha": 0.8, "margin": 5e-4},
    "MarginLoss": {"margin": 0.2, "nu": 0, "beta": 1.2, "triplets_per_anchor": "all", "learn_beta": False},
    "MultiSimilarityLoss": {"alpha": 2, "beta": 50, "base": 0.5},
    "NCALoss": {"softmax_scale": 1},
    "NPairsLoss": {},
    "NTXentLoss": {"temperature": 0.07},
    "NormalizedSoftmaxLoss": {**CLASSES, "temperature": 0.05},
    "P2SGradLoss": {"descriptors_dim": 8, "num_classes": 4},
    "PNPLoss": {"b": 2, "alpha": 1, "anneal": 0.01, "variant": "O"},
    "ProxyAnchorLoss": {**CLASSES, "margin": 0.1, "alpha": 32},
    "ProxyNCALoss": {**CLASSES, "softmax_scale": 1},
    "RankedListLoss": {"margin": 1, "Tn": 1, "imbalance": 0.5, "alpha": None, "Tp": 0},
    "SignalToNoiseRatioContrastiveLoss": {"pos_margin": 0, "neg_margin": 1},
    "SmoothAPLoss": {"temperature": 0.01},
    "SoftTripleLoss": {**CLASSES, "centers_per_class": 3, "la": 20, "gamma": 0.1, "margin": 0.01},
    "SphereFaceLoss": {**CLASSES, "margin": 4, "scale": 1},
    "SubCenterArcFaceLoss": {**CLASSES, "margin": 28.6, "scale": 64, "sub_centers": 3},
    "SupConLoss": {"temperature": 0.1},
    "ThresholdConsistentMarginLoss": {"lambda_plus": 1.0, "lambda_minus": 1.0, "margin_plus": 0.9, "margin_minus": 0.5},
    "TripletMarginLoss": {"margin": 0.05, "swap": False, "smooth_loss": False, "triplets_per_anchor": "all"},
    "TupletMarginLoss": {"margin": 5.73, "scale": 64},
}
DRAWN = ("ManifoldLoss", "P2SGradLoss", *(name for name, given in LOSSES.items() if "num_classes" in given))
"""Losses that draw their parameters: only that they run is asked."""
