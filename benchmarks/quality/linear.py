"""3-NN accuracy and fit time of TripletLearner against Euclid, PCA, LDA and scikit-learn's NCA, in one run.

    python benchmarks/quality/linear.py                      all sets, 5 splits: about 20 minutes on one core
    python benchmarks/quality/linear.py --sets wine digits   a minute

Every method gets the same rows, standardized by the training rows, the same number of components, and one thread. Sets:
wine, digits, the synthetic set of 5,000 x 50 with 10 classes, glyph pixels (200 classes of the embedded set), and,
where the folder `shared/data` lies beside the repository, frozen CUB-200-2011 features (50 classes, splits within
classes). On the wide sets NCA works after PCA to 100. Times are CPU seconds of the fit; the clock's are in the JSON.
"worse" marks a mean difference to the better of LDA and NCA whose 95% interval over the splits (Student's t, corrected
for the overlap of training sets after Nadeau and Bengio) lies below zero.

`--scale` fits 20,000 x 50 (gd, sgd, ccp), and 25,000 to 100,000 x 100 (auto) instead, and reports time, peak memory
beyond that before the fit, and the accuracy on 2,000 held-out rows. Both parts write the same files.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is loaded

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import scipy
import sklearn
import torch
from scipy import stats
from sklearn.datasets import load_digits, load_wine, make_classification
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import nearfar as nf
from nearfar.linear import TripletLearner

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMPONENTS = {"wine": 10, "digits": 10, "synthetic": 10, "glyphs": 50, "cub": 49}
WIDE = ("glyphs", "cub")
TEST = 0.3
METHODS = ("Euclid", "PCA", "LDA", "NCA", "TripletLearner")


def synthetic(n, m=50):
    return make_classification(
        n, m, n_informative=10, n_redundant=10, n_classes=10, n_clusters_per_class=2, class_sep=1.5, random_state=0
    )


def glyph_pixels(classes=200):
    split = nf.data.glyphs(progress=False).test
    keep = split.labels < classes
    return split.images[keep].flatten(1).numpy() / 255.0, split.labels[keep].numpy()


def cub_features(classes=50):
    """Frozen features, or None if they are not beside the repository."""
    path = ROOT.parent / "shared" / "data" / "cub200_lite0_test.npz"
    if not path.exists():
        return None
    with np.load(path) as file:
        x, y = file["x"].astype(np.float64), file["y"]
    keep = np.isin(y, np.unique(y)[:classes])
    return x[keep], y[keep]


SETS = {
    "wine": lambda: load_wine(return_X_y=True),
    "digits": lambda: load_digits(return_X_y=True),
    "synthetic": lambda: synthetic(5000),
    "glyphs": glyph_pixels,
    "cub": cub_features,
}


def method(name, data, classes, seed):
    d = COMPONENTS[data]
    if name == "Euclid":
        return FunctionTransformer()
    if name == "PCA":
        return PCA(d, random_state=seed)
    if name == "LDA":
        return LinearDiscriminantAnalysis(n_components=None if d > classes - 1 else d)
    if name == "NCA":
        nca = NeighborhoodComponentsAnalysis(d, random_state=seed)
        return make_pipeline(PCA(100, random_state=seed), nca) if data in WIDE else nca
    return TripletLearner(d, random_state=seed)


def trial(name, data, seed, train, test):
    """3-NN accuracy on the test rows, CPU seconds and seconds by the clock of the fit."""
    estimator = method(name, data, len(np.unique(train[1])), seed)
    clock, cpu = time.perf_counter(), time.process_time()
    estimator.fit(*train)
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    nearest = KNeighborsClassifier(3).fit(estimator.transform(train[0]), train[1])
    return {"accuracy": nearest.score(estimator.transform(test[0]), test[1]), "cpu": cpu, "clock": clock}


def study(data, splits):
    X, y = SETS[data]()
    runs = {name: [] for name in METHODS}
    parts = StratifiedShuffleSplit(splits, test_size=TEST, random_state=0).split(X, y)
    for seed, (train, test) in enumerate(parts):
        scale = StandardScaler().fit(X[train])
        rows = (scale.transform(X[train]), y[train]), (scale.transform(X[test]), y[test])
        for name in METHODS:
            runs[name].append(trial(name, data, seed, *rows))
            print(f"{data:>10} split {seed} {name:<15} {runs[name][-1]}", flush=True)
    return {"rows": len(X), "features": X.shape[1], "classes": len(np.unique(y)), "runs": runs}


def interval(values):
    """Mean and half-width of the 95% interval over splits, widened for training sets that overlap."""
    n = len(values)
    spread = np.std(values, ddof=1) * np.sqrt(1 / n + TEST / (1 - TEST))
    return float(np.mean(values)), float(stats.t.ppf(0.975, n - 1) * spread)


def summarize(result):
    """Means, intervals and median times; the difference to the better of LDA and NCA; NCA's time over ours."""
    accuracy = {name: [run["accuracy"] for run in runs] for name, runs in result["runs"].items()}
    cpu = {name: float(np.median([run["cpu"] for run in runs])) for name, runs in result["runs"].items()}
    best = max(("LDA", "NCA"), key=lambda name: np.mean(accuracy[name]))
    difference = interval(np.subtract(accuracy["TripletLearner"], accuracy[best]))
    return {
        "accuracy": {name: interval(values) for name, values in accuracy.items()},
        "cpu_seconds": cpu,
        "against": best,
        "difference": difference,
        "worse": difference[0] + difference[1] < 0,
        "nca_time_over_ours": cpu["NCA"] / cpu["TripletLearner"],
    }


