"""What benchmarks/peers and small_models measure computes what the library computes."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parent
SMALL_MODELS = FOLDER.parent / "small_models"
ROUNDS = 5
QUADRATIC = {"problem": "quadratic", "dims": (4, 6), "clients": 5}
LARGE = {"problem": "quadratic", "dims": (40, 35), "clients": 3}  # products by block
RIDGE = {"problem": "ridge", "clients": 4}
pytestmark = pytest.mark.usefixtures("single_precision")


def at(path):
    """Return a module by its path."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer(name):
    """Return a module of the benchmark; a reference elsewhere has the same name as one of these."""
    if name == "numpy_reference":
        return at(FOLDER / f"{name}.py")
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def close(found, expected):
    for theirs, ours in zip(found, expected, strict=True):
        theirs, ours = (
            np.concatenate(list(map(np.ravel, jax.tree.leaves(z)))) for z in (theirs, ours)
        )
        assert np.abs(ours).max() > 1e-3
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [QUADRATIC, LARGE])
def test_closed_forms_of_the_quadratic(case):
    problems = peer("problems")
    found = peer("numpy_reference").quadratic_rounds(
        problems.quadratic_task(case), problems.STEPS["quadratic"], ROUNDS
    )
    close(found, problems.library(case)(ROUNDS))


@pytest.mark.parametrize("case", [QUADRATIC, LARGE])
def test_formulas_of_the_quadratic_as_written(case):
    problems, task = peer("problems"), peer("problems").quadratic_task(case)
    rounds = at(SMALL_MODELS / "as_written.py").prepare(
        peer("numpy_reference").coefficients(task), task.data.p, task.x0, task.y0,
        problems.STEPS["quadratic"],
    )  # fmt: skip
    close(rounds(ROUNDS), problems.library(case, records=False)(ROUNDS))


@pytest.mark.parametrize("case", [QUADRATIC, RIDGE])
def test_a_bare_scan(case):
    problems = peer("problems")
    problem, data, x0, y0, _ = problems.setting(case)
    steps = problems.STEPS[case["problem"]]
    rounds = at(SMALL_MODELS / "scan.py").prepare(problem, data, x0, y0, steps)
    close(rounds(ROUNDS), problems.library(case, records=False)(ROUNDS))


@pytest.mark.parametrize("gram", [False, True])
def test_closed_forms_of_the_ridge(gram):
    problems = peer("problems")
    lower, upper = problems.ridge_samples(RIDGE["clients"])
    found = peer("numpy_reference").ridge_rounds(
        lower, upper, problems.STEPS["ridge"], ROUNDS, gram=gram
    )
    close(found, problems.library(RIDGE)(ROUNDS))


def test_a_second_run_starts_from_the_same_point():
    problems = peer("problems")
    rounds = peer("numpy_reference").prepare_quadratic(
        problems.quadratic_task(LARGE), problems.STEPS["quadratic"]
    )
    first = [z.copy() for z in rounds(ROUNDS)]
    close(rounds(ROUNDS), first)


@pytest.mark.parametrize("case", [{**QUADRATIC, "clients": 1}, {**RIDGE, "clients": 1}])
def test_centralised_soba(case):
    problems = peer("problems")
    problem, data, x0, y0, _ = problems.setting(case)
    rounds = peer("soba").on_one_client(problem, data, x0, y0, problems.STEPS[case["problem"]])
    close(rounds(ROUNDS), problems.library(case)(ROUNDS))


@pytest.mark.parametrize("case", [QUADRATIC, RIDGE])
def test_pytorch(case):
    torch = pytest.importorskip("torch")
    problems, clients = peer("problems"), peer("torch_clients")
    expected = problems.library(case)(ROUNDS)
    close(clients.loop(case)(ROUNDS), expected)
    losses, draw, point = clients.fixed(case)
    weights = torch.full((case["clients"],), 1 / case["clients"])
    step = clients.vmap_round(losses, weights, problems.STEPS[case["problem"]])
    for _ in range(ROUNDS):
        point = step(point, *draw())
    close(point, expected)


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_pytorch_vmap_of_networks(model):
    """Against the loop of benchmarks/round_speed, which test_references compares with simfbo."""
    torch = pytest.importorskip("torch")
    problems, clients = peer("problems"), peer("torch_clients")
    case = {"problem": model, "clients": 2, "cohort": 2}
    reference = problems.sibling("round_speed", "torch_reference")
    losses, draw, (x, y, _) = clients.network(case)
    features = reference._mlp_features if model == "mlp" else reference._cnn_features
    point, (lower, upper) = (x, y, tuple(0.3 * leaf + 0.1 for leaf in y)), draw()
    step = clients.vmap_round(losses, torch.full((2,), 0.5), (1.0, 1.0, 1.0))
    moved = [[a - b for a, b in zip(*parts)] for parts in zip(point, step(point, lower, upper))]
    each = [
        reference._directions(
            features, *point, *(tuple(z[i] for z in part) for part in (lower, upper))
        )
        for i in range(2)
    ]
    close(moved, [[(a + b) / 2 for a, b in zip(*parts)] for parts in zip(*each)])
