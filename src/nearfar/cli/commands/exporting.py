"""`nearfar export`: write a network as ONNX, its weights, or a folder of sentence-transformers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nearfar._utils.checks import check_choice
from nearfar._utils.console import say
from nearfar._utils.files import plain_target
from nearfar._utils.progress import Progress
from nearfar.cli.commands.command import check_suffix, parse_numbers
from nearfar.cli.commands.embedding import Trust

FORMATS = {".onnx": "a graph", ".safetensors": "weights", "": "a folder of sentence-transformers"}


def export(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL", help="A run folder, a .safetensors or a torch.export .pt2 file.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write, or, for texts, a folder.")],
    kind: Annotated[
        str | None, typer.Option("--format", help="Format: onnx or safetensors. Default: by the suffix of the output.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of a sample, such as 3,224,224, if the model holds no example.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest allowed difference, relative to the largest entry.")
    ] = 1e-4,
    seed: Annotated[int, typer.Option(help="Seed of the random batches that are compared.")] = 0,
    trust_model: Trust = False,
) -> None:
    """Write a model as ONNX (.onnx), its weights (.safetensors), or a network of texts as a folder.

    An ONNX graph runs without nearfar and takes batches of any size. Random batches are first compared in onnxruntime:
    if the vectors differ, no file is written.

    For a run, standardization is part of the graph, which takes photographs as uint8 in 0..255. Size and crop are in
    the metadata, where `nearfar embed` reads them.

    A .safetensors file holds the weights, and what nearfar.models.load needs to build the network again.

    A folder is for networks of texts, and is what SentenceTransformer(FOLDER) reads.
    """
    import torch

    from nearfar.cli.commands.networks import load_model
    from nearfar.evaluation import export_onnx

    plain_target(output)
    if kind is not None:
        check_choice("export", "--format", kind, [end.removeprefix(".") for end in FORMATS if end])
    check_suffix("--output", output, FORMATS if kind is None else {f".{kind}": FORMATS[f".{kind}"]})
    if output.suffix in AS_IT_IS:
        say(AS_IT_IS[output.suffix](model, output))
        return
    network = load_model(model, trust_model=trust_model)
    if network.module is None:
        raise ValueError(f"{model} cannot be exported again; name a run folder or a torch.export (.pt2) file.")
    if getattr(network.module, "transform", None) is not None:
        raise ValueError(
            f"{model} reads texts, whose tokenizer no graph can hold; name a folder or a .safetensors file."
        )
    example = network.example if shape is None else torch.randn(2, *parse_numbers("--shape", shape))
    if example is None:
        raise ValueError(f"{model} holds no example; give the shape of a sample, such as --shape 3,224,224.")
    with Progress("exporting and comparing"):
        options: dict[str, Any] = {"transform": network.transform, "tolerance": tolerance, "seed": seed}
        written = export_onnx(network.module, example, output, **options)
    say(str(written))


def _as_weights(model: Path, output: Path) -> str:
    """Write a .safetensors file that `models.load` reads; returns a description of its contents."""
    from nearfar.models.saved import read

    saved = read(model)
    saved.save(output)
    network, count = saved.network, sum(p.numel() for p in saved.model.parameters())
    shape = " x ".join(map(str, network.inputs))
    return f"{output}: {network.name} on {shape}, {saved.model.embedding_dim} dimensions, {count:,} parameters"


def _as_folder(model: Path, output: Path) -> str:
    """Write the folders that `SentenceTransformer` reads."""
    from nearfar.models.saved import read
    from nearfar.models.sentence_folder import write_folder

    return "\n".join(f"{folder}: for SentenceTransformer" for folder in write_folder(read(model).model, output))


AS_IT_IS = {".safetensors": _as_weights, "": _as_folder}
"""Formats that hold the network itself, by the suffix of the output."""
