"""The runs of the doctor's benchmark: healthy ones, runs made to collapse in five ways, mining at two batch sizes."""

from __future__ import annotations

import itertools

from doctor_runs import Trial

DATA = ("glyphs", "omniglot", "cub")
KINDS = ("rate", "margin", "noise", "tiny", "decay")
STEPS, SHORT = 600, 300
HARD = {"name": "Triplet", "mining": "hard", "margin": 0.2}
HARDEST = HARD | {"mining": "hardest"}
SEMIHARD = HARD | {"mining": "semihard"}
PLAIN = {"margin": 0.0}
MULTI, TOP_K = {"name": "MultiSimilarity"}, {"name": "DroTopK", "k": 160}
SUPCON, CONTRASTIVE, ALL = {"name": "SupCon"}, {"name": "Contrastive"}, {"name": "Triplet", "margin": 0.2}
MLP = {"name": "mlp", "hidden": 256, "width": 64}
USUAL = {"glyphs": {"name": "small", "width": 64}, "omniglot": {"name": "small", "width": 64}}
USUAL["cub"] = {"name": "linear", "width": 64}


def adam(rate, **more):
    return {"name": "adam", "lr": rate, "schedule": "constant"} | more


def sgd(rate, **more):
    return adam(rate, name="sgd", **more)


