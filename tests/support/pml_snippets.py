"""What pages about pytorch-metric-learning 2.9 show, as short scripts of our own: tests/pml/test_snippets.py runs each.

A script finds `embeddings` [32, 8], `labels` (8 of each of 4 classes), `images` [32, 5], a `model`, a `dataset` and a
`folder`. What it leaves as `out` must be the same number with both libraries.
"""

from __future__ import annotations

START = {
    "first loss": """
        from pytorch_metric_learning import losses
        loss_func = losses.TripletMarginLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for data, names in torch.utils.data.DataLoader(dataset, batch_size=16):
            optimizer.zero_grad()
            loss = loss_func(model(data), names)
            loss.backward()
            optimizer.step()
        out = loss
    """,
    "loss and miner": """
        from pytorch_metric_learning import miners, losses
        miner = miners.MultiSimilarityMiner()
        loss_func = losses.TripletMarginLoss()
        hard_pairs = miner(embeddings, labels)
        out = loss_func(embeddings, labels, hard_pairs)
    """,
    "distance, reducer and regularizer": """
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.reducers import ThresholdReducer
        from pytorch_metric_learning.regularizers import LpRegularizer
        from pytorch_metric_learning import losses
        loss_func = losses.TripletMarginLoss(
            distance=CosineSimilarity(), reducer=ThresholdReducer(high=0.3), embedding_regularizer=LpRegularizer()
        )
        out = loss_func(embeddings, labels)
    """,
    "two views without labels": """
        from pytorch_metric_learning.losses import SelfSupervisedLoss, TripletMarginLoss
        loss_func = SelfSupervisedLoss(TripletMarginLoss())
        out = loss_func(embeddings, embeddings + 0.3 * images[:, :1])
    """,
    "two views by hand": """
        from pytorch_metric_learning.losses import NTXentLoss
        both = torch.cat([embeddings, embeddings.flip(1)])
        names = torch.arange(len(embeddings)).repeat(2)
        out = NTXentLoss(temperature=0.1)(both, names)
    """,
    "a reference": """
        from pytorch_metric_learning import losses
        out = losses.ContrastiveLoss()(embeddings[:16], labels[:16], ref_emb=embeddings[16:], ref_labels=labels[16:])
    """,
    "pairs that are known": """
        from pytorch_metric_learning import losses
        pairs = torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([0, 1]), torch.tensor([20, 30])
        out = losses.ContrastiveLoss()(embeddings, indices_tuple=pairs)
    """,
    "several losses": """
        from pytorch_metric_learning import losses, miners
        loss_func = losses.MultipleLosses([losses.ContrastiveLoss(), losses.NTXentLoss()], weights=[1, 0.5])
        named = losses.MultipleLosses(
            {"a": losses.TripletMarginLoss(), "b": losses.ContrastiveLoss()}, miners={"a": miners.BatchHardMiner()}
        )
        out = loss_func(embeddings, labels) + named(embeddings, labels)
    """,
    "a memory": """
        from pytorch_metric_learning import losses, miners
        loss_func = losses.CrossBatchMemory(losses.NTXentLoss(), 8, memory_size=64, miner=miners.MultiSimilarityMiner())
        for i in range(0, 32, 8):
            out = loss_func(embeddings[i : i + 8], labels[i : i + 8])
        loss_func.reset_queue()
    """,
    "two views and a memory": """
        from pytorch_metric_learning import losses
        loss_func = losses.CrossBatchMemory(losses.NTXentLoss(), 8, memory_size=128)
        both, names = torch.cat([embeddings, embeddings.flip(1)]), torch.arange(32).repeat(2)
        mask = torch.zeros(64, dtype=torch.bool)
        mask[32:] = True
        out = loss_func(both, names, enqueue_mask=mask)
    """,
    "class vectors and their optimizer": """
        from pytorch_metric_learning import losses
        loss_func = losses.ArcFaceLoss(num_classes=4, embedding_size=8)
        optimizer = torch.optim.SGD(loss_func.parameters(), lr=0.01)
        loss_func(embeddings, labels).backward()
        optimizer.step()
        assert loss_func.get_logits(embeddings).shape == (32, 4)
    """,
    "weights of class vectors": """
        from pytorch_metric_learning import losses, regularizers
        from pytorch_metric_learning.utils import common_functions as c_f
        loss_func = losses.ArcFaceLoss(
            4, 8, weight_regularizer=regularizers.RegularFaceRegularizer(),
            weight_init_func=c_f.TorchInitWrapper(torch.nn.init.kaiming_uniform_, a=1),
        )
        loss_func(embeddings, labels)
    """,
}

