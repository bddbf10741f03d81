"""Modules in and out, a hyper-representation from PyTorch's data, and every method on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from simfbo import (
    BilevelProblem,
    DebugFederation,
    Point,
    SimulatedFederation,
    UserError,
    datasets,
    from_clients,
    run,
)  # fmt: skip
from simfbo.algorithms import simfbo
from simfbo.config.build import build_algorithm
from simfbo.config.catalogue import METHODS, settings_model
from simfbo.core.problem import Weighted, evaluate
from simfbo.torch import (
    SplitModule,
    check_loss,
    from_torch,
    hyper_representation,
    load,
    parameters,
    restore,
    save,
    split,
)  # fmt: skip

HIDDEN = 6
MANY = pytest.mark.slow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 10)

    def forward(self, images):
        return self.head(torch.tanh(self.body(images)))


@pytest.fixture(scope="module")
def digits():
    """Return inputs and labels of 120 digits."""
    images = datasets.load("digits")
    return images.train_images[:120].reshape(120, 64) / 255, images.train_labels[:120]


@pytest.fixture(scope="module")
def both(digits):
    """Return the same problem with losses in PyTorch and in JAX, data, x0 and y0."""
    torch.manual_seed(0)
    net = Net().double()
    model = split(net, upper="body.*", lower="head.*")

    def upper(x, y, batch):
        return F.cross_entropy(model(x, y, batch[0]), batch[1])

    def lower(x, y, batch):
        return upper(x, y, batch) + 0.01 * sum((p**2).sum() for p in y.values())

    def jax_upper(x, y, batch):
        hidden = jnp.tanh(batch[0] @ x["body.weight"].T + x["body.bias"])
        logits = jax.nn.log_softmax(hidden @ y["head.weight"].T + y["head.bias"])
        right = jax.nn.one_hot(batch[1], 10, dtype=logits.dtype)
        return -(right * logits).sum(1).mean()

    def jax_lower(x, y, batch):
        return jax_upper(x, y, batch) + 0.01 * sum((p**2).sum() for p in y.values())

    inputs, labels = digits
    parts = [(inputs[rows], labels[rows]) for rows in np.split(np.arange(120), 8)]
    data = from_clients(parts[:4], parts[4:], batch_size=5)
    in_torch = BilevelProblem(from_torch(upper), from_torch(lower))
    return in_torch, BilevelProblem(jax_upper, jax_lower), data, model.x, model.y


QUICK = ("simfbo", "mimefbo")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else MANY) for n in METHODS.names()],
)
def test_every_method_is_that_of_the_jax_loss(name, both):
    *problems, data, x0, y0 = both
    settings = settings_model(METHODS.find(name))(name=name)
    ends = []
    for problem in problems:
        if METHODS.find(name).private:
            problem = problem._replace(lower_level="private")
        federation = SimulatedFederation(data)
        history = run(build_algorithm(settings, problem, 4), federation, x0, y0, rounds=4, seed=3)
        ends.append((history.state.x, federation.ledger.total))
    (ours, ledger), (theirs, their_ledger) = ends
    moved = max(np.abs(theirs[key] - x0[key]).max() for key in x0)
    gap = max(np.abs(ours[key] - theirs[key]).max() for key in x0)
    assert gap < 1e-12 < 1e-4 < moved
    assert ledger == their_ledger


def test_weighted_batches_agree(both):
    problem, plain, data, x0, y0 = both
    batch = jax.tree.map(lambda a: a[:4], data.lower.samples)
    weighted = Weighted(batch, np.array([0.1, 0.2, 0.3, 0.4]))
    values = [
        jax.jit(lambda *given, loss=one.lower: evaluate(loss, *given))(x0, y0, weighted)
        for one in (problem, plain)
    ]
    np.testing.assert_allclose(*values, rtol=1e-12)


@MANY
def test_engines_agree(both):
    problem, _, data, x0, y0 = both
    settings = settings_model(METHODS.find("simfbo"))(name="simfbo")
    states = [
        run(build_algorithm(settings, problem, 2), engine(data), x0, y0, rounds=2).state.x
        for engine in (SimulatedFederation, DebugFederation)
    ]
    for name in x0:
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-10)


def test_a_run_resumes_bit_for_bit(both, tmp_path):
    problem, _, data, x0, y0 = both
    settings = settings_model(METHODS.find("simfbo"))(name="simfbo")
    algorithm = build_algorithm(settings, problem, 4)

    def stop(number, record):
        if number == 2:
            raise KeyboardInterrupt

    def go(folder, **options):
        federation = SimulatedFederation(data)
        return run(algorithm, federation, x0, y0, rounds=4, directory=tmp_path / folder, **options)

    whole = go("whole")
    go("cut", on_round=stop)
    resumed = go("cut", resume=True)
    assert resumed.records[-1]["round"] == 4
    for name in x0:
        np.testing.assert_array_equal(resumed.state.x[name], whole.state.x[name])


class Rows(Dataset):
    def __init__(self, inputs, labels):
        self.rows = list(zip(inputs, labels, strict=True))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


class Stream(IterableDataset):
    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __iter__(self):
        return iter(zip(self.inputs, self.labels, strict=True))


SOURCES = {
    "arrays": lambda a, b: (a, b),
    "tensors": lambda a, b: (torch.from_numpy(a), torch.from_numpy(b).long()),
    "lists": lambda a, b: (a.tolist(), b.tolist()),
    "tensor data set": lambda a, b: TensorDataset(torch.from_numpy(a), torch.from_numpy(b)),
    "data set": Rows,
    "stream": Stream,
    "loader": lambda a, b: DataLoader(Rows(a, b), batch_size=7),
    "dictionary": lambda a, b: {"images": a, "labels": b},
}


@pytest.mark.parametrize("kind", SOURCES)
def test_samples_come_from_anywhere(kind, digits):
    inputs, labels = digits
    halves = [(inputs[:50], labels[:50]), (inputs[50:], labels[50:])]
    net = Net().double()
    made = [
        hyper_representation(net, "head.*", [source(*half) for half in halves], batch_size=8)
        for source in (SOURCES["arrays"], SOURCES[kind])
    ]
    samples = [jax.tree.leaves(task.data.lower.samples) for task in made]
    for a, b in zip(*samples, strict=True):
        np.testing.assert_array_equal(a, b)
    assert made[1].data.digest == made[0].data.digest


def test_the_task_is_cross_entropy_with_a_penalty(digits):
    inputs, labels = digits
    torch.manual_seed(1)
    net = Net().double()
    task = hyper_representation(
        net, "head.*", [(inputs[:60], labels[:60]), (inputs[60:], labels[60:])],
        test=(inputs[:30], labels[:30]), regularisation=0.1, chunk=20,
    )  # fmt: skip
    assert list(task.x0) == ["body.weight", "body.bias"]
    assert list(task.y0) == ["head.weight", "head.bias"]
    with torch.no_grad():
        scores = net(torch.from_numpy(inputs[:30]))
        wanted = float(F.cross_entropy(scores, torch.from_numpy(labels[:30]).long()))
        hits = float((scores.argmax(1).numpy() == labels[:30]).mean())
    batch = inputs[:30], labels[:30]
    assert float(jax.jit(task.problem.upper)(task.x0, task.y0, batch)) == pytest.approx(wanted)
    squares = sum((a**2).sum() for a in task.y0.values())
    found = float(jax.jit(task.problem.lower)(task.x0, task.y0, batch))
    assert found == pytest.approx(wanted + 0.05 * squares)
    metrics = task.evaluate(Point(x=task.x0, y=task.y0))
    assert metrics["test_loss"] == pytest.approx(wanted)
    assert metrics["test_accuracy"] == pytest.approx(hits)
    assert task.goal_of(task.metric) == task.goal_of("train_accuracy") == "max"


def test_without_test_samples_the_upper_ones_are_evaluated(digits):
    task = hyper_representation(Net().double(), "head.*", [digits])
    found = task.evaluate(Point(x=task.x0, y=task.y0))
    rows = np.asarray(task.data.upper.rows)
    batch = digits[0][rows], digits[1][rows]
    assert found["validation_loss"] == pytest.approx(
        float(jax.jit(task.problem.upper)(task.x0, task.y0, batch))
    )
    assert task.metric == "validation_accuracy"


def test_several_inputs_are_the_modules_arguments(digits):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, first, second=None):
            return self.head(self.scale * (first if second is None else first + 2 * second))

    first, second = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    labels = np.arange(8) % 2
    losses = [
        float(jax.jit(task.problem.upper)(task.x0, task.y0, (inputs, labels)))
        for net in [Sum()]
        for inputs in ((first, second), {"second": second, "first": first}, first + 2 * second)
        for task in [hyper_representation(net, "head.*", [as_source(inputs, labels)])]
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == pytest.approx(losses[2], rel=1e-6)


def as_source(inputs, labels):
    if isinstance(inputs, dict):
        return {**inputs, "labels": labels}
    return (*inputs, labels) if isinstance(inputs, tuple) else (inputs, labels)


def test_parameters_go_out_and_in_again():
    net, other = Net(), Net()
    assert load(other, parameters(net)) is other
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    model = split(net, upper="body.*")
    assert isinstance(model, SplitModule)
    out = model(
        {k: torch.from_numpy(2 * a) for k, a in model.x.items()},
        {k: torch.from_numpy(a) for k, a in model.y.items()},
        torch.ones(1, 64),
    )
    with torch.no_grad():
        wanted = net.head(torch.tanh(2 * net.body(torch.ones(1, 64))))
    assert torch.allclose(out, wanted)


def test_frozen_parameters_and_buffers_are_constants():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    net[1].running_mean += torch.arange(4)
    model = split(net, upper="2.weight", lower="2.bias")
    batch = np.random.default_rng(0).normal(size=(5, 3))
    found = from_torch(lambda x, y, batch: model(x, y, batch).sum())(model.x, model.y, batch)
    with torch.no_grad():
        assert float(found) == pytest.approx(float(net(torch.from_numpy(batch)).sum()))


def test_integers_keep_their_meaning_in_single_precision(single_precision):
    table = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    words = np.array([[1, 8], [3, 0]], "int32")

    def loss(x, y, batch):
        return F.cross_entropy(y[batch].mean(1), batch[:, 0] % 4) + (batch // 2).sum() * x

    assert max(check_loss(loss, (np.float32(0.5), table, words))) < 1e-6


def test_without_pytorch_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'simfbo\[torch\]'"):
        from_torch(lambda x, y, batch: y.sum())(None, np.ones(3), None)


# The order of parameters


class Two(nn.Module):
    """Two parameters whose names are not in alphabetical order."""

    def __init__(self, seed):
        super().__init__()
        rows = np.random.default_rng(seed).normal(size=(2, 3))
        self.second, self.first = (nn.Parameter(torch.from_numpy(row)) for row in rows)


def by_position(x, y, batch):
    """Use the last of x's parameters, which is called first, and the first of y's."""
    last, first = list(x.values())[-1], next(iter(y.values()))
    squares = sum((a**2).sum() for a in [*x.values(), *y.values()])
    return ((batch @ last - batch @ first - 1) ** 2).mean() + squares


def by_name(x, y, batch):
    """Be the same in JAX."""
    squares = sum((a**2).sum() for a in [*x.values(), *y.values()])
    return ((batch @ x["first"] - batch @ y["second"] - 1) ** 2).mean() + squares


def test_a_loss_receives_parameters_in_the_order_of_pytorch(tmp_path):
    x, y = parameters(Two(0)), parameters(Two(1))
    batch = np.random.default_rng(2).normal(size=(4, 3))
    loss = from_torch(by_position)
    wanted = by_name(x, y, batch)
    save(tmp_path / "loss.json", {"loss": loss}, x, y, batch)
    saved = restore(tmp_path / "loss.json")
    assert [list(tree) for tree in (saved.x0, saved.y0)] == [["second", "first"]] * 2
    for found in (loss(x, y, batch), loss(dict(x), dict(y), batch), jax.jit(loss)(x, y, batch),
                  jax.jit(saved.losses["loss"])(saved.x0, saved.y0, batch)):  # fmt: skip
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert max(check_loss(by_position, (x, y, batch))) < 1e-12
    samples = [np.random.default_rng(i).normal(size=(4, 3)) for i in range(4)]
    ends = [
        run(simfbo(BilevelProblem(one, one), Point(x=0.1, y=0.1, v=0.1)), engine, x, y, rounds=3)
        for one, engine in (
            (loss, SimulatedFederation(from_clients(samples[:2], samples[2:]))),
            (loss, DebugFederation(from_clients(samples[:2], samples[2:]))),
            (by_name, SimulatedFederation(from_clients(samples[:2], samples[2:]))),
        )
    ]
    for end in ends:
        assert list(end.state.x) == ["second", "first"]
        for name in x:
            np.testing.assert_allclose(end.state.x[name], ends[-1].state.x[name], rtol=1e-10)


def test_a_loss_that_depends_on_the_order_of_a_plain_dictionary_is_refused():
    x, y = dict(parameters(Two(0))), dict(parameters(Two(1)))
    batch = np.ones((4, 3))
    with pytest.raises(UserError, match="'by_position' depends on the order of a dictionary's"):
        check_loss(by_position, (x, y, batch))
    with pytest.raises(UserError, match="OrderedDict, for x0, y0 and samples"):
        jax.jit(from_torch(by_position))(x, y, batch)
