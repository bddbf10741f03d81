"""The definition of a law, and the small quadratics on which laws are checked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from simfbo.core.method import Method
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.core.sampling import AnySampler, Cohort, constant
from simfbo.engines.base import Engine
from simfbo.tasks._quadratic import random_quadratic
from simfbo.tasks.task import Task

Factory = Callable[[BilevelProblem, Point[float], Point[float]], Method]
Measure = Callable[[Factory], float]

GAMMA = Point(x=0.1, y=0.2, v=0.2)
LARGE = Point(x=0.2, y=0.4, v=0.4)  # the largest stable steps: few rounds suffice
MEDIUM = Point(x=0.04, y=0.08, v=0.08)  # for messages that add up about four local steps
SMALL = Point(x=1e-4, y=1e-4, v=1e-4)


class Law(NamedTuple):
    """A law that algorithms must obey.

    Attributes:
        name: of the law.
        says: the requirement.
        measure: (factory) -> the number measured.
        limit: the largest number that obeys the law.
    """

    name: str
    says: str
    measure: Measure
    limit: float


def small_task(clients: int = 5, heterogeneity: float = 1.0, p: Any = None, **noise: Any) -> Task:
    """Build the small quadratic on which laws are checked."""
    return random_quadratic(clients, 3, 4, heterogeneity, seed=1).task(p, **noise)


def run_rounds(
    algorithm: Method,
    federation: Engine,
    task: Task,
    rounds: int,
    state: PyTree = None,
    before: Engine | None = None,
) -> PyTree:
    """Run some rounds and return the state.

    Args:
        algorithm: the method.
        federation: it runs on.
        task: the problem.
        rounds: the number of rounds.
        state: the initial state; at the task's start by default.
        before: the federation that led to `state`, whose client memory is taken over.
    """
    if state is None or federation is not before:
        federation.remember(algorithm, task.x0, task.y0)
    if before is not None:
        federation.client_memory = before.client_memory
    state = algorithm.init(task.x0, task.y0) if state is None else state
    for t in range(rounds):
        state = algorithm.round(state, federation, jax.random.fold_in(jax.random.key(7), t))
    return state


def gap(a: Any, b: Any) -> float:
    """Return the largest difference of two states; infinite if one is not finite."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    gap = max(float(np.abs(np.ravel(u) - np.ravel(w)).max()) for u, w in leaves)
    return gap if np.isfinite(gap) else float("inf")


def end(
    algorithm: Method, federation: Engine, task: Task, rounds: int, *start: Any
) -> Point[PyTree]:
    """Return x, y and v after some rounds; arguments as in `run_rounds`."""
    return algorithm.point(run_rounds(algorithm, federation, task, rounds, *start))


def exactly(ids: tuple[int, ...]) -> AnySampler:
    """Return a sampler that always samples these clients, weighted as if by chance."""

    @constant
    def sample(key: jax.Array, p: np.ndarray) -> Cohort:
        return Cohort(np.array(ids, np.int32), p[list(ids)] * (len(p) / len(ids)))

    return sample