OWN = {
    "a loss of one's own": """
        from pytorch_metric_learning.losses import BaseMetricLossFunction
        class BarebonesLoss(BaseMetricLossFunction):
            def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
                loss = (embeddings.norm(dim=1) - 1) ** 2
                return {"loss": {"losses": loss, "indices": torch.arange(len(loss)), "reduction_type": "element"}}
        out = BarebonesLoss()(embeddings, labels)
    """,
    "a loss of pairs of one's own": """
        from pytorch_metric_learning.losses import BaseMetricLossFunction
        from pytorch_metric_learning.reducers import AvgNonZeroReducer
        from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
        class Pairs(BaseMetricLossFunction):
            def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
                a1, p, a2, n = lmu.convert_to_pairs(indices_tuple, labels, ref_labels)
                mat = self.distance(embeddings, ref_emb)
                return {
                    "pos_loss": {"losses": mat[a1, p], "indices": (a1, p), "reduction_type": "pos_pair"},
                    "neg_loss": {"losses": (1 - mat[a2, n]).relu(), "indices": (a2, n), "reduction_type": "neg_pair"},
                }
            def _sub_loss_names(self):
                return ["pos_loss", "neg_loss"]
            def get_default_reducer(self):
                return AvgNonZeroReducer()
        out = Pairs()(embeddings, labels)
    """,
    "a miner of one's own": """
        from pytorch_metric_learning.miners import BaseMiner
        from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
        from pytorch_metric_learning import losses
        class ExampleTripletMiner(BaseMiner):
            def __init__(self, margin=0.1, **kwargs):
                super().__init__(**kwargs)
                self.margin = margin
            def mine(self, embeddings, labels, ref_emb, ref_labels):
                mat = self.distance(embeddings, ref_emb)
                a, p, n = lmu.get_all_triplets_indices(labels, ref_labels)
                margin = mat[a, n] - mat[a, p]
                kept = margin <= self.margin
                return a[kept], p[kept], n[kept]
        found = ExampleTripletMiner()(embeddings, labels)
        out = losses.TripletMarginLoss()(embeddings, labels, found)
    """,
    "a distance of one's own": """
        from pytorch_metric_learning.distances import BaseDistance
        from pytorch_metric_learning import losses, miners
        class Manhattan(BaseDistance):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                assert not self.is_inverted
            def compute_mat(self, query_emb, ref_emb):
                return (query_emb[:, None] - ref_emb[None]).abs().sum(dim=2)
            def pairwise_distance(self, query_emb, ref_emb):
                return (query_emb - ref_emb).abs().sum(dim=1)
        distance = Manhattan(normalize_embeddings=False)
        found = miners.BatchHardMiner(distance=distance)(embeddings, labels)
        out = losses.TripletMarginLoss(distance=distance)(embeddings, labels, found) + distance(embeddings).mean()
    """,
    "a reducer of one's own": """
        from pytorch_metric_learning.reducers import BaseReducer
        from pytorch_metric_learning import losses
        class Half(BaseReducer):
            def element_reduction(self, losses, loss_indices, embeddings, labels):
                return losses.sum() / 2
            def pos_pair_reduction(self, losses, loss_indices, embeddings, labels):
                return losses.sum() / 2
            def neg_pair_reduction(self, losses, loss_indices, embeddings, labels):
                return losses.sum() / 2
            def triplet_reduction(self, losses, loss_indices, embeddings, labels):
                return losses.sum() / 2
        out = losses.ContrastiveLoss(reducer=Half())(embeddings, labels)
    """,
    "a regularizer of one's own": """
        from pytorch_metric_learning.regularizers import BaseRegularizer
        from pytorch_metric_learning import losses
        class Long(BaseRegularizer):
            def compute_loss(self, x):
                long = x.abs().max(dim=1).values
                return {"loss": {"losses": long, "indices": torch.arange(len(x)), "reduction_type": "element"}}
        out = losses.ContrastiveLoss(embedding_regularizer=Long())(embeddings, labels)
    """,
}

