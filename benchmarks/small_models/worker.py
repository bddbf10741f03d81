"""One implementation in a process of its own, timed on demand.

Started by run.py with the case as JSON in argv and the folder of simfbo's sources in PYTHONPATH;
benchmarks/peers/turns.py says what it reads and answers.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "peers"))
from problems import STEPS, Case, Rounds, Setting, library, quadratic_task, setting
from turns import serve

STEPS |= {"regularisation": (0.5, 0.1, 0.1), "classification": (0.5, 0.1, 0.1)}


def build(case: Case, notes: list[str]) -> Rounds:
    """Return the function that runs a number of rounds of a case's implementation."""
    _require_source()
    name = case["implementation"]
    if case["problem"] == "fit":
        return _fits(name)
    if name in ("now", "before"):
        return _long(case) if "every" in case else library(case, _given(case), records=False)
    others = {"numpy": _numpy, "numpy-affine": _affine, "scan": _scan, "soba-jax": _soba}
    return others[name](case)


def _require_source() -> None:
    """Raise unless simfbo is imported from where run.py says."""
    import simfbo

    wanted, found = Path(os.environ["PYTHONPATH"]), Path(str(simfbo.__file__))
    assert found.resolve().is_relative_to(wanted.resolve()), f"simfbo comes from {found.parent}"


def _given(case: Case) -> Setting:
    kinds = {"regularisation": _regularisation, "classification": _classification}
    return kinds.get(case["problem"], setting)(case)


def _regularisation(case: Case) -> Setting:
    """Return an L2 weight per feature by five folds: 45 rows per client, 6 of 12 features count."""
    from simfbo.tasks import regularisation
    from simfbo.tasks.samples import synthetic

    drawn = synthetic(case["clients"], per_client=45, features=12, relevant=6)
    task = regularisation(drawn.samples, drawn.parts)
    return Setting(task.problem, task.data, task.x0, task.y0)


def _classification(case: Case) -> Setting:
    """Return an L2 weight per pixel of scikit-learn's digits, by five folds."""
    from simfbo.core.partition import iid
    from simfbo.datasets import load
    from simfbo.tasks import regularisation
    from simfbo.tasks.samples import from_images

    samples = from_images(load("digits"))
    task = regularisation(samples, iid(len(samples.target), case["clients"]))
    return Setting(task.problem, task.data, task.x0, task.y0)


def _long(case: Case) -> Rounds:
    """Return a run with evaluations and checkpoints, in a folder of its own every time."""
    from simfbo import Point, SimulatedFederation, run
    from simfbo.algorithms import simfbo

    task = quadratic_task(case)
    algorithm = simfbo(task.problem, Point(*STEPS[case["problem"]]))
    start = algorithm, SimulatedFederation(task.data), task.x0, task.y0
    evaluated = partial(run, *start, evaluate=task.evaluate, every=case["every"])

    def rounds(count: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            history = evaluated(rounds=count, directory=folder)
        assert history.end is not None
        assert history.end["status"] == "finished", history.end
        return history.state

    return rounds


def _fits(name: str) -> Rounds:
    """Return fits on scikit-learn's diabetes; a fit counts as a round."""
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import RidgeCV

    from simfbo.estimators import FederatedRidge

    X, y = load_diabetes(return_X_y=True)
    clients = np.arange(len(y)) % 10

    def fit() -> Any:
        if name == "ridgecv":
            return RidgeCV(alphas=np.logspace(-4, 4, 100)).fit(X, y)
        return FederatedRidge(random_state=0).fit(X, y, clients=clients)

    return lambda count: [fit() for _ in range(count)]


def _numpy(case: Case) -> Rounds:
    import as_written
    from numpy_reference import coefficients

    task = quadratic_task(case)
    steps = STEPS[case["problem"]]
    return as_written.prepare(coefficients(task), task.data.p, task.x0, task.y0, steps)


def _affine(case: Case) -> Rounds:
    from numpy_reference import prepare_quadratic

    return prepare_quadratic(quadratic_task(case), STEPS[case["problem"]])


def _scan(case: Case) -> Rounds:
    import scan

    problem, data, x0, y0, _ = setting(case)
    return scan.prepare(problem, data, x0, y0, STEPS[case["problem"]])


def _soba(case: Case) -> Rounds:
    import soba

    problem, data, x0, y0, _ = setting(case)
    return soba.on_one_client(problem, data, x0, y0, STEPS[case["problem"]])


if __name__ == "__main__":
    serve(build)
