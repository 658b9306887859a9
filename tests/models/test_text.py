"""Text encoders: equal to sentence-transformers, saved with their tokenizer, and read only with the right one."""

import numpy as np
import pytest
import torch
import vision
from texts import encoder_folder

from nearfar import models
from nearfar.data import Document
from nearfar.data._tokens import pad, vocabulary_of
from nearfar.models.saved import Network, Saved, read
from nearfar.models.sentence_folder import write_folder

vision.mend()
pytest.importorskip("tokenizers")
TEXTS = ["tell me the recipe", "lost card", "play the song now please tell me what", "zebra", "unknown words"]


def embed(model, texts):
    model.eval()
    with torch.no_grad():
        return model(torch.stack(pad([model.transform(text) for text in texts])))


def theirs(folder, texts):
    package = pytest.importorskip("sentence_transformers")
    return torch.from_numpy(package.SentenceTransformer(str(folder), device="cpu").encode(texts))


def test_static_vectors_are_the_mean_over_tokens():
    model = models.build("text:static", embedding_dim=None, texts=TEXTS, normalize=False)
    vectors, found = model.trunk.vectors.detach().numpy(), embed(model, TEXTS)
    for text, row in zip(TEXTS, found, strict=True):
        mean = np.mean([vectors[number] for number in model.transform(text).tolist()], axis=0)
        np.testing.assert_allclose(row.numpy(), mean, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_a_sentence_transformer_gives_its_own_vectors(pooling, tmp_path):
    pytest.importorskip("transformers")
    folder = encoder_folder(tmp_path / "encoder", pooling)
    model = models.build(f"text:{folder}", embedding_dim=None)
    assert model.transform.length == 6
    torch.testing.assert_close(embed(model, TEXTS), theirs(folder, TEXTS), atol=1e-6, rtol=0)


def test_a_transformers_folder_is_pooled_by_the_mean(tmp_path):
    pytest.importorskip("transformers")
    plain = models.build(f"text:{encoder_folder(tmp_path / 'plain', None)}", embedding_dim=None, length=6)
    other = models.build(f"text:{encoder_folder(tmp_path / 'other', 'mean')}", embedding_dim=None)
    assert torch.equal(embed(plain, TEXTS), embed(other, TEXTS))


@pytest.mark.parametrize("kind", ["static", "transformer", "twice"])
def test_a_written_folder_loads_in_sentence_transformers(kind, tmp_path):
    torch.manual_seed(0)
    name, options = "text:static", {"texts": TEXTS}
    if kind != "static":
        pytest.importorskip("transformers")
        name, options = f"text:{encoder_folder(tmp_path / 'encoder', 'cls')}", {}
    model = models.build(name, embedding_dim=8, **options)
    (folder,) = write_folder(model, tmp_path / "out")
    if kind == "twice":  # read back with its head as a dense layer, and written with another
        model = models.build(f"text:{folder}", embedding_dim=4)
        (folder,) = write_folder(model, tmp_path / "again")
    torch.testing.assert_close(embed(model, TEXTS), theirs(folder, TEXTS), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="is there already"):
        write_folder(model, folder)


def test_two_encoders_read_queries_and_documents(tmp_path):
    pytest.importorskip("transformers")
    names = [f"text:{encoder_folder(tmp_path / str(seed), 'mean', seed)}" for seed in (0, 1)]
    single = [models.build(name, embedding_dim=None) for name in names]
    both = models.build("|".join(names), embedding_dim=None)
    mixed = embed(both, ["lost card", Document("lost card"), Document("zebra"), "zebra now"])
    torch.testing.assert_close(mixed[[0, 3]], embed(single[0], ["lost card", "zebra now"]), atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed[[1, 2]], embed(single[1], ["lost card", "zebra"]), atol=1e-6, rtol=0)
    assert [path.name for path in write_folder(both, tmp_path / "two")] == ["query", "document"]
    wide = f"text:{encoder_folder(tmp_path / 'wide', 'mean', width=32)}"
    with pytest.raises(ValueError, match="features of one width, but gave 16 and 32"):
        models.build(f"{names[0]}|{wide}")


@pytest.mark.parametrize("kind", ["static", "transformer", "two"])
def test_a_file_of_weights_holds_the_whole_encoder(kind, tmp_path):
    if kind == "static":
        name, options = "text:static", {"texts": TEXTS}
    else:
        pytest.importorskip("transformers")
        name, options = f"text:{encoder_folder(tmp_path / 'encoder')}", {}
    name = f"{name}|{name}" if kind == "two" else name
    model = models.build(name, embedding_dim=4, **options).eval()
    file = Saved(model, Network(name, 4, (256,)), model.transform).save(tmp_path / "model.safetensors")
    if kind != "static":
        (tmp_path / "encoder" / "config.json").unlink()  # the file does not need the folder
    found = read(file)
    assert torch.equal(embed(model, TEXTS), embed(found.model, TEXTS))
    assert found.transform.describe() == model.transform.describe()


def test_weights_of_another_tokenizer_are_refused():
    one, other = (models.build("text:static", embedding_dim=2, texts=texts) for texts in (["ab cd"], ["cd ab x"]))
    with pytest.raises(RuntimeError):
        one.load_state_dict(other.state_dict())
    same = models.build("text:static", embedding_dim=2, texts=["ab ce"])
    assert same.trunk.vectors.shape == one.trunk.vectors.shape
    with pytest.raises(RuntimeError, match="the tokenizer, the length or the kind"):
        one.load_state_dict(same.state_dict())


def test_token_vectors_come_from_files(tmp_path):
    from safetensors.torch import save_file

    text = vocabulary_of(TEXTS)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    count = models.build("text:static", tokenizer=tmp_path / "tokenizer.json").trunk.vectors.shape[0]
    vectors = torch.randn(count, 5)
    save_file({"embedding.weight": vectors.half()}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", x=vectors.numpy())
    for name, exact in (("a.safetensors", vectors.half().float()), ("a.npz", vectors)):
        model = models.build("text:static", weights=tmp_path / name, embedding_dim=None)
        assert torch.equal(model.trunk.vectors, exact)
    mapping = torch.arange(count).flip(0)
    save_file(
        {"embeddings": vectors, "mapping": mapping, "weights": torch.full((count,), 2.0)}, tmp_path / "m.safetensors"
    )
    model = models.build("text:static", weights=tmp_path / "m.safetensors", embedding_dim=None)
    torch.testing.assert_close(model.trunk.vectors.detach(), 2 * vectors.flip(0))
    save_file({"x": vectors[:-1].clone()}, tmp_path / "short.safetensors")
    with pytest.raises(ValueError, match="tokens, but the weights hold"):
        models.build("text:static", weights=tmp_path / "short.safetensors")
    save_file({"x": vectors, "y": vectors.clone()}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="must hold one matrix"):
        models.build("text:static", weights=tmp_path / "two.safetensors")


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        models.build("text:nowhere")
    with pytest.raises(ValueError, match="text:static needs weights="):
        models.build("text:static")
    (tmp_path / "modules.json").write_text('[{"idx": 0, "path": "", "type": "x.WordWeights"}]', encoding="utf-8")
    with pytest.raises(ValueError, match="holds the module WordWeights, which cannot be read here"):
        models.build(f"text:{tmp_path}")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        models.build("text:static", tokenizer=tmp_path / "tokenizer.json")
