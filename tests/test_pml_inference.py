"""Search, inference and testers of nearfar.pml against pytorch-metric-learning 2.9."""

from __future__ import annotations

import pytest
import torch
from needs import need
from pytorch_metric_learning import distances as their_distances
from pytorch_metric_learning import testers as their_testers
from pytorch_metric_learning.utils import inference as theirs
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from nearfar.pml import distances, testers
from nearfar.pml.utils import accuracy_calculator
from nearfar.pml.utils import inference as ours


def rows(count, seed=0, width=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def same(found, want):
    assert found[1].tolist() == want[1].tolist()
    torch.testing.assert_close(found[0], want[0], atol=1e-4, rtol=1e-4)


def test_exact_search_by_the_name_of_faiss():
    faiss = need("faiss")
    x, y = rows(7), rows(20, 1)
    for settings in ({}, {"index_init_fn": faiss.IndexFlatIP}):
        mine, other = ours.FaissKNN(**settings), theirs.FaissKNN(**settings)
        same(mine(x, 3, y), other(x, 3, y))
        same(mine(x, 3, torch.cat([x, y]), True), other(x, 3, torch.cat([x, y]), True))
        assert mine.index is None
        with pytest.raises(ValueError, match="no rows to search; pass reference, or call train first"):
            mine(x, 3)


@pytest.mark.parametrize("init", [None, "IndexFlatL2"])
def test_rows_are_remembered_saved_and_read(init, tmp_path):
    init = init and getattr(need("faiss"), init)
    knn = ours.FaissKNN(reset_before=False, reset_after=False, index_init_fn=init)
    knn.train(rows(9, 2))
    knn.train(rows(4, 3))
    knn.add(rows(5, 4).numpy())
    found = knn(rows(2), 9)
    same(found, ours.FaissKNN()(rows(2), 9, torch.cat([rows(4, 3), rows(5, 4)])))
    knn.save(tmp_path / "rows.npz")
    again = ours.FaissKNN(reset_before=False, index_init_fn=init)
    again.load(tmp_path / "rows.npz")
    same(again(rows(2), 9), found)
    again.reset()
    with pytest.raises(ValueError, match="no rows to save"):
        ours.FaissKNN().save(tmp_path / "none")
    for wrong in (3, []):
        with pytest.raises((TypeError, ValueError), match="gpus must be a list of one or more numbers"):
            ours.FaissKNN(gpus=wrong)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("name", ["LpDistance", "CosineSimilarity"])
def test_search_by_a_distance(name, batch_size):
    x, y = rows(7), rows(20, 1)
    mine = ours.CustomKNN(getattr(distances, name)(), batch_size)
    other = theirs.CustomKNN(getattr(their_distances, name)(), batch_size)
    same(mine(x, 3, y), other(x, 3, y))
    same(mine(y, 3, y, True), other(y, 3, y, True))
    same(ours.CustomKNN(getattr(their_distances, name)(), batch_size)(x, 3, y), other(x, 3, y))


def test_a_row_that_is_not_among_its_own_neighbors_loses_the_last():
    found = torch.tensor([[0, 5, 6], [5, 6, 7]])
    numbers = torch.arange(6.0).view(2, 3)
    for one, other in zip(
        ours.return_results(numbers, found, True), theirs.return_results(numbers, found, True), strict=True
    ):
        assert one.tolist() == other.tolist()


def test_clusters():
    x = torch.cat([rows(10) * 0.1, rows(10, 1) * 0.1 + 9])
    found = ours.FaissKMeans(niter=20, gpu=False, nredo=2)(x, 2)
    assert found[:10].unique().tolist() != found[10:].unique().tolist()
    assert len(found[:10].unique()) == len(found[10:].unique()) == 1
    with pytest.raises(TypeError, match="no option 'n_iter'; did you mean 'niter'"):
        ours.FaissKMeans(n_iter=3)


def test_principal_components_keep_the_distances_of_faiss():
    need("faiss")
    x = rows(40, 5)
    mine, other = ours.run_pca(x, 3), theirs.run_pca(x, 3)
    torch.testing.assert_close(mine @ mine.T, other @ other.T, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="at most 5, the smaller side"):
        ours.run_pca(x, 6)


@pytest.mark.parametrize("name", ["LpDistance", "CosineSimilarity"])
def test_matches(name):
    x, y = rows(6), rows(8, 1)
    mine = ours.MatchFinder(getattr(distances, name)(), threshold=0.9)
    other = theirs.MatchFinder(getattr(their_distances, name)(), threshold=0.9)
    for threshold in (None, 0.1):
        for ref in (None, y):
            assert (mine.get_matching_pairs(x, ref, threshold) == other.get_matching_pairs(x, ref, threshold)).all()
            listed = [f.get_matching_pairs(x, ref, threshold, return_tuples=True) for f in (mine, other)]
            assert [tuple(map(int, pair)) for pair in listed[1]] == listed[0]
        assert (mine.is_match(x, y[:6], threshold) == other.is_match(x, y[:6], threshold)).all()
    assert mine.is_match(x[:1], x[:1]) is True
    with pytest.raises(ValueError, match="there is no threshold"):
        ours.MatchFinder(distances.LpDistance()).get_matching_pairs(x)


def models():
    torch.manual_seed(0)
    trunk, embedder = nn.Linear(5, 8), nn.Linear(8, 4)
    return [library.InferenceModel(trunk, embedder, data_device=torch.device("cpu")) for library in (ours, theirs)]


class Only(Dataset):
    """A data set without labels."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def test_inference(tmp_path):
    need("faiss")
    mine, other = models()
    x, y = rows(9), rows(6, 1)
    torch.testing.assert_close(mine.get_embeddings(x), other.get_embeddings(x))
    torch.testing.assert_close(mine.get_embeddings(list(x)), other.get_embeddings(list(x)))
    for model in (mine, other):
        model.train_knn(x, batch_size=4)
        model.add_to_knn(TensorDataset(y, torch.zeros(6)), batch_size=4)
    same(mine.get_nearest_neighbors(x, k=5), other.get_nearest_neighbors(x, k=5))
    for threshold in (None, 0.5):
        assert (mine.is_match(x[:6], y, threshold) == other.is_match(x[:6], y, threshold)).all()
        assert (mine.get_matches(x, y, threshold) == other.get_matches(x, y, threshold)).all()
    assert mine.get_matches(x[:2], return_tuples=True)[0] == (0, 0)
    mine.save_knn_func(tmp_path / "knn")
    again = models()[0]
    again.load_knn_func(tmp_path / "knn")
    same(again.get_nearest_neighbors(x, k=5), other.get_nearest_neighbors(x, k=5))
    again.train_knn(Only(x))
    assert again.get_nearest_neighbors(x, k=1)[1].flatten().tolist() == list(range(9))
    with pytest.raises(TypeError, match="a tensor, a list or a dataset, but came as str"):
        mine.train_knn("pictures")


def splits():
    labels = torch.stack([torch.arange(12) // 3, torch.arange(12) % 2], dim=1)
    return {"train": TensorDataset(rows(12, 3), labels), "val": TensorDataset(rows(12, 4), labels)}


TESTS = (
    {},
    {"normalize_embeddings": False, "use_trunk_output": True},
    {"label_hierarchy_level": "all"},
    {"label_hierarchy_level": [1]},
    {"label_hierarchy_level": 1, "batch_size": 5},
)


@pytest.mark.parametrize("settings", TESTS, ids=str)
@pytest.mark.parametrize(
    "pairs", [None, [("val", ["train"])], [("val", ["train", "val"]), ("train", ["val"])]], ids=str
)
def test_the_same_scores_of_data_sets(settings, pairs):
    need("faiss")
    torch.manual_seed(0)
    trunk, embedder = nn.Linear(5, 8), nn.Linear(8, 4)
    found, told = [], []
    for library in (testers, their_testers):
        calculator = accuracy_calculator.AccuracyCalculator(include=("precision_at_1", "r_precision"))
        tester = library.GlobalEmbeddingSpaceTester(
            dataloader_num_workers=0,
            accuracy_calculator=calculator,
            data_device=torch.device("cpu"),
            end_of_testing_hook=lambda tester: told.append(
                (dict(tester.all_accuracies), tester.description_suffixes("x"), tester.reference_split_names)
            ),
            **settings,
        )
        asked = pairs and [(query, list(references)) for query, references in pairs]
        found.append(tester.test(splits(), 3, trunk, embedder, splits_to_eval=asked))
    mine, other = found
    assert dict(mine) == {split: pytest.approx(scores) for split, scores in other.items()}
    assert all(scores["epoch"] == 3 and len(scores) > 2 for scores in mine.values())
    assert told[0][1:] == told[1][1:]


def test_all_splits_have_the_same_principal_components():
    """PML gives each split its own, so that queries and references of two splits cannot be compared."""
    need("faiss")
    made = []
    for library in (testers, their_testers):
        calculator = accuracy_calculator.AccuracyCalculator(include=("r_precision",))
        made.append(
            library.GlobalEmbeddingSpaceTester(
                pca=3, dataloader_num_workers=0, accuracy_calculator=calculator, data_device=torch.device("cpu")
            )
        )
    one = {"val": splits()["val"]}
    mine, other = (tester.test(one, 0, nn.Identity())["val"] for tester in made)
    assert mine == pytest.approx(other)
    twice = {"val": one["val"], "same": one["val"]}
    found = made[0].test(twice, 0, nn.Identity(), splits_to_eval=[("val", ["same"])])
    assert made[0].description_suffixes("x").startswith("x_pca3_normalized")
    assert found["val"]["r_precision_level0"] > 1 / 3  # each row finds its copy


def test_a_visualizer_is_shown_every_split():
    class Flat:
        def fit_transform(self, x):
            return x[:, :2]

    seen = []
    tester = testers.GlobalEmbeddingSpaceTester(
        dataloader_num_workers=0,
        visualizer=Flat(),
        visualizer_hook=lambda *told: seen.append(told),
        label_hierarchy_level="all",
        accuracy_calculator=accuracy_calculator.AccuracyCalculator(include=("precision_at_1",)),
        data_device="cpu",
    )
    tester.test(splits(), 7, nn.Identity())
    assert [(told[3], told[4], told[5]) for told in seen] == [
        (split, f"Flat_level{level}", 7) for split in ("train", "val") for level in (0, 1)
    ]
    assert seen[0][1].shape == (12, 2)
    assert seen[0][2].tolist() == [i // 3 for i in range(12)]


def test_embeddings_labels_and_getters():
    data = [{"x": x, "names": (torch.tensor(7 + i), torch.tensor(5 - i))} for i, x in enumerate(rows(4))]
    tester = testers.BaseTester(
        dataloader_num_workers=0,
        batch_size=3,
        data_and_label_getter=lambda sample: (sample["x"], sample["names"]),
        dataset_labels=[[7 + i, 5 - i] for i in range(4)],
        set_min_label_to_zero=True,
        data_device="cpu",
        dtype=torch.float64,
    )
    embeddings, labels = tester.get_all_embeddings(data, nn.Identity(), return_as_numpy=True)
    assert labels.tolist() == [[0, 3], [1, 2], [2, 1], [3, 0]]
    torch.testing.assert_close(torch.from_numpy(embeddings), nn.functional.normalize(rows(4).double()))
    with pytest.raises(TypeError, match="must have a method do_knn_and_accuracies"):
        tester.test({"one": data}, 0, nn.Identity())
    with pytest.raises(ValueError, match="needs dataset_labels"):
        testers.BaseTester(set_min_label_to_zero=True)
    with pytest.raises(ValueError, match="there is no split 'test'; there are train, val"):
        tester.test(splits(), 0, nn.Identity(), splits_to_eval=[("test", ["train"])])
    with pytest.raises(ValueError, match="once in a call"):
        tester.test(splits(), 0, nn.Identity(), splits_to_eval=[("val", ["val"]), ("val", ["train"])])
    wrong = testers.GlobalEmbeddingSpaceTester(label_hierarchy_level=2, dataloader_num_workers=0, data_device="cpu")
    with pytest.raises(ValueError, match="label_hierarchy_level must be below 2"):
        wrong.test(splits(), 0, nn.Identity())
