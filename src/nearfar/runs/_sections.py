"""The sections of a configuration: frozen dataclasses, every key with its default and its help text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from nearfar._utils.checks import check_positive, check_seed, check_whole

Tracker = Literal["tensorboard", "wandb", "mlflow"]
AUTO: Final = "auto"  # the value of training.steps for a length that is found on held-out classes


def option(default: Any, doc: str) -> Any:
    """A dataclass field with a default and the help text that `nearfar config` prints beside it."""
    return field(default=default, metadata={"doc": doc})


def later(default: Any, doc: str) -> Any:
    """An `option` that may change when a run is resumed."""
    return field(default=default, metadata={"doc": doc, "later": True})


@dataclass(frozen=True)
class Part:
    """An object chosen by name, with its options: a loss, a sampler, a pair loss inside a loss."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """The data set, how it is loaded and how it is split."""

    name: str | None = option(
        None,
        "glyphs, omniglot, cub, flowers, cars, sop, inshop, folder, manifest, vectors, texts, shards or hf; null: "
        "found from the path, or glyphs without one",
    )
    path: str | None = later(None, "the folder or file; glyphs needs none")
    labels: str | None = option(None, "shards: a suffix, json.KEY or a .csv file; hf: a column; null: the usual one")
    inputs: str | None = option(None, "shards: the suffix of pictures; hf: a column; null: the only one")
    corrections: str | None = option(
        None, "a .csv file of samples to ignore and labels to replace, as nearfar inspect writes it"
    )
    transform: str | None = option(
        None, "none | glyphs | texts | photographs | qi2020 | can2019; null: by the kind of data"
    )
    size: int | None = option(None, "side of the photographs in pixels; null: by the data and the network")
    train_size: int | None = option(
        None, "side in training in pixels; scaled by a flag that sets size alone; null: as in evaluation"
    )
    crop_pct: float | None = option(
        None, "share of a photograph's short side in the center crop of evaluation; null: 0.875"
    )
    max_tokens: int | None = option(None, "texts: the most tokens of one that are read; null: by the network")
    validation: float = option(0.1, "share of the training classes held out to choose the best checkpoint")
    validation_classes: tuple[str, ...] = option(
        (), "patterns of training classes to hold out instead of a share, such as 'U+1E*', 'gull*'"
    )
    min_area: float | None = option(None, "smallest share of a photograph in a training crop; null: the usual one")
    color: float = option(0.0, "how much brightness, contrast and saturation vary in training: 0.2 for a fifth")
    move: float = option(1.0, "how far drawings are shifted, scaled and slanted in training: 2 for twice as far")
    cache: Literal["none", "disk", "memory", "device"] = later(
        "none", "none | disk | memory | device: where photographs are kept after they are decoded once"
    )
    cache_folder: str | None = later(None, "folder of decoded photographs; null: the user's cache folder")
    workers: int = later(0, "number of processes that load pictures")
    on_corrupt: Literal["stop", "skip"] = later("stop", "stop | skip: what to do with a broken picture")
    outside: bool = option(False, "let a manifest or list name files outside its own folder")

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"config: data.validation must be from 0 to below 1, but came as {self.validation}.")
        check_positive("config", "data.workers", self.workers, zero=True)
        check_positive("config", "data.move", self.move, zero=True)
        for name, side in (("size", self.size), ("train_size", self.train_size), ("max_tokens", self.max_tokens)):
            if side is not None:
                check_whole("config", f"data.{name}", side)
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ValueError(f"config: data.crop_pct must be above 0 and at most 1, but came as {self.crop_pct}.")
        for name, value in (("min_area", self.min_area), ("color", self.color)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"config: data.{name} must be from 0 to 1, but came as {value}.")


@dataclass(frozen=True)
class ModelConfig:
    """The network: a trunk, and a head that ends in the embedding."""

    name: str | None = option(
        None,
        "small | linear | mlp | lite0 | timm:NAME | torchvision:NAME | text:static | text:FOLDER; null: by the data",
    )
    query: str | None = option(None, "texts: an encoder of queries alone, text:static or text:FOLDER")
    document: str | None = option(None, "texts: the encoder of documents that belongs to model.query")
    embedding_dim: int | None = option(128, "dimension of the embedding; null: the number of features of the trunk")
    pool: Literal["avg", "max", "both", "gem"] = option(
        "avg", "avg | max | both | gem: how feature maps are pooled to a vector"
    )
    hidden: int | None = option(None, "width of mlp's hidden layer")
    bn_neck: bool = option(False, "a batch norm after the head")
    normalize: bool = option(True, "embeddings of length 1")
    flip: bool = option(False, "outside training: the mean of the embeddings of a picture and its mirror image")
    pretrained: bool = option(True, "start from published weights if the network has any")
    weights: str | None = option(
        None, "a file of weights for the trunk, as published by timm or torchvision; or of token vectors"
    )
    tokenizer: str | None = option(None, "text:static: the tokenizer.json of the token vectors; null: beside them")
    freeze_norms: bool = option(False, "the trunk's batch norms keep their statistics; their affine part still learns")
    group_norms: bool = option(False, "group norms instead of batch norms, so that samples do not affect one another")

    def __post_init__(self) -> None:
        sides = [name for name in (self.query, self.document) if name is not None]
        if sides and (len(sides) == 1 or self.name is not None or not all(name.startswith("text:") for name in sides)):
            raise ValueError(
                "config: model.query and model.document are two encoders of texts in place of model.name, such as "
                f"text:static, but came as {self.query!r}, {self.document!r} and {self.name!r}; name both, or the one."
            )
        for name, width in (("embedding_dim", self.embedding_dim), ("hidden", self.hidden)):
            if width is not None:
                check_whole("config", f"model.{name}", width)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its learning rates and their schedule."""

    name: Literal["adam", "adamw", "sgd"] = option("adam", "adam | adamw | sgd")
    lr: float = later(1e-3, "learning rate of the trunk")
    head_lr_mult: float = later(1.0, "learning rate of the head, as a multiple of lr (10 in the papers)")
    loss_lr_mult: float = later(
        10.0, "learning rate of the loss's parameters (thresholds, proxies), as a multiple of lr"
    )
    betas: tuple[float, float] = later((0.9, 0.999), "of adam and adamw; Can et al. 2019 used .9, .99")
    momentum: float = later(0.9, "of sgd")
    weight_decay: float = later(0.0, "only on parameters of two or more dimensions")
    warmup: int = later(0, "steps in which the learning rate grows from 0")
    schedule: Literal["constant", "cosine", "stable"] = later(
        "cosine", "after the warm-up: constant | cosine | stable: constant, and linear to 0 in the last quarter"
    )
    max_grad_norm: float | None = later(None, "clip the gradient to this norm; null: no clipping")
    proximal: float = option(0.0, "weight of the proximal term toward the last projection (Can et al. 2019: 1e-3)")

    def __post_init__(self) -> None:
        for name in ("lr", "head_lr_mult", "loss_lr_mult", "momentum", "weight_decay", "warmup", "proximal"):
            check_positive("config", f"optimizer.{name}", getattr(self, name), zero=name != "lr")
        if self.max_grad_norm is not None:
            check_positive("config", "optimizer.max_grad_norm", self.max_grad_norm)


