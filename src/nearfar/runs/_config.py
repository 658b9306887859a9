"""Read and write the configuration of a run: frozen dataclasses from YAML and flags; reading never runs code."""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, cast

import yaml

from nearfar._utils.checks import nearest, printable
from nearfar._utils.files import read_text, write_text
from nearfar.runs._sections import Config, Part

SECTIONS = tuple(section.name for section in fields(Config))
NAMED = {"loss": "{name: MultiSimilarity, alpha: 2}", "batches": "{name: Representatives, batch_size: 32}"}
"""Sections that may be written as a name alone, each with an example."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A safe YAML loader that reads 1e-3 as a number (YAML 1.1 needs 1.0e-3) and refuses aliases and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, since a few lines of them can expand to a huge tree."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias (*name); write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a repeated key, whose second value would silently replace the first."""
        lines: dict[Any, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                where = f"in lines {lines[name]} and {line}" if line > lines[name] else f"in line {line}"
                raise _DuplicateKeyError(f"the key {printable(name)!r} stands twice, {where}; keep one of them")
            lines[name] = line
        return super().construct_mapping(node, deep)


class _DuplicateKeyError(ValueError):
    """A key occurs twice in a mapping."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(owner: str, text: str) -> Any:
    """Read plain values from YAML; tags that construct objects are errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except _DuplicateKeyError as error:
        raise _DuplicateKeyError(f"{owner}: {error}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{owner}: this is not YAML: {printable(' '.join(str(error).split()))}.") from None
    except RecursionError:
        raise ValueError(f"{owner}: this is nested too deeply for a configuration.") from None


def load(path: Path | None, flags: Sequence[tuple[str, str]] = ()) -> Config:
    """Read a configuration from a file (None: the defaults) and apply flags such as ("loss.k", "160").

    The order of the flags does not matter: sections are applied before their keys, and names before other options. A
    flag that is given twice with different values is an error.
    """
    tree: Any = {}
    if path is not None:
        if not path.is_file():
            raise FileNotFoundError(f"config: there is no file {path}; `nearfar config > {path}` writes one to change.")
        tree = read_yaml(str(path), read_text("config", path)) or {}
    return parse(_with_flags(tree, flags))


def apply_flags(config: Config, flags: Sequence[tuple[str, str]]) -> Config:
    """Apply flags to a configuration, as `load` does to the one in a file."""
    return parse(_with_flags(to_tree(config), flags))


def parse(tree: Any) -> Config:
    """Build a `Config` from nested mappings; an unknown or misspelled key is an error that names the nearest one."""
    return cast(Config, _section(Config, tree, ""))


def _with_flags(tree: Any, flags: Sequence[tuple[str, str]]) -> Any:
    """Change a tree in place by keys ("loss.k", "160") and whole sections ("loss", "{name: DroTopK, k: 160}")."""
    texts, before, given = dict[str, str](), _data_sizes(tree), set[tuple[str, ...]]()
    for name, text in flags:
        if texts.setdefault(name, text) != text:
            raise ValueError(f"config: --{name} came twice, as {texts[name]} and as {text}; keep one of them.")
    for name, text in sorted(texts.items(), key=lambda flag: (flag[0].count("."), not flag[0].endswith(".name"))):
        values: dict[tuple[str, ...], Any]
        if name in SECTIONS:
            values = {(name, str(key)): value for key, value in _mapping(name, text).items()}
        else:
            values = {tuple(name.split(".")): read_yaml(f"--{name}", text)}
        for path, value in values.items():
            _put(tree, path, value, name)
            given.add(path)
    if ("data", "size") in given and ("data", "train_size") not in given and before[1] is not None:
        sizes = (_data_sizes(tree)[0], *before)
        known = all(isinstance(size, int) and size > 0 for size in sizes)
        tree["data"]["train_size"] = max(1, round(sizes[0] * sizes[2] / sizes[1])) if known else None
    return tree


def _data_sizes(tree: Any) -> tuple[Any, Any]:
    """Keep the ratio of `data.size` and `data.train_size` if flags set only the first."""
    section = tree.get("data") if isinstance(tree, dict) else None
    return (section.get("size"), section.get("train_size")) if isinstance(section, dict) else (None, None)


def _mapping(section: str, text: str) -> Mapping[str, Any]:
    """Parse a section given as a flag: a mapping (its name comes first), or only the name of a loss or a sampler."""
    try:
        value = read_yaml(f"--{section}", text)
    except _DuplicateKeyError:
        raise
    except ValueError:
        value = None
    named = section in NAMED
    if named and isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        example = NAMED.get(section, "{key: value, other_key: value}")
        also = ", or its name alone" if named else ""
        raise ValueError(
            f"config: --{section} {printable(text)!r} is no mapping of names to values; write it in quotes as YAML, "
            f"such as --{section} '{example}'{also}."
        )
    return dict(sorted(value.items(), key=lambda item: item[0] != "name"))


def _put(tree: Any, path: Sequence[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        if not isinstance(tree, dict):
            break
        if isinstance(tree.get(key), str) and path[0] in NAMED:
            tree[key] = {"name": tree[key]}  # a loss, a sampler or a part of one, given by name only
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
    if not isinstance(tree, dict) or len(path) < 2:
        raise ValueError(f"--{name}: a flag is section.key, such as --optimizer.lr 1e-4 or --training.steps 500.")
    if path[-1] == "name" and path[0] in NAMED and tree.get("name") != value:
        tree.clear()  # another loss or sampler has other options, unlike other data and networks
    tree[path[-1]] = value


def _section(kind: Any, tree: Any, place: str) -> Any:
    where = place or "the configuration"
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ValueError(f"config: {where} must be a mapping of names to values, but came as {tree!r}.")
    known = {f.name: f for f in fields(kind)}
    for key in tree:
        if key not in known:
            full = f"{place}.{key}" if place else str(key)
            raise ValueError(f"config: there is no {full}; {nearest(str(key), known)}")
    hints = typing.get_type_hints(kind)
    values = {
        name: _value(hints[name], tree[name], f"{place}.{name}" if place else name, known[name])
        for name in known
        if name in tree
    }
    return kind(**values)


def _value(hint: Any, value: Any, place: str, about: Field[Any]) -> Any:
    if hint is Part:
        return _part(value, place, about)
    if is_dataclass(hint):
        return _section(hint, value, place)
    fitted = _fit(hint, value)
    if fitted is MISSING:
        raise ValueError(f"config: {place} must be {_words(hint)}, but came as {value!r}.")
    return fitted


def _part(value: Any, place: str, about: Field[Any]) -> Part:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"config: {place} must be a name, or a mapping with a name, but came as {value!r}.")
    options = dict(value)
    name = options.pop("name", None)
    if name is None:  # options alone change the default part
        standard = cast(Part, about.default)
        return Part(standard.name, {**standard.options, **options})
    if not isinstance(name, str):
        raise ValueError(f"config: {place}.name must be a word, but came as {name!r}.")
    return Part(name, options)


def _fit(hint: Any, value: Any) -> Any:
    """Convert a value to the type of a hint; MISSING if it does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return next((got for got in (_fit(kind, value) for kind in inner) if got is not MISSING), MISSING)
    if origin is Literal:
        return value if value in inner else MISSING
    if origin is tuple:
        fitted = tuple(_fit(inner[0], x) for x in value) if isinstance(value, list | tuple) else (MISSING,)
        right = len(set(fitted)) == len(fitted) if inner[-1] is Ellipsis else len(fitted) == len(inner)
        return fitted if right and MISSING not in fitted else MISSING
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # YAML reads a name of digits as a number
    right = isinstance(value, hint) and not (hint is not bool and isinstance(value, bool))
    return value if right else MISSING


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(kind) for kind in inner)
    if origin is Literal:
        return "one of " * (len(inner) > 1) + ", ".join(str(x) for x in inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return f"a list, each {_words(inner[0])} and none twice"
    if origin is tuple:
        return f"{len(inner)} numbers"
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a word", type(None): "null"}
    return words.get(hint, str(hint))


def to_tree(config: Any) -> Any:
    """Convert a configuration to plain nested values, the inverse of `parse`."""
    if isinstance(config, Part):
        return {"name": config.name, **{key: to_tree(value) for key, value in config.options.items()}}
    if is_dataclass(config):
        return {f.name: to_tree(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, Mapping):
        return {key: to_tree(value) for key, value in config.items()}
    return list(config) if isinstance(config, tuple) else config


def flat(tree: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Flatten nested values to a mapping from full names such as "loss.pair.name"."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{place}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def to_yaml(config: Config) -> str:
    """Format a configuration as YAML, with the help text of each key as a comment."""
    lines = []
    for section in fields(config):
        value = getattr(config, section.name)
        about = section.metadata.get("doc") or type(value).__doc__
        lines.append(f"{section.name}:  # {about}")
        docs = {f.name: f.metadata["doc"] for f in fields(value)} if not isinstance(value, Part) else {}
        for key, item in to_tree(value).items():
            text = yaml.safe_dump(item, default_flow_style=True, width=200).removesuffix("\n").removesuffix("\n...")
            lines.append(f"  {key}: {text}".ljust(34) + (f"  # {docs[key]}" if key in docs else ""))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def save(config: Config, path: Path) -> None:
    write_text(path, to_yaml(config))
