"""Losses in a file: they are the same without PyTorch, and a bad file ends in a sentence."""

import json

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from simfbo import BilevelProblem, UserError
from simfbo.core.problem import directions
from simfbo.torch import from_torch, restore, save, split

NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
MODEL = split(NET.double().eval(), upper="0.*", lower="4.*")


def lower(x, y, batch):
    images, labels = batch
    masked = MODEL(x, y, images).masked_fill(torch.arange(3) == 2, -torch.inf)
    return F.cross_entropy(masked[:, :2], labels) + 0.1 * sum((p**2).sum() for p in y.values())


def batch(size):
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, 1, 4, 4)), rng.integers(0, 2, size)


@pytest.fixture(scope="module")
def traced():
    return from_torch(lower)


@pytest.fixture
def file(tmp_path, traced):
    path = tmp_path / "losses.json"
    save(path, {"lower": traced}, MODEL.x, MODEL.y, batch(1), sizes=[4])
    return path


@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_restored_loss_has_the_same_directions(file, size, traced):
    saved = restore(file)
    v = jax.tree.map(np.ones_like, MODEL.y)
    found, wanted = (
        jax.jit(lambda *given, p=BilevelProblem(loss, loss): directions(p, *given))(
            saved.x0, saved.y0, v, batch(size), batch(size)
        )
        for loss in (saved.losses["lower"], traced)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_the_start_comes_along(file):
    saved = restore(file)
    assert list(saved.x0) == ["0.weight", "0.bias"]
    for name, array in {**MODEL.x, **MODEL.y}.items():
        np.testing.assert_array_equal({**saved.x0, **saved.y0}[name], array)
    json.loads(file.read_text(), parse_constant=pytest.fail)  # JSON as the standard has it


def test_starts_of_lists_and_tuples(tmp_path):
    x0, y0 = [np.ones(2), (np.zeros(1), {"a": np.ones(())})], np.ones(2)
    loss = from_torch(lambda x, y, batch: (x[0] * y).sum() * x[1][1]["a"] + batch.mean())
    save(tmp_path / "a.json", {"f": loss}, x0, y0, np.ones(1))
    found = restore(tmp_path / "a.json")
    assert jax.tree.structure(found.x0) == jax.tree.structure(x0)
    assert float(found.losses["f"](found.x0, found.y0, np.ones(3))) == 3


def test_other_arguments_are_refused(file):
    saved = restore(file)
    with pytest.raises(UserError, match="'lower' was traced for other arguments than"):
        saved.losses["lower"](saved.x0, saved.y0, (np.zeros((2, 1, 5, 5)), np.zeros(2, int)))
    with pytest.raises(UserError, match="Only losses from"):
        save(file, {"lower": lambda x, y, batch: 0.0}, MODEL.x, MODEL.y, batch(1))


CHANGES = {
    "format": lambda stored: stored.update(format=99),
    "another type": lambda stored: stored["losses"]["lower"][0]["inputs"].__setitem__(0, "int8"),
    "operator": lambda stored: stored["losses"]["lower"][0]["nodes"][0].__setitem__(0, "eval"),
    "value": lambda stored: stored["losses"]["lower"][0].update(output=10**6),
    "later value": lambda stored: stored["losses"]["lower"][0]["nodes"][0].__setitem__(
        1, [{"value": 900}]),
    "dtype": lambda stored: stored["arrays"][0].__setitem__(0, "object"),
    "shape": lambda stored: stored["arrays"][0].__setitem__(1, [7, 7, 7]),
    "missing": lambda stored: stored.pop("x0"),
    "list": lambda stored: stored.update(losses=[]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_ends_in_a_sentence(file, change):
    stored = json.loads(file.read_text())
    CHANGES[change](stored)
    file.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"write it again with simfbo\.torch\.save"):
        restore(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '"a"', "\x00"])
def test_no_json_ends_in_a_sentence(file, text):
    file.write_text(text)
    with pytest.raises(UserError, match="is not a file that this version can read"):
        restore(file)
    file.unlink()
    with pytest.raises(UserError, match="There is no file"):
        restore(file)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, batch: (y * batch).sum(),
        lambda x, y, batch: ((y * batch) ** 2).mean().sqrt(),
    ],
)
def test_what_is_no_mean_over_samples_is_not_saved(loss, tmp_path):
    with pytest.raises(UserError, match="'f' is not a mean over the samples of a batch"):
        save(tmp_path / "a.json", {"f": from_torch(loss)}, np.ones(1), np.ones(1), np.arange(3.0))
    assert not list(tmp_path.iterdir())


def test_zeros_of_either_sign_are_kept(tmp_path):
    signs = torch.tensor([-0.0, 0.0]).double()
    loss = from_torch(lambda x, y, b: (torch.copysign(y, signs) * torch.copysign(x, -signs))[0])
    save(tmp_path / "a.json", {"f": loss}, np.ones(2), np.ones(2), np.ones(1))
    assert float(restore(tmp_path / "a.json").losses["f"](np.ones(2), np.ones(2), np.ones(1))) == -1