@dataclass(frozen=True)
class TrainingConfig:
    """Length, seed and precision of a run, and how often it is evaluated, saved and diagnosed."""

    steps: int | Literal["auto"] = later(
        1000, "number of batches; auto: found on held-out classes, then all are learned"
    )
    seed: int = option(0, "seed of weights, batches and augmentation")
    precision: Literal["float32", "bf16", "fp16", "float64"] = option(
        "float32", "float32 | bf16 | fp16: mixed precision | float64: everything in it"
    )
    average: float = option(0.0, "decay of a moving average of the weights, which is scored and saved; 0: none")
    compile: Literal["none", "kernels", "graphs"] = later(
        "none", "none | kernels: compile the trunk, a minute at the first step | graphs: and replay them on a GPU"
    )
    shard: bool = option(False, "split weights, gradients and optimizer state over the processes (FSDP2)")
    chunk: int | None = later(None, "samples that the network processes at a time; same gradient as the whole batch")
    cross_batch_memory: int = option(0, "rows of past batches to compare with, too; 0: none")
    cross_batch_memory_warmup: int = option(0, "steps before the memory is used")
    threads: int | None = later(None, "CPU threads; null: torch's default")
    evaluate_every: int = later(200, "steps between evaluations")
    checkpoint_every: int = later(200, "steps between checkpoints")
    explain_every: int = later(50, "steps between records of the pair weights; 0: never")
    diagnose_every: int | None = later(None, "steps between checks by the doctor; null: thirty checks a run; 0: never")
    baselines: bool = later(True, "also score the untrained network, and vectors as they are, on the test classes")
    max_positive_distance: float = later(0.6, "positive pairs at a larger distance violate their constraint")
    min_negative_distance: float = later(1.2, "negative pairs at a smaller distance violate theirs")
    protocol: Literal["validation", "paper"] = option(
        "validation", "validation: choose by held-out classes, test once | paper: report the best test score"
    )
    trackers: tuple[Tracker, ...] = later(
        (), "any of tensorboard, wandb, mlflow: trackers of the scalars besides the journal"
    )

    def __post_init__(self) -> None:
        check_seed("config", self.seed, "training.seed")
        for name in ("steps", "evaluate_every", "checkpoint_every")[self.steps == AUTO :]:
            check_whole("config", f"training.{name}", getattr(self, name))
        if self.steps == AUTO and self.protocol == "paper":
            raise ValueError(
                "config: training.steps auto holds training classes out, which training.protocol paper does not; give "
                "a number of steps."
            )
        for name, value in (("chunk", self.chunk), ("threads", self.threads)):
            if value is not None:
                check_whole("config", f"training.{name}", value)
        for name, used in (
            ("average", self.average > 0),
            ("compile", self.compile != "none"),
            ("precision: fp16", self.precision == "fp16"),
        ):
            if self.shard and used:
                raise ValueError(
                    f"config: training.shard splits the weights, which training.{name} needs whole; leave one of them "
                    "out."
                )
        if not 0 <= self.average < 1:
            raise ValueError(f"config: training.average must be from 0 to below 1, but came as {self.average}.")
        positive = "explain_every max_positive_distance min_negative_distance"
        for name in (*positive.split(), "cross_batch_memory", "cross_batch_memory_warmup"):
            check_positive("config", f"training.{name}", getattr(self, name), zero=True)
        check_positive("config", "training.diagnose_every", self.diagnose_every or 0, zero=True)

    @property
    def length(self) -> int:
        """The number of steps; an error while it is still to be found."""
        if self.steps == AUTO:
            raise ValueError("config: training.steps auto is no number yet; `nearfar train` finds it, or give one.")
        return self.steps


LOSS = Part("NTXent", MappingProxyType({"temperature": 0.07}))
"""Of 24 losses tuned alike it has the best mean rank on two sets of photographs (benchmarks/RESULTS-photographs.md)."""
BATCHES = Part("MPerClass", MappingProxyType({"classes": None, "samples": 4}))


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: Part = field(default=LOSS, metadata={"doc": "any of `nearfar losses`, with its arguments"})
    batches: Part = field(
        default=BATCHES,
        metadata={"doc": "MPerClass | MinedNegatives | Representatives | QueryPairs; classes null: 32, or all"},
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