PARTS = {
    "distances": """
        from pytorch_metric_learning.distances import BatchedDistance, CosineSimilarity, LpDistance, SNRDistance
        distance = LpDistance(normalize_embeddings=False, p=1, power=2)
        seen = []
        batched = BatchedDistance(CosineSimilarity(), lambda mat, s, e: seen.append(mat.sum()), batch_size=10)
        batched(embeddings, embeddings)
        out = distance(embeddings).mean() + SNRDistance()(embeddings, images @ torch.ones(5, 8)).mean() + sum(seen)
        assert distance.margin(3, 1) == 2 and CosineSimilarity().margin(3, 1) == -2
        out = out + distance.pairwise_distance(embeddings[:4], embeddings[4:8]).mean()
    """,
    "distance of larger means nearer": """
        from pytorch_metric_learning.distances import DotProductSimilarity
        from pytorch_metric_learning.losses import ContrastiveLoss
        out = ContrastiveLoss(pos_margin=1, neg_margin=0, distance=DotProductSimilarity())(embeddings, labels)
    """,
    "reducers": """
        from pytorch_metric_learning import losses, reducers
        both = reducers.MultipleReducers(
            {"pos_loss": reducers.ThresholdReducer(low=0.1), "neg_loss": reducers.MeanReducer()}
        )
        out = losses.ContrastiveLoss(reducer=both)(embeddings, labels)
        per_class = reducers.ClassWeightedReducer(torch.arange(4.0))
        out = out + losses.TripletMarginLoss(reducer=per_class)(embeddings, labels)
        out = out + losses.ContrastiveLoss(reducer=reducers.PerAnchorReducer())(embeddings, labels)
        parts = losses.ContrastiveLoss(reducer=reducers.DoNothingReducer())(embeddings, labels)
        assert {"pos_loss", "neg_loss"} <= set(parts)
    """,
    "all miners": """
        from pytorch_metric_learning import losses, miners
        out = 0
        for miner in (
            miners.AngularMiner(angle=20), miners.BatchHardMiner(), miners.MultiSimilarityMiner(epsilon=0.1),
            miners.BatchEasyHardMiner(pos_strategy=miners.BatchEasyHardMiner.EASY, neg_strategy="semihard"),
            miners.PairMarginMiner(pos_margin=0.2, neg_margin=0.8), miners.TripletMarginMiner(0.2, "semihard"),
        ):
            out = out + losses.TripletMarginLoss()(embeddings, labels, miner(embeddings, labels))
        for miner in (miners.DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.4), miners.HDCMiner(0.5)):
            assert torch.isfinite(losses.ContrastiveLoss()(embeddings, labels, miner(embeddings, labels)))
    """,
    "statistics": """
        from pytorch_metric_learning import miners
        miner = miners.TripletMarginMiner(collect_stats=True)
        miner(embeddings, labels)
        out = miner.num_triplets + miner.pos_pair_dist + miner.avg_triplet_margin
    """,
    "packaged triplets": """
        from pytorch_metric_learning import losses, miners, samplers
        np.random.seed(0)
        sampler = samplers.FixedSetOfTriplets(labels, num_triplets=30)
        loader = torch.utils.data.DataLoader(dataset, batch_size=15, sampler=sampler)
        miner, loss_func = miners.EmbeddingsAlreadyPackagedAsTriplets(), losses.TripletMarginLoss()
        for data, names in loader:
            embedded = model(data)
            out = loss_func(embedded, names, miner(embedded, names))
    """,
    "samplers": """
        from pytorch_metric_learning import miners, samplers
        sampler = samplers.MPerClassSampler(labels, m=4, batch_size=16, length_before_new_iter=len(labels))
        for data, names in torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler):
            assert len(data) == 16 and names.bincount().max() == 4
        tree = torch.stack([labels, labels // 2], dim=1)
        batches = samplers.HierarchicalSampler(tree, batch_size=8, samples_per_class=4)
        assert len(list(torch.utils.data.DataLoader(dataset, batch_sampler=batches))) == len(batches)
        hard = samplers.TuplesToWeightsSampler(model, miners.TripletMarginMiner(), dataset, dataloader_num_workers=0)
        assert len(list(hard)) == 32
    """,
    "regularizers": """
        from pytorch_metric_learning import losses, regularizers as r
        out = 0
        for regularizer in (r.CenterInvariantRegularizer(), r.LpRegularizer(p=1), r.ZeroMeanRegularizer()):
            loss_func = losses.ContrastiveLoss(embedding_regularizer=regularizer, embedding_reg_weight=0.1)
            out = out + loss_func(embeddings, labels)
        soft = losses.SoftTripleLoss(
            4, 8, centers_per_class=3, weight_regularizer=r.SparseCentersRegularizer(4, 3), weight_reg_weight=0.2
        )
        soft(embeddings, labels)
    """,
}
