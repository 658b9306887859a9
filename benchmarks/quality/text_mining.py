"""Mined against random negatives on product offers, and small vectors on CLINC150, with static token vectors on a CPU.

    python benchmarks/quality/text_mining.py DATA WORDLLAMA            all cells that benchmarks/results lack
    python benchmarks/quality/text_mining.py DATA WORDLLAMA --only CLINC150 --cells 2

DATA holds products/ and text/clinc150.json; WORDLLAMA is the folder of the package wordllama (token vectors 32,000 x
256 and their tokenizer). A text is the mean of the vectors of its tokens, which are trained with Adam; its rate .01 was
chosen of 0, .001 and .01 by the validation pairs of Abt-Buy. Three seeds.

**Products** (Abt-Buy, WDC cameras): offers that are linked by positive pairs are one class. Both arms take batches of
`MinedNegatives`, 400 steps of 64 rows (anchor, one of its class, two negatives) with NTXent; only one of them is given
mined negatives (every 50 steps, guard margin 0). R@1: the right offer of each positive test pair among all right offers
of the test. Pair F1: at the threshold that is best on the validation pairs (WDC: the training pairs).

**Small vectors** (CLINC150): 75 intents to learn from and the 75 others to test on; 200 steps of 128 rows with NTXent:
plain, in `Nested` prefixes, with rows quantized to bits. R@1 on every second test text at fewer dimensions, against PCA
of the training vectors; recall@10 of indices of codes, with training texts as queries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import nearfar as nf
from nearfar.batches import MinedNegatives, MPerClass
from nearfar.evaluation import build_index, neighbors
from nearfar.similarity import Quantized, quantize

RESULTS = Path(__file__).parents[1] / "results"
DIMS = (16, 32, 64, 128, 256)
SEEDS = (0, 1, 2)


class Encoder(nn.Module):
    """The mean of token vectors, which start at the published ones; only tokens of the data are held."""

    def __init__(self, home: Path, texts: list[str]) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        super().__init__()
        tokenizer = Tokenizer.from_file(str(next((home / "tokenizers").glob("*.json"))))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        (vectors,) = load_file(next((home / "weights").glob("*_256.safetensors"))).values()
        numbers = [each.ids[:256] or [0] for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
        known, flat = np.unique(np.concatenate(numbers), return_inverse=True)
        ends = np.cumsum([len(each) for each in numbers])
        self.tokens = [torch.from_numpy(part) for part in np.split(flat, ends[:-1])]
        self.bag = nn.EmbeddingBag.from_pretrained(torch.from_numpy(vectors[known]).float(), freeze=False, mode="mean")

    def forward(self, rows: list[int]) -> Tensor:
        """The vectors of some texts, by their numbers."""
        chosen = [self.tokens[row] for row in rows]
        starts = torch.tensor([0, *np.cumsum([len(each) for each in chosen])[:-1]])
        return self.bag(torch.cat(chosen), starts)

    def all(self) -> Tensor:
        """The vectors of all texts."""
        with torch.no_grad():
            return torch.cat(
                [self(list(range(i, min(i + 512, len(self.tokens))))) for i in range(0, len(self.tokens), 512)]
            )


def train(encoder: Encoder, loss: nn.Module, sampler, rows: np.ndarray, y: Tensor, steps: int, mined: bool) -> None:
    """Train; `rows` are the texts of the samples 0, 1, ... of the sampler, `y` their classes."""
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
    step = 0
    while step < steps:
        for batch in sampler:
            if mined and step % sampler.every == 0:
                found = nf.mine(encoder.all()[rows], y, k=sampler.k, ranks=(1, 2 * sampler.k), margin=sampler.margin)
                sampler.update(found.places)
            loss(encoder(rows[batch].tolist()), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == steps:
                break


def read_pairs(path: Path) -> list[tuple[str, str, int]]:
    lines = [line.rstrip("\n").split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    clean = [
        " ".join(part for part in (text.replace("COL", " ").replace("VAL", " ")).split())
        for line in lines
        for text in line[:2]
    ]
    return [(clean[2 * i], clean[2 * i + 1], int(line[2])) for i, line in enumerate(lines)]


def classes_of(pairs: list[tuple[str, str, int]]) -> tuple[list[str], np.ndarray]:
    """The offers of some pairs, and the class of each: offers that positive pairs link."""
    texts = sorted({text for a, b, _ in pairs for text in (a, b)})
    number = {text: i for i, text in enumerate(texts)}
    parent = list(range(len(texts)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for a, b, same in pairs:
        if same:
            parent[root(number[a])] = root(number[b])
    return texts, np.unique([root(i) for i in range(len(texts))], return_inverse=True)[1]


FILES = {
    "Abt-Buy": ("abt_buy_train.txt", "abt_buy_valid.txt", "abt_buy_test.txt"),
    "WDC cameras": ("wdc_cameras_train_medium.txt", "wdc_cameras_train_medium.txt", "wdc_cameras_test.txt"),
}


def products(data: Path, home: Path, name: str, arm: str, seed: int) -> dict[str, float]:
    """R@1 and pair F1 of an arm: "frozen", "random" or "mined"."""
    learn, judge, test = (read_pairs(data / "products" / file) for file in FILES[name])
    texts, y = classes_of(learn)
    every = sorted({text for pairs in (learn, judge, test) for a, b, _ in pairs for text in (a, b)})
    place = {text: i for i, text in enumerate(every)}
    torch.manual_seed(seed)
    encoder = Encoder(home, every)
    if arm != "frozen":
        sampler = MinedNegatives(y, batch_size=64, samples=2, negatives=2, every=50, seed=seed)
        rows = np.array([place[text] for text in texts])
        train(encoder, nf.losses.NTXent(temperature=0.05), sampler, rows, torch.from_numpy(y), 400, arm == "mined")
    x = nn.functional.normalize(encoder.all())
    scores = {id(pairs): np.array([float(x[place[a]] @ x[place[b]]) for a, b, _ in pairs]) for pairs in (judge, test)}
    truth = {id(pairs): np.array([same for *_, same in pairs]) for pairs in (judge, test)}
    limits = np.quantile(scores[id(judge)], np.linspace(0, 1, 401))
    best = max(limits, key=lambda limit: f1(scores[id(judge)] > limit, truth[id(judge)]))
    gallery = sorted({b for _, b, _ in test})
    matched = sorted({(a, b) for a, b, same in test if same})
    near = neighbors(x[[place[a] for a, _ in matched]], x[[place[b] for b in gallery]], k=1).places[:, 0].tolist()
    right = {a: {b for c, b in matched if c == a} for a, _ in matched}
    recall = float(np.mean([gallery[j] in right[a] for (a, _), j in zip(matched, near, strict=True)]))
    return {"recall@1": recall, "pair_f1": f1(scores[id(test)] > best, truth[id(test)])}


def f1(said: np.ndarray, truth: np.ndarray) -> float:
    return float(2 * (said & (truth == 1)).sum() / max(1, said.sum() + (truth == 1).sum()))


def clinc(data: Path, home: Path, arm: str, seed: int) -> dict[str, float]:
    """R@1 on unseen intents at several widths, and with codes: "plain", "nested" or "bits" training."""
    record = json.loads((data / "text" / "clinc150.json").read_text(encoding="utf-8"))
    samples = [pair for part in ("train", "val", "test") for pair in record[part]]
    intents = sorted({intent for _, intent in samples})
    y = torch.tensor([intents.index(intent) for _, intent in samples])
    torch.manual_seed(seed)
    encoder = Encoder(home, [text for text, _ in samples])
    rows = (y < 75).nonzero().flatten().numpy()
    losses = {
        "plain": nf.losses.NTXent(temperature=0.1),
        "nested": nf.Nested(nf.losses.NTXent(temperature=0.1), dims=DIMS),
        "bits": nf.losses.NTXent(temperature=0.1, similarity=Quantized("bits")),
    }
    if arm != "frozen":
        sampler = MPerClass(y[rows], classes=32, samples=4, seed=seed)
        train(encoder, losses[arm], sampler, rows, y[rows], 200, mined=False)
    x = encoder.all()
    test = (y >= 75).nonzero().flatten()[::2]
    found = nf.evaluate(x[test], y[test], ks=(1,), dims=DIMS, resamples=0)
    scores = {f"first {width}": each.recall[1] for width, each in found.curve.items()}
    mean = nn.functional.normalize(x[rows]).mean(dim=0)
    axes = torch.linalg.svd(nn.functional.normalize(x[rows]) - mean, full_matrices=False).Vh
    turned = (nn.functional.normalize(x[test]) - mean) @ axes.T
    for width in DIMS[:-1]:
        scores[f"PCA {width}"] = nf.evaluate(turned[:, :width], y[test], ks=(1,), resamples=0).recall[1]
    for dtype in ("int8", "bits"):
        scores[dtype] = nf.evaluate(quantize(x[test], dtype), y[test], ks=(1,), resamples=0).recall[1]
        with tempfile.TemporaryDirectory() as aside:
            index = build_index(f"{aside}/i", x[test], kind=dtype)
            asked = x[torch.from_numpy(rows[::20])]
            exact = neighbors(asked, x[test], k=10).places.tolist()
            for effort in (1, 4, 8):
                near = index.search(asked, 10, effort=effort).places.tolist()
                hits = [len(set(a) & set(b)) / 10 for a, b in zip(near, exact, strict=True)]
                scores[f"{dtype} index, recall@10 with {effort}k candidates"] = float(np.mean(hits))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("wordllama", type=Path)
    parser.add_argument("--cells", type=int, default=10**6, help="the most cells of this call")
    parser.add_argument("--only", default="", help="cells of this name alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells = {
        f"{name} / {arm} / {seed}": (products, name, arm, seed)
        for name in FILES
        for arm in ("frozen", "random", "mined")
        for seed in (SEEDS if arm != "frozen" else (0,))
    } | {
        f"CLINC150 / {arm} / {seed}": (clinc, arm, seed)
        for arm in ("frozen", "plain", "nested", "bits")
        for seed in (SEEDS if arm != "frozen" else (0,))
    }
    for key, (act, *words) in cells.items():
        path = RESULTS / ("small_vectors.json" if act is clinc else "text_mining.json")
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if key in record or not key.startswith(given.only) or not given.cells:
            continue
        given.cells -= 1
        record[key] = {name: round(value, 4) for name, value in act(given.data, given.wordllama, *words).items()}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(key, record[key], flush=True)


if __name__ == "__main__":
    main()