def table(results):
    head = (
        "| set | rows x features, classes, d | "
        + " | ".join(METHODS)
        + " | ours less the better of LDA, NCA | NCA / ours |"
    )
    lines = [head, "|" + "---|" * (len(METHODS) + 4)]
    for data, result in results.items():
        said = result["summary"]
        cells = [
            f"{said['accuracy'][m][0]:.3f} ± {said['accuracy'][m][1]:.3f} ({said['cpu_seconds'][m]:.2g} s)"
            for m in METHODS
        ]
        shape = f"{result['rows']} x {result['features']}, {result['classes']}, {COMPONENTS[data]}"
        verdict = f"{said['difference'][0]:+.3f} ± {said['difference'][1]:.3f}" + (" worse" if said["worse"] else "")
        lines.append(f"| {data} | {shape} | {' | '.join(cells)} | {verdict} | {said['nca_time_over_ours']:.2g} x |")
    return "\n".join(lines)


def memory(entry, reset=False):
    """VmRSS (held now) or VmHWM (the peak since the last reset) of this process in MB; Linux only."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


def large(plan):
    """One fit of a large problem in a new process, so that its peak memory is its own."""
    torch.set_num_threads(1)
    solver, n, m = plan
    X, y = synthetic(n + 2000, m)
    X = StandardScaler().fit_transform(X)
    TripletLearner(10, solver=solver, max_iter=1).fit(X[:500], y[:500])  # what is loaded once is not counted
    before = memory("VmRSS", reset=True)
    clock, cpu = time.perf_counter(), time.process_time()
    learner = TripletLearner(10, solver=solver, random_state=0).fit(X[:n], y[:n])
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    grown = memory("VmHWM") - before
    Z = learner.transform(X)
    row = {"solver": solver, "rows": n, "features": m, "cpu": cpu, "clock": clock, "peak_growth_mb": grown}
    row |= {"accuracy": KNeighborsClassifier(3).fit(Z[:n], y[:n]).score(Z[n:], y[n:]), "data_mb": X[:n].nbytes / 2**20}
    print(row, flush=True)
    return row


def scale():
    plans = [
        ("gd", 20000, 50),
        ("sgd", 20000, 50),
        ("ccp", 20000, 50),
        *(("auto", n, 100) for n in (25000, 50000, 100000)),
    ]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(large, plans))


def scale_table(rows):
    columns = ("solver", "rows x features", "CPU s", "clock s", "3-NN", "peak of the fit, MB", "rows, MB")
    head = "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"
    body = [
        f"| {r['solver']} | {r['rows']} x {r['features']} | {r['cpu']:.1f} | {r['clock']:.1f} "
        f"| {r['accuracy']:.3f} | {r['peak_growth_mb']:.0f} | {r['data_mb']:.0f} |"
        for r in rows
    ]
    return "\n".join([head, *body])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--scale", action="store_true", help="fit the large problems instead")
    parser.add_argument("--out", type=Path, default=RESULTS / "linear_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"sets": {}, "scale": []}
    report["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "scikit-learn": sklearn.__version__,
    }
    report["config"] = {
        "components": COMPONENTS,
        "test_share": TEST,
        "threads": 1,
        "knn": 3,
        "nca_after_pca_100": list(WIDE),
        "learner": {key: repr(value) for key, value in TripletLearner().get_params().items()},
    }
    if args.scale:
        report["scale"] = scale()
    else:
        for data in args.sets:
            if data == "cub" and cub_features() is None:
                print("cub: skipped, no shared/data beside the repository")
                continue
            report["sets"][data] = study(data, args.splits)
            report["sets"][data]["summary"] = summarize(report["sets"][data])
            write(args.out, report)
    write(args.out, report)


def write(out, report):
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [
        "# Linear learners: 3-NN accuracy and fit time",
        f"One thread, standardized rows, 95% intervals over splits of {1 - TEST:.0%} / {TEST:.0%}, median CPU seconds.",
        versions + ".",
        table(report["sets"]),
    ]
    if report["scale"]:
        parts += ["## Large problems", scale_table(report["scale"])]
    out.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(table(report["sets"]))


if __name__ == "__main__":
    main()