MADE = (  # kind, word, loss, optimizer, networks: u the usual one of the data, m a network of one hidden layer
    ("rate", "hardest, adam .3", HARDEST, adam(0.3), "u"),
    ("rate", "hardest, adam 1", HARDEST, adam(1.0), "u"),
    ("rate", "hard, sgd 1", HARD, sgd(1.0), "um"),
    ("rate", "hard, sgd 10", HARD, sgd(10.0), "um"),
    ("rate", "hardest, sgd 3", HARDEST, sgd(3.0), "um"),
    ("margin", "hard, sgd 3", HARD | PLAIN, sgd(3.0), "um"),
    ("margin", "hardest, adam .3", HARDEST | PLAIN, adam(0.3), "um"),
    ("margin", "hardest, sgd 3", HARDEST | PLAIN, sgd(3.0), "m"),
    ("noise", "hard, adam .001", HARD, adam(1e-3), "um"),
    ("noise", "hard, sgd 3", HARD, sgd(3.0), "um"),
    ("noise", "hardest, adam .3", HARDEST, adam(0.3), "u"),
    ("tiny", "hard, adam .1", HARD, adam(0.1), "um"),
    ("tiny", "hard, sgd 3", HARD, sgd(3.0), "um"),
    ("tiny", "hardest, adam .3", HARDEST, adam(0.3), "u"),
    ("decay", "multi, adam .01, 10", MULTI, adam(0.01, weight_decay=10.0), "um"),
    ("decay", "multi, sgd 1, .5", MULTI, sgd(1.0, weight_decay=0.5), "um"),
    ("decay", "semihard, adam .03, 1", SEMIHARD, adam(0.03, weight_decay=1.0), "um"),
    ("decay", "topk, adamw .1, 10", TOP_K, adam(0.1, name="adamw", weight_decay=10.0), "um"),
)
SOUND = (  # word, loss, optimizer, networks, batch, share of wrong labels
    ("semihard", SEMIHARD, adam(1e-3), "um", (32, 4), 0.0),
    ("multi", MULTI, adam(1e-3), "um", (32, 4), 0.0),
    ("contrastive", CONTRASTIVE, adam(1e-3), "um", (32, 4), 0.0),
    ("supcon", SUPCON, adam(1e-3), "um", (32, 4), 0.0),
    ("hard, slow", HARD, adam(3e-4), "um", (32, 4), 0.0),
    ("topk", TOP_K, adam(1e-3), "u", (32, 4), 0.0),
    ("all triplets", ALL, adam(3e-3), "u", (32, 4), 0.0),
    ("hard, annealed", HARD | {"anneal": STEPS // 2}, adam(1e-3), "u", (32, 4), 0.0),
    ("multi, sgd, decay", MULTI, sgd(0.03, weight_decay=1e-4), "u", (32, 4), 0.0),
    ("multi, small batch", MULTI, adam(1e-3), "u", (8, 4), 0.0),
    ("semihard, 20% wrong", SEMIHARD, adam(1e-3), "u", (32, 4), 0.2),
)


def tree(loss, optimizer, model, *, batch=(32, 4), seed=0, steps=STEPS, **more):
    return {
        "model": model,
        "loss": loss,
        "batches": {"name": "MPerClass", "classes": batch[0], "samples": batch[1]},
        "optimizer": optimizer,
        "training": {"steps": steps, "seed": seed},
    } | more


def network(data, letter):
    return USUAL[data] if letter == "u" else MLP


def calibration(seed=0):
    """Every setting once."""
    for data in DATA:
        for kind, word, loss, optimizer, letters in MADE:
            batch, wrong = (2, 2) if kind == "tiny" else (32, 4), 0.5 if kind == "noise" else 0.0
            for letter in letters:
                model = network(data, letter)
                name = f"{data}, {model['name']}, {kind}: {word}"
                yield Trial(name, data, tree(loss, optimizer, model, batch=batch, seed=seed), kind, wrong)
        for word, loss, optimizer, letters, batch, wrong in SOUND:
            for letter in letters:
                model = network(data, letter)
                name = f"{data}, {model['name']}, sound: {word}"
                yield Trial(name, data, tree(loss, optimizer, model, batch=batch, seed=seed), "sound", wrong)


def again():
    """Every setting of the calibration with another seed."""
    return calibration(seed=7)


def largest():
    """What of `mining` needs a loss of its own: one triplet out of a batch of 1,800 is sought among 6 billion."""
    for trial in mining():
        if trial.about["rows"] > 1000 and trial.about["mining"] == "hardest":
            yield trial


def mining():
    """Batch-hard and hardest mining on glyphs: rows of a batch, dimensions, margin, three seeds."""
    for seed in (0, 1, 2):
        for classes, width, margin, how in itertools.product(
            (18, 450), (2, 8, 32, 128), (0.0, 0.2), ("hard", "hardest")
        ):
            about = {"rows": 4 * classes, "width": width, "margin": margin, "mining": how, "seed": seed}
            model = {"name": "small", "width": width}
            loss = HARD | {"mining": how, "margin": margin}
            if how == "hardest" and classes > 100:
                loss = {"name": "HardestOfMany", "margin": margin}
            run = tree(loss, adam(1e-3), model, batch=(classes, 4), seed=seed, steps=SHORT, data={"transform": "none"})
            yield Trial(
                f"glyphs, {how}, N {4 * classes}, n {width}, margin {margin}", "glyphs", run, "mining", 0.0, about
            )


def softened():
    """Hard mining as it is, annealed, and semi-hard, at two rates, on three data sets, three seeds."""
    for seed, data, rate in itertools.product((0, 1, 2), DATA, (0.03, 0.3)):
        arms = {"hard": HARD, "hardest": HARDEST, "semihard": SEMIHARD}
        arms |= {f"{name}, annealed": arms[name] | {"anneal": STEPS // 2} for name in ("hard", "hardest")}
        for arm, loss in arms.items():
            about = {"arm": arm, "rate": rate, "seed": seed}
            run = tree(loss, adam(rate), USUAL[data], seed=seed)
            yield Trial(f"{data}, {arm}, rate {rate}, seed {seed}", data, run, "softened", 0.0, about)


def rescue(names):
    """The named settings of the calibration, seeds 1 to 3; each job trains the ill run, then the doctor's remedy."""
    for seed in (1, 2, 3):
        for trial in calibration(seed):
            if trial.name in names:
                yield Trial(
                    f"{trial.name}, seed {seed}",
                    trial.data,
                    trial.tree,
                    trial.kind,
                    trial.wrong,
                    {"setting": trial.name, "seed": seed, "rescue": True},
                )


def prevented():
    """Settings in which plain hard mining collapses by the truth: as they are, annealed, and semi-hard, three seeds."""
    settings = {
        "omniglot, mlp, adam .0003": ("omniglot", MLP, adam(3e-4), (32, 4), 0.0),
        "cub, mlp, half of the labels wrong": ("cub", MLP, adam(1e-3), (32, 4), 0.5),
        "cub, linear, batches of 4, sgd 3": ("cub", USUAL["cub"], sgd(3.0), (2, 2), 0.0),
    }
    arms = {"hard": HARD, "hard, annealed": HARD | {"anneal": STEPS // 2}, "semihard": SEMIHARD}
    for seed, (name, (data, model, optimizer, batch, wrong)) in itertools.product((0, 1, 2), settings.items()):
        for arm, loss in arms.items():
            about = {"arm": arm, "setting": name, "seed": seed}
            run = tree(loss, optimizer, model, batch=batch, seed=seed)
            yield Trial(f"{name}, {arm}, seed {seed}", data, run, "prevented", wrong, about)
