"""Folders of sentence-transformers: read an encoder from one, and write a trained network as one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from nearfar._utils.checks import printable
from nearfar._utils.extras import need
from nearfar._utils.files import first_line, write_text
from nearfar.data._tokens import LENGTH, read_tokenizer
from nearfar.models.embedder import Embedder
from nearfar.models.text import About, Static, TextTrunk, Transformer, Two, read_vectors, static_about

__all__ = ["read_folder", "write_folder"]

BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
"""Files of a tokenizer that other packages read beside tokenizer.json."""
PREFIX = "sentence_transformers.models."
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_lasttoken": "lasttoken"}
"""Switches of older pooling files; without any of them the mean is taken."""


def read_folder(folder: Path, length: int | None = None, pretrained: bool = True) -> TextTrunk:
    """The encoder of a folder of sentence-transformers, transformers or model2vec; no code in it is run.

    Pooling is the mean unless the folder says otherwise. Whether vectors are normalized, the network decides.

    Raises:
        FileNotFoundError: there is no such folder, or it lacks a file.
        ValueError: it holds a module that cannot be read here.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"models: there is no folder {folder} with an encoder; download it first, and name its place, text:FOLDER."
        )
    modules = _json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    places: dict[str, list[Path]] = {}
    for module in modules:
        places.setdefault(str(module["type"]).rpartition(".")[2], []).append(folder / str(module["path"]))
    unknown = set(places) - {"Transformer", "Pooling", "Dense", "Normalize", "StaticEmbedding"}
    if unknown:
        raise ValueError(f"models: {folder} holds the module {printable(min(unknown))}, which cannot be read here.")
    if "StaticEmbedding" in places:
        return _static(places["StaticEmbedding"][0], length)
    home = places.get("Transformer", [folder])[0]
    config = _json(home / "config.json")
    if config.get("model_type") == "model2vec":
        return _static(home, length)
    limit = _json(home / "sentence_bert_config.json") if (home / "sentence_bert_config.json").is_file() else {}
    about: About = {
        "kind": "transformer",
        "tokenizer": read_tokenizer(home / "tokenizer.json"),
        "length": length
        or int(limit.get("max_seq_length") or min(LENGTH, config.get("max_position_embeddings", LENGTH))),
        "special": True,
        "config": config,
        "pooling": _pooling(places.get("Pooling", [])),
        "dense": [_json(place / "config.json") for place in places.get("Dense", [])],
        "beside": {name: (home / name).read_text(encoding="utf-8") for name in BESIDE if (home / name).is_file()},
    }
    return _transformer(home, about, places.get("Dense", []), pretrained)


def _static(home: Path, length: int | None) -> Static:
    vectors = read_vectors(home / "model.safetensors")
    return Static(static_about(read_tokenizer(home / "tokenizer.json"), vectors, length), vectors)


