"""Honest deployments, simulated: how often anomaly detection warns although nobody is hostile.

    python benchmarks/trust/deployments.py [--seeds 0..49] [--only NAME]

Ten kinds of deployments, each with random heterogeneity, so fifty seeds are 500 runs. Writes
results/deployments.json; what is there is not run again.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo import BilevelProblem, Point
from simfbo.algorithms import mimefbo, shrofbo, simfbo
from simfbo.cli.arguments import seeds as seeds_of
from simfbo.core.local_work import fixed
from simfbo.core.sampling import without_replacement
from simfbo.datasets import load
from simfbo.errors import ClientWarning
from simfbo.estimators import FederatedLogistic, FederatedRidge
from simfbo.flower import Deployment, simulate
from simfbo.runs.files import keep_compilations
from simfbo.studies.comparison import checked_seeds

FILE = Path(__file__).parent / "results/deployments.json"
ROWS = (24, 32, 40, 48, 64, 96)  # of the clients, in random order: programs are shared
Rng = np.random.Generator
Sample = tuple[np.ndarray, np.ndarray]


def sizes(clients: int, rng: Rng) -> np.ndarray:
    """Return every client's number of rows."""
    return rng.permutation(np.resize(ROWS, clients))


def log_uniform(low: float, high: float, rng: Rng) -> float:
    """Return a number whose logarithm is uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


# Tables


def tables(clients: int, features: int, yes_or_no: bool, rng: Rng) -> list[Sample]:
    """Draw the clients' rows.

    Clients differ in the means and scales of their columns, in their coefficients, and in their
    noise, each by a random amount; half of the features matter.
    """
    shift, apart = log_uniform(0.01, 3, rng), log_uniform(0.01, 1, rng)
    noise, stretch = log_uniform(0.1, 3, rng), log_uniform(0.01, 0.5, rng)
    common = rng.normal(size=features) * (np.arange(features) < features / 2)
    found = []
    for rows in sizes(clients, rng):
        scale = np.exp(stretch * rng.normal(size=features))
        X = scale * rng.normal(size=(rows, features)) + shift * rng.normal(size=features)
        own = common + apart * rng.normal(size=features) * (common != 0)
        y = X @ own + shift * rng.normal() + noise * rng.normal(size=rows)
        y = (y > np.median(X @ common)).astype(int) if yes_or_no else y
        found.append((X, y))
    return found


def estimator(kind: type, clients: int, features: int, seed: int) -> Deployment:
    """Return the deployment of an estimator, as `simfbo flower new` makes it."""
    classify = kind is FederatedLogistic
    rows = tables(clients, features, classify, np.random.default_rng(seed))
    classes = {"classes": 2} if classify else {}
    model = kind(rounds=300, random_state=seed)
    return model.deployment(
        lambda client, node: rows[client], clients=clients, features=features, every=300, **classes
    )


def upper(x: Any, y: Any, batch: Any) -> Any:
    """Return the squared error, as in the app of two losses."""
    inputs, targets = batch
    return jnp.mean((inputs @ y["weight"] + y["bias"] - targets) ** 2)


def lower(x: Any, y: Any, batch: Any) -> Any:
    """Return the same with a penalty for every weight."""
    penalty = jnp.sum(jnp.exp(x) * y["weight"] ** 2) + 0.01 * y["bias"] ** 2
    return upper(x, y, batch) + penalty


def losses(clients: int, features: int, seed: int) -> Deployment:
    """Return the deployment of two losses, as `simfbo flower new` makes it."""
    rng = np.random.default_rng(seed)
    rows = [(X / np.sqrt(features), y) for X, y in tables(clients, features, False, rng)]
    scale = 1 + np.std(np.concatenate([y for _, y in rows]))

    def load_client(client: int, node: Any) -> Any:
        X, y = rows[client][0].astype("float32"), (rows[client][1] / scale).astype("float32")
        return (X[::2], y[::2]), (X[1::2], y[1::2])

    one = np.zeros((1, features), "float32"), np.zeros(1, "float32")
    largest = max(float(np.linalg.norm(X, 2)) ** 2 / len(X) for X, _ in rows)
    step = 0.4 / (1 + largest)  # of the curvature
    return Deployment(
        algorithm=simfbo(BilevelProblem(upper, lower), Point(x=step, y=step, v=step)),
        x0=np.full(features, -3.0, "float32"),
        y0={"weight": np.zeros(features, "float32"), "bias": np.zeros((), "float32")},
        clients=clients, load_client=load_client, example=(one, one), rounds=300, every=300,
        seed=seed,
    )  # fmt: skip


# Images


@cache
def digits() -> Sample:
    """Return scikit-learn's digits as rows of numbers, and their labels."""
    images = load("digits")
    return images.train_images.reshape(-1, 64) / np.float32(255), images.train_labels


