"""The laws of client memory; each measure takes a factory and returns a number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.checks._law import (
    GAMMA,
    MEDIUM,
    SMALL,
    Factory,
    Law,
    exactly,
    gap,
    run_rounds,
    small_task,
)
from simfbo.core.local_work import fixed, uniform
from simfbo.core.problem import PyTree
from simfbo.core.sampling import without_replacement
from simfbo.engines.base import Engine
from simfbo.engines.debug import DebugFederation
from simfbo.engines.simulated import SimulatedFederation
from simfbo.tasks._quadratic import random_quadratic


def memory_moves_when_asked(factory: Factory) -> float:
    """Measure changes in the memory of clients that were not sampled."""
    task = small_task()
    algorithm = factory(task.problem, GAMMA, GAMMA)
    federation = SimulatedFederation(task.data, exactly((1, 3)), fixed([1, 2, 3, 5, 9]))
    start = run_rounds(algorithm, federation, task, 1)
    before = federation.client_memory
    run_rounds(algorithm, federation, task, 2, start, federation)
    return _gap_of_clients(before, federation.client_memory, [0, 2, 4])


def refused_changes_nothing(factory: Factory) -> float:
    """Measure changes in the memory of a client whose replies are rejected."""
    task = small_task()
    algorithm = factory(task.problem, GAMMA, GAMMA)
    federation = DebugFederation(task.data)
    federation.wire = lambda replies: [_with_nan(r) if r.client == 2 else r for r in replies]
    state = run_rounds(algorithm, federation, task, 0)
    before = federation.client_memory
    run_rounds(algorithm, federation, task, 2, state, federation)
    return _gap_of_clients(before, federation.client_memory, [2])


def order_does_not_matter(factory: Factory) -> float:
    """Measure the effect of renumbering the clients on iterates and memories."""
    quadratic, order = random_quadratic(5, 3, 4, 1.0, seed=1), np.array([3, 0, 4, 1, 2])
    tau, p = np.array([1, 2, 3, 5, 9]), np.arange(1, 6)
    ends = []
    for permutation in (np.arange(5), order):
        task = quadratic._make(a[permutation] for a in quadratic).task(p[permutation])
        federation = SimulatedFederation(task.data, local_work=fixed(tau[permutation].tolist()))
        algorithm = factory(task.problem, SMALL, MEDIUM)
        state = run_rounds(algorithm, federation, task, 3)
        inverse = np.argsort(permutation)
        back = jax.tree.map(
            lambda a, inverse=inverse: np.asarray(a)[inverse], federation.client_memory
        )
        ends.append((algorithm.point(state), back))
    return gap(*ends)


def resumes_exactly(factory: Factory) -> float:
    """Measure how a run resumed from its state and client memory differs."""
    task = small_task(samples=6, noise=1.0, batch_size=2)

    def federation() -> Engine:
        return SimulatedFederation(task.data, without_replacement(2), uniform(2, 4))

    whole, cut, again = federation(), federation(), federation()
    algorithm = factory(task.problem, GAMMA, GAMMA)
    state = run_rounds(algorithm, whole, task, 3)
    half = jax.tree.map(jnp.array, run_rounds(algorithm, cut, task, 3))
    ends = run_rounds(algorithm, whole, task, 3, state, whole), whole.client_memory
    fresh = factory(task.problem, GAMMA, GAMMA)
    resumed = run_rounds(fresh, again, task, 3, half, cut), again.client_memory
    return gap(ends, resumed)


def _with_nan(reply: Any) -> Any:
    return reply._replace(arrays={name: np.nan * np.asarray(a) for name, a in reply.arrays.items()})


def _gap_of_clients(before: PyTree, after: PyTree, clients: list[int]) -> float:
    rows = [jax.tree.map(lambda a: np.asarray(a)[clients], tree) for tree in (before, after)]
    return gap(*rows) if jax.tree.leaves(rows) else 0.0


MEMORY_LAWS = (
    Law(
        "asked",
        "only sampled clients change their memory",
        memory_moves_when_asked,
        0.0,
    ),
    Law("refused", "a rejected reply leaves the memory unchanged", refused_changes_nothing, 0.0),
    Law("order", "how clients are numbered must not matter", order_does_not_matter, 1e-12),
    Law("resumed", "a run resumed from state and memory must not differ", resumes_exactly, 0.0),
)
