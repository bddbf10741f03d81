"""The paper's theorems, measured on quadratics with known solutions.

Theorem 1: with its step sizes, the mean of ||grad Phi||^2 over T rounds falls as

    (n - P)/n * sqrt(tau / (P T)) + 1 / sqrt(P tau T) + 1 / (tau T)

up to constants: with identical clients or full participation, P and tau have the same speed-up.
Theorems 1 and 2: under unequal, fixed local work SimFBO ends at the stationary point of Phi~, whose
weights are w_i = p_i ||a_i||_1 / sum_j p_j ||a_j||_1, and ShroFBO at that of Phi, up to a drift of
the order of the local steps.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from simfbo.algorithms import mimefbo, shrofbo, simfbo
from simfbo.config.build import build_local_work
from simfbo.config.run import LocalWorkConfig
from simfbo.core.local_work import constant
from simfbo.core.method import Method
from simfbo.core.problem import Point
from simfbo.core.sampling import everyone, without_replacement
from simfbo.engines import SimulatedFederation
from simfbo.errors import UserError
from simfbo.experiments.grid import Cell, compute
from simfbo.experiments.results import Resources
from simfbo.runs.files import Json
from simfbo.runs.history import History
from simfbo.runs.runner import run
from simfbo.tasks import Task
from simfbo.tasks._quadratic import random_quadratic


def measured(
    cells: Sequence[Cell],
    function: Callable[[Cell], dict[str, float]],
    file: Path,
    resources: Resources,
) -> list[Cell]:
    """Compute the results of cells in double precision; those in the file are reused."""
    with jax.enable_x64(True):
        return compute(cells, function, file, resources.on_progress)


def speedup_cells(tree: Json) -> list[Cell]:
    """Return the grid of `speedup`: heterogeneity x P x tau x seeds."""
    fixed_settings = {key: tree[key] for key in ("clients", "rounds", "noise", "scale")}
    return [
        {**fixed_settings, "heterogeneity": h, "P": P, "tau": tau, "seed": seed}
        for h in tree["heterogeneities"]
        for P in tree["cohorts"]
        for tau in tree["taus"]
        for seed in tree["seeds"]
    ]


def speedup(cell: Cell) -> dict[str, float]:
    """Return the mean of ||grad Phi||^2 over the rounds, with Theorem 1's step sizes.

    gamma_x = scale sqrt(P / (tau T)), gamma_y = gamma_v = 2 gamma_x, eta = scale / (tau sqrt T).
    """
    shared = {key: value for key, value in cell.items() if key != "seed"}
    algorithm, federation, task = _speedup_parts(tuple(shared.items()))
    history = _run(algorithm, federation, task, cell["rounds"], cell["seed"], every=1)
    return {"mean_grad_norm_squared": float(np.mean(history.column("grad_norm_squared")))}


@lru_cache(maxsize=1)  # seeds share a compiled program
def _speedup_parts(settings: tuple[Any, ...]) -> tuple[Method, SimulatedFederation, Task]:
    """Build the algorithm, federation and task that all seeds of a cell share."""
    cell = dict(settings)
    T, P, tau, scale = cell["rounds"], cell["P"], cell["tau"], cell["scale"]
    gamma, eta = scale * (P / (tau * T)) ** 0.5, scale / (tau * T**0.5)
    quadratic = random_quadratic(cell["clients"], heterogeneity=cell["heterogeneity"])
    task = quadratic.task(samples=50, noise=cell["noise"], batch_size=1)
    server = Point(gamma, 2 * gamma, 2 * gamma)
    algorithm = simfbo(task.problem, Point(x=eta, y=eta, v=eta), server)
    return algorithm, SimulatedFederation(task.data, without_replacement(P), constant(tau)), task


def mismatch_cells(tree: Json) -> list[Cell]:
    """Return the grid of `objective-mismatch`: case x method x local step x seeds."""
    return [
        {**local_work(case), "rounds": tree["rounds"], "method": name, "eta": eta, "seed": seed}
        for case in tree["cases"].values()
        for name in case["methods"]
        for eta in tree["etas"]
        for seed in tree["seeds"]
    ]


def local_work(case: Json) -> Json:
    """Return the local work in a case of `objective-mismatch`: tau_i and local rules."""
    return {key: case[key] for key in ("taus", "rules") if key in case}


def mismatch(cell: Cell) -> dict[str, float]:
    """Return the final distances to the points of Phi and Phi~, and the distance between the two.

    With full participation and full batches, only the quadratic is random.
    """
    eta, n = cell["eta"], len(cell["taus"])
    work = build_local_work(LocalWorkConfig(tau=cell["taus"], rules=cell.get("rules", [])))
    norms = work(jax.random.key(0), n).norm
    quadratic = random_quadratic(n, seed=cell["seed"])
    truth, effective_point = (
        quadratic.closed_form().x(),
        quadratic.closed_form(norms / norms.sum()).x(),
    )
    task = quadratic.task()
    share = 1 / norms.mean()  # a round's step does not grow with the work
    server = Point(0.1 * share, 0.3 * share, 0.3 * share)
    factory = {"simfbo": simfbo, "shrofbo": shrofbo, "mimefbo": mimefbo}[cell["method"]]
    algorithm = factory(task.problem, Point(x=eta, y=eta, v=eta), server)
    federation = SimulatedFederation(task.data, everyone(), work)
    x = _run(algorithm, federation, task, cell["rounds"], 0, every=cell["rounds"]).state.x
    return {
        "to_phi": float(np.linalg.norm(x - truth)),
        "to_phi_tilde": float(np.linalg.norm(x - effective_point)),
        "apart": float(np.linalg.norm(truth - effective_point)),
    }


def _run(
    algorithm: Method,
    federation: SimulatedFederation,
    task: Task,
    rounds: int,
    seed: int,
    every: int,
) -> History:
    """Run a cell of a grid; raise if the run was interrupted or diverged."""
    history = run(
        algorithm,
        federation,
        task.x0,
        task.y0,
        rounds=rounds,
        seed=seed,
        evaluate=task.evaluate,
        every=every,
    )
    status = (history.end or {}).get("status")
    if status == "interrupted":
        raise KeyboardInterrupt
    if status != "finished":
        raise UserError(f"A run of the experiment {status}: its steps are too large for its grid.")
    return history