def unlike(clients: int, rng: Rng) -> list[Sample]:
    """Deal digits to clients by Dirichlet shares of labels and by a brightness of their own."""
    images, labels = digits()
    spread, light = log_uniform(0.05, 50, rng), log_uniform(0.01, 1, rng)
    found = []
    for rows in sizes(clients, rng):
        share = rng.dirichlet(np.full(10, spread))[labels]
        chosen = rng.choice(len(labels), 2 * rows, p=share / share.sum())
        own = np.exp(light * rng.normal()).astype("float32")
        found.append((images[chosen] * own, labels[chosen].astype("int32")))
    return found


def cross_entropy(x: Any, y: Any, batch: Any) -> Any:
    """Return the loss of a hidden layer x and a head y, as in examples/flower_app."""
    images, labels = batch
    hidden = jnp.tanh(images @ x["weight"] + x["bias"])
    logits = hidden @ y["weight"] + y["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def regularised(x: Any, y: Any, batch: Any) -> Any:
    """Return the same, strongly convex in y."""
    squares = jnp.sum(y["weight"] ** 2) + jnp.sum(y["bias"] ** 2)
    return cross_entropy(x, y, batch) + 0.01 * squares


def representation(
    method: Callable[..., Any], clients: int, cohort: int | None, unequal: bool, seed: int
) -> Deployment:
    """Return the deployment of examples/flower_app: a hidden layer and a head."""
    rng = np.random.default_rng(seed)
    rows = unlike(clients, rng)
    steps = Point(x=0.5, y=0.5, v=0.1)
    one = np.zeros((1, 64), "float32"), np.zeros(1, "int32")
    return Deployment(
        algorithm=method(BilevelProblem(cross_entropy, regularised), steps, steps),
        x0={"weight": rng.normal(size=(64, 32)).astype("float32") / 8,
            "bias": np.zeros(32, "float32")},
        y0={"weight": np.zeros((32, 10), "float32"), "bias": np.zeros(10, "float32")},
        clients=clients,
        load_client=lambda i, node: ((rows[i][0][::2], rows[i][1][::2]),
                                     (rows[i][0][1::2], rows[i][1][1::2])),
        example=(one, one), rounds=300, batch_size=16, every=300, seed=seed,
        sampler=None if cohort is None else without_replacement(cohort),
        local_work=fixed(rng.integers(1, 6, clients).tolist()) if unequal else None,
    )  # fmt: skip


KINDS: dict[str, Callable[[int], Deployment]] = {
    "FederatedLogistic, 6 clients, 4 features": partial(estimator, FederatedLogistic, 6, 4),
    "FederatedLogistic, 12 clients, 30 features": partial(estimator, FederatedLogistic, 12, 30),
    "FederatedRidge, 6 clients, 30 features": partial(estimator, FederatedRidge, 6, 30),
    "FederatedRidge, 20 clients, 30 features": partial(estimator, FederatedRidge, 20, 30),
    "two losses, 6 clients, 80 features": partial(losses, 6, 80),
    "two losses, 12 clients, 80 features": partial(losses, 12, 80),
    "hidden layer, 6 clients": partial(representation, simfbo, 6, None, False),
    "hidden layer, 10 of 40 clients": partial(representation, simfbo, 40, 10, False),
    "hidden layer, 10 clients, 1 to 5 steps, ShroFBO": partial(
        representation, shrofbo, 10, None, True
    ),
    "hidden layer, 10 clients, MimeFBO": partial(representation, mimefbo, 10, None, False),
}


def measure(make: Callable[[int], Deployment], seed: int) -> dict[str, Any]:
    """Return what a run warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClientWarning)
        history = simulate(make(seed), detect_anomalies=True)
    keys = ("round", "about", "clients", "share")
    said = [{key: line[key] for key in keys} for line in history.warnings]
    return {"seed": seed, "end": (history.end or {})["status"], "warnings": said}


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0..49")
    parser.add_argument("--only", default="")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", False)  # as nodes run
    keep_compilations()
    text = options.output.read_text() if options.output.exists() else "{}"
    found: dict[str, Any] = json.loads(text)
    for name, make in KINDS.items():
        runs = found.setdefault(name, [])
        for seed in checked_seeds(seeds_of(options.seeds)) if options.only in name else ():
            if seed not in [run["seed"] for run in runs]:
                runs.append(measure(make, seed))
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        said = [run for run in runs if run["warnings"]]
        kinds = sorted(line["about"] for run in said for line in run["warnings"])
        print(f"{name}: {len(said)} of {len(runs)} warn {kinds}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
