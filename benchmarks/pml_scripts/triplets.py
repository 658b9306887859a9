"""A training script with pytorch-metric-learning: semi-hard triplets on pictures of characters.

    python benchmarks/pml_scripts/triplets.py          some seconds

benchmarks/speed/pml_scripts.py runs it as it is, and with the import replaced by nearfar.pml.
"""

import argparse
import json
import time

import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nearfar.data._glyphs import few_glyphs


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64)
    )


def train(model, loader, loss_func, mining_func, optimizer):
    """One epoch: CPU seconds of all, and of the miner and the loss alone."""
    model.train()
    start, inside = time.process_time(), 0.0
    for data, labels in loader:
        optimizer.zero_grad()
        embeddings = model(data)
        leaf = embeddings.detach().requires_grad_()
        begun = time.process_time()
        indices_tuple = mining_func(leaf, labels)
        loss = loss_func(leaf, labels, indices_tuple)
        loss.backward()
        inside += time.process_time() - begun
        embeddings.backward(leaf.grad)
        optimizer.step()
    print(f"loss {loss.item():.4f}, mined triplets {mining_func.num_triplets}")
    return time.process_time() - start, inside


def main(epochs=5, batch_size=256, most=100000):
    torch.manual_seed(0)
    data = few_glyphs()
    train_set, test_set = (
        TensorDataset(part.images[:most, None].float() / 255, part.labels[:most]) for part in (data.train, data.test)
    )
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    distance = distances.CosineSimilarity()
    reducer = reducers.ThresholdReducer(low=0)
    loss_func = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducer)
    mining_func = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
    sampler = samplers.MPerClassSampler(train_set.tensors[1], 4, batch_size, len(train_set))
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    taken = [train(model, loader, loss_func, mining_func, optimizer) for _ in range(epochs)]

    model.eval()
    knn = CustomKNN(distances.LpDistance(normalize_embeddings=False))
    calculator = AccuracyCalculator(include=("precision_at_1", "mean_average_precision_at_r"), knn_func=knn)
    start = time.process_time()
    with torch.no_grad():
        scores = calculator.get_accuracy(model(test_set.tensors[0]), test_set.tensors[1])
    took = time.process_time() - start
    training, inside = (sum(column) for column in zip(*(taken[1:] or taken), strict=True))  # the first epoch warms up
    found = {"training": training, "loss and miner": inside, "scores": took}
    print(json.dumps({"seconds": found, "precision_at_1": scores["precision_at_1"]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    main(given.epochs)
