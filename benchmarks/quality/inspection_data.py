"""The data of inspection.py: features of photographs and of their copies, and of sentences."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from nearfar import models
from nearfar.inspection._samples import shrink

MADE = ("re-encoded", "mirrored", "cropped", "mirrored, re-encoded", "mirrored, cropped, re-encoded")
CLASSES = 50
"""Classes of each set of photographs from which copies are made."""


def photographs(folder: Path, cache: Path, name: str) -> dict[str, np.ndarray]:
    """Features, gray forms and sources of the photographs of a set, a twentieth of them copied."""
    file = cache / f"{name}.npz"
    if not file.is_file():
        network, rng = models.build("lite0", embedding_dim=None).eval(), np.random.default_rng(0)
        rows = {key: [] for key in ("x", "gray", "source", "made", "y")}
        batch = []
        for path in sorted(folder.glob({"cub": "cub200_full-*.tar", "flowers": "flowers102-*.tar"}[name])):
            with tarfile.open(path) as archive:
                for entry in archive:
                    label = int(entry.name.split("/")[-2]) if entry.isreg() else CLASSES + 1
                    if label > CLASSES:
                        continue
                    picture = Image.open(io.BytesIO(archive.extractfile(entry).read())).convert("RGB")
                    versions = [(picture, -1, "")]
                    if rng.random() < 0.06:
                        made = MADE[rng.integers(len(MADE))]
                        versions.append((copy(picture, made, rng), len(rows["y"]), made))
                    for version, source, made in versions:
                        batch.append(torch.from_numpy(np.array(ImageOps.fit(version, (224, 224), Image.BICUBIC))))
                        for key, value in (("gray", shrink(version)), ("source", source), ("made", made), ("y", label)):
                            rows[key].append(value)
                    if len(batch) >= 32:
                        rows["x"].append(features(network, batch))
                        batch = []
        rows["x"] = np.concatenate([*rows["x"], *([features(network, batch)] if batch else [])])
        np.savez(file, **{key: np.stack(value) if key == "gray" else np.array(value) for key, value in rows.items()})
    return dict(np.load(file))


def features(network, batch):
    with torch.no_grad():
        return network((torch.stack(batch).permute(0, 3, 1, 2).float() - 127) / 128).half().numpy()


def copy(picture, made, rng):
    """A copy: mirrored, 60 to 90% of the area, 40 to 80% of the side and JPEG of quality 25 to 60."""
    picture = ImageOps.mirror(picture) if "mirror" in made else picture
    if "crop" in made:
        share = np.sqrt(rng.uniform(0.6, 0.9))
        wide, high = int(picture.width * share), int(picture.height * share)
        left, top = rng.integers(0, picture.width - wide + 1), rng.integers(0, picture.height - high + 1)
        picture = picture.crop((left, top, left + wide, top + high))
    if "re-encoded" in made:
        share, stream = rng.uniform(0.4, 0.8), io.BytesIO()
        picture = picture.resize((int(picture.width * share), int(picture.height * share)), Image.BICUBIC)
        picture.save(stream, "JPEG", quality=int(rng.integers(25, 60)))
        picture = Image.open(stream).convert("RGB")
    return picture


def sentences(folder: Path, wordllama: Path):
    """CLINC150: vectors [22500, 256], intents, and the vectors of the out-of-scope queries."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    table = load_file(next(wordllama.rglob("*256.safetensors")))["embedding.weight"].astype(np.float32)
    encode = Tokenizer.from_file(str(next(wordllama.rglob("*tokenizer_config.json"))))

    def embed(texts):
        words = [encode.encode(text, add_special_tokens=False).ids for text in texts]
        return torch.from_numpy(np.stack([table[ids].mean(axis=0) if ids else 0 * table[0] for ids in words]))

    data = json.loads((folder / "text" / "clinc150.json").read_text(encoding="utf-8"))
    rows = [row for side in ("train", "val", "test") for row in data[side]]
    strange = [text for side in ("oos_train", "oos_val", "oos_test") for text, _ in data[side]]
    return embed([text for text, _ in rows]), [intent for _, intent in rows], embed(strange)