def _transformer(home: Path, about: About, dense: list[Path], pretrained: bool) -> Transformer:
    package = need("transformers", "models: text:FOLDER", "text")
    network = None
    if pretrained:
        try:
            with _quiet(package.utils.logging):
                network = package.AutoModel.from_pretrained(home, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"models: transformers cannot read {home} ({printable(first_line(error))}); name a complete folder."
            ) from None
        about["config"] = json.loads(network.config.to_json_string(use_diff=False))
    made = Transformer(about, network)
    for place, layer in zip(dense, (each for each in made.dense if isinstance(each, nn.Linear)), strict=True):
        if pretrained:
            from safetensors.torch import load_file

            state = load_file(place / "model.safetensors")
            layer.load_state_dict({name.removeprefix("linear."): value for name, value in state.items()})
    return made


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Silence the progress bar and the report of weights that are missing or left over, such as those of a pooler."""
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _pooling(places: list[Path]) -> str:
    if not places:
        return "mean"
    given = _json(places[0] / "config.json")
    if "pooling_mode" in given:
        return str(given["pooling_mode"])
    chosen = [name for name, value in given.items() if name.startswith("pooling_mode_") and value]
    return MODES.get(chosen[0], chosen[0]) if chosen and chosen != ["pooling_mode_mean_tokens"] else "mean"


def _json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"models: there is no file {path}; name the folder of a whole encoder.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"models: {path} is not JSON; download the folder again.") from None


def write_folder(model: Embedder, folder: Path) -> list[Path]:
    """Write a text network so that `SentenceTransformer(folder)` gives the same vectors.

    A network with two encoders becomes the folders `query` and `document` in it.

    Returns:
        The folders that were written.
    """
    if folder.exists():
        raise ValueError(f"export: {folder} is there already; name a new folder.")
    trunk: Any = model.trunk
    if isinstance(trunk, Two):
        sides = {"query": trunk.query, "document": trunk.document}
    elif isinstance(trunk, TextTrunk):
        sides = {"": trunk}
    else:
        raise ValueError("export: a folder is for networks of texts; name a .safetensors or an .onnx file.")
    with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent) as beside:
        for name, each in sides.items():
            _write(each, model, Path(beside, folder.name, name))
        Path(beside, folder.name).rename(folder)  # once it is complete
    return [folder / name for name in sides]


def _write(trunk: Any, model: Embedder, folder: Path) -> None:
    """Write the modules of one encoder."""
    if not isinstance(model.head, nn.Linear):
        raise ValueError("export: sentence-transformers has no layer for this head; train without hidden and bn_neck.")
    dense: list[tuple[nn.Module, str]] = [(model.head, "torch.nn.modules.linear.Identity")]
    if isinstance(trunk, Static):
        kinds = [("StaticEmbedding", "0_StaticEmbedding")]
        _save(folder / kinds[0][1], {"embedding.weight": trunk.vectors})
        write_text(folder / kinds[0][1] / "tokenizer.json", trunk.transform.tokenizer.to_str())
    else:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
        _write_transformer(trunk, folder)
        layers = (each for each in trunk.dense if isinstance(each, nn.Linear))
        names = (each["activation_function"] for each in trunk.about["dense"])
        dense = [*zip(layers, names, strict=True), *dense]
    for layer, activation in dense:
        kinds.append(("Dense", f"{len(kinds)}_Dense"))
        _write_dense(layer, activation, folder / kinds[-1][1])
    if model.normalize:
        kinds.append(("Normalize", f"{len(kinds)}_Normalize"))
        (folder / kinds[-1][1]).mkdir(parents=True)
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": PREFIX + kind}
        for place, (kind, path) in enumerate(kinds)
    ]
    write_text(folder / "modules.json", json.dumps(modules, indent=2))
    about = {"model_type": "SentenceTransformer", "prompts": {}, "similarity_fn_name": "cosine"}
    write_text(folder / "config_sentence_transformers.json", json.dumps(about, indent=2))


def _write_transformer(trunk: Transformer, folder: Path) -> None:
    trunk.network.config.save_pretrained(folder)
    _save(folder, trunk.network.state_dict())
    for name, text in trunk.about["beside"].items():
        write_text(folder / name, text)
    if "tokenizer_config.json" not in trunk.about["beside"]:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": trunk.about["length"]}
        write_text(folder / "tokenizer_config.json", json.dumps(kind))
    write_text(folder / "tokenizer.json", trunk.about["tokenizer"])
    limit = {"max_seq_length": trunk.about["length"], "do_lower_case": False}
    write_text(folder / "sentence_bert_config.json", json.dumps(limit))
    names = {"pooling_mode_mean_tokens": "mean", **MODES}
    pooling: dict[str, Any] = {name: mode == trunk.about["pooling"] for name, mode in names.items()}
    pooling["word_embedding_dimension"] = int(trunk.network.config.hidden_size)
    write_text(folder / "1_Pooling" / "config.json", json.dumps(pooling, indent=2))


def _write_dense(layer: Any, activation: str, folder: Path) -> None:
    about = {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias is not None,
        "activation_function": activation,
    }
    write_text(folder / "config.json", json.dumps(about, indent=2))
    _save(folder, {f"linear.{name}": value for name, value in layer.state_dict().items()})


def _save(folder: Path, state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    ready = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    ready = {name: value.float() if value.is_floating_point() else value for name, value in ready.items()}
    save_file(ready, folder / "model.safetensors", {"format": "pt"})
