"""The laws of algorithms; each measure takes a factory and returns a number."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.checks._law import (
    GAMMA,
    LARGE,
    MEDIUM,
    SMALL,
    Factory,
    Law,
    end,
    exactly,
    gap,
    run_rounds,
    small_task,
)
from simfbo.core import trees
from simfbo.core.local_work import constant, fixed, uniform
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.core.sampling import AnySampler, everyone, without_replacement
from simfbo.engines.debug import DebugFederation, cost
from simfbo.engines.simulated import SimulatedFederation
from simfbo.tasks._quadratic import random_quadratic


def repeatable(factory: Factory) -> float:
    """Measure the difference of two runs with the same keys."""
    task = small_task(samples=6, noise=1.0, batch_size=2)
    algorithm = factory(task.problem, GAMMA, GAMMA)
    start = algorithm.init(task.x0, task.y0)
    copy = jax.tree.map(np.array, start)
    runs = [
        run_rounds(
            algorithm,
            SimulatedFederation(task.data, without_replacement(2), uniform(1, 3)),
            task,
            3,
            start,
        )
        for _ in range(2)
    ]
    return max(gap(*runs), gap(start, copy))


def engines_agree(factory: Factory) -> float:
    """Measure the difference of the compiled and the debug engine after two rounds."""
    task = small_task(samples=6, noise=1.0, batch_size=2)
    algorithm = factory(task.problem, GAMMA, GAMMA)
    parts = (task.data, without_replacement(2), uniform(1, 3))
    return gap(
        *(
            run_rounds(algorithm, engine(*parts), task, 2)
            for engine in (SimulatedFederation, DebugFederation)
        )
    )


def ledger_is_cost(factory: Factory) -> float:
    """Measure how far floats and rounds of three iterations are from three times the cost."""
    task = small_task()
    algorithm = factory(task.problem, GAMMA, GAMMA)
    federation = SimulatedFederation(task.data, without_replacement(2))
    expected = cost(algorithm, federation, task.x0, task.y0).total
    run_rounds(algorithm, federation, task, 3)
    total = federation.ledger.total
    fields = ("rounds", "floats_up", "floats_down", "bytes_up", "bytes_down")
    return max(abs(getattr(total, name) - 3 * getattr(expected, name)) for name in fields)


def any_pytree(factory: Factory) -> float:
    """Measure how the iterates change if x and y are nested pytrees."""
    task = small_task()

    def flat(tree: PyTree) -> PyTree:
        return jnp.concatenate(jax.tree.leaves(tree))

    def nested(vector: Any) -> PyTree:
        return {"a": vector[:1], "b": (vector[1:],)}

    losses = task.problem.upper, task.problem.lower
    upper, lower = (lambda x, y, batch, f=f: f(flat(x), flat(y), batch) for f in losses)
    wrapped = BilevelProblem(upper, lower)
    other = task._replace(problem=wrapped, x0=nested(task.x0), y0=nested(task.y0))
    plain, tree = (
        end(factory(t.problem, GAMMA, GAMMA), SimulatedFederation(t.data), t, 3)
        for t in (task, other)
    )
    return gap(plain, [flat(z) for z in tree if z is not None])


def identical_clients(factory: Factory) -> float:
    """Measure the effect of sampling on the iterates if all clients are identical."""
    task = small_task(heterogeneity=0.0)
    algorithm = factory(task.problem, GAMMA, GAMMA)
    samplers = (everyone(), without_replacement(2))
    return gap(*(end(algorithm, SimulatedFederation(task.data, s), task, 5) for s in samplers))


def sends_changes(factory: Factory) -> float:
    """Measure how far weights that do not sum to one move a converged state."""
    task = small_task(heterogeneity=0.0, p=np.arange(1, 6))
    algorithm = factory(task.problem, LARGE, LARGE)
    everybody, few = (
        SimulatedFederation(task.data, s) for s in (everyone(), without_replacement(2))
    )
    solved = run_rounds(algorithm, everybody, task, 100)
    return gap(algorithm.point(solved), end(algorithm, few, task, 3, solved, everybody))


def finds_solution(factory: Factory) -> float:
    """Measure the distance to the closed form with heterogeneous clients, one local step each."""
    task = small_task()
    algorithm = factory(task.problem, LARGE, LARGE)
    return task.evaluate(end(algorithm, SimulatedFederation(task.data), task, 60))["x_error"]


def unequal_local_work(factory: Factory) -> float:
    """Measure the distance to the closed form with 1 to 9 small local steps per client."""
    task = small_task()
    algorithm = factory(task.problem, SMALL, MEDIUM)
    federation = SimulatedFederation(task.data, local_work=fixed([1, 2, 3, 5, 9]))
    return task.evaluate(end(algorithm, federation, task, 100))["x_error"]


def is_soba(factory: Factory) -> float:
    """Measure the distance to centralised SOBA, written in NumPy, after 20 iterations."""
    quadratic = random_quadratic(5, 3, 4, 1.0, seed=1)
    task, m = quadratic.task(), quadratic.closed_form()
    algorithm = factory(task.problem, GAMMA, GAMMA)
    point = end(algorithm, SimulatedFederation(task.data), task, 20)
    x, y, v = np.zeros(3), np.zeros(4), np.zeros(4)
    for _ in range(20):
        d_y, d_v = m.A @ y - m.B @ x - m.c, m.A @ v - m.C @ y + m.Ct
        d_x = m.D @ x - m.Ds + m.B.T @ v
        x, y, v = x - GAMMA.x * d_x, y - GAMMA.y * d_y, v - GAMMA.v * d_v
    return gap((x, y, v), point)


def one_step_ignores_eta(factory: Factory) -> float:
    """Measure the effect of the local step sizes with one local step."""
    task = small_task()
    federation = SimulatedFederation(task.data)
    methods = (factory(task.problem, Point(x=e, y=e, v=e), GAMMA) for e in (1e-3, 0.5))
    return gap(*(end(method, federation, task, 5) for method in methods))


def sampling_unbiased(factory: Factory) -> float:
    """Measure how far the mean over all cohorts of two is from full participation."""
    task = small_task(p=np.arange(1, 6))
    algorithm = factory(task.problem, GAMMA, GAMMA)
    before = SimulatedFederation(task.data)
    start = run_rounds(algorithm, before, task, 3)

    def after(sampler: AnySampler) -> Point[PyTree]:
        federation = SimulatedFederation(task.data, sampler, constant(3))
        return end(algorithm, federation, task, 1, start, before)

    pairs = [after(exactly(ids)) for ids in itertools.combinations(range(5), 2)]
    mean = trees.scale(1 / len(pairs), jax.tree.map(lambda *leaves: sum(leaves), *pairs))
    return gap(mean, after(everyone()))


def drift_is_linear(factory: Factory) -> float:
    """Measure how far the ratio of biases is from 2 when eta is halved, at worst of four."""
    task = small_task()
    federation = SimulatedFederation(task.data, local_work=fixed([1, 2, 3, 5, 9]))
    ends = []
    for eta in 0.02 * 0.5 ** np.arange(6):
        algorithm = factory(task.problem, Point(x=eta, y=eta, v=eta), MEDIUM)
        ends.append(np.asarray(end(algorithm, federation, task, 150).x))
    falls = np.linalg.norm(np.diff(np.stack(ends), axis=0), axis=1)
    if falls.max() < 1e-12:
        return 0.0  # no bias
    return float(np.abs(falls[:-1] / falls[1:] - 2).max())


def exact_at_any_step(factory: Factory) -> float:
    """Measure the distance to (x*, y*, v*) over three local step sizes, with unequal work."""
    quadratic = random_quadratic(5, 3, 4, 1.0, seed=1)
    task, truth = quadratic.task(), quadratic.closed_form()
    x = truth.x()
    best = x, truth.y(x), truth.v(x)
    federation = SimulatedFederation(task.data, local_work=fixed([1, 2, 3, 5, 9]))
    gaps = []
    for eta in (0.001, 0.01, 0.06):
        algorithm = factory(task.problem, Point(x=eta, y=eta, v=eta), MEDIUM)
        gaps.append(gap(best, end(algorithm, federation, task, 500)))
    return max(gaps)


LAWS = (
    Law("repeatable", "the same keys must give the same iterates", repeatable, 0.0),
    Law("engines agree", "compiled and debug engine must agree", engines_agree, 1e-10),
    Law("ledger is cost", "every iteration must send what `cost` says", ledger_is_cost, 0.0),
    Law("any pytree", "x and y may be any pytrees", any_pytree, 1e-12),
    Law(
        "identical clients", "sampling identical clients changes nothing", identical_clients, 1e-10
    ),
    Law("sends changes", "clients must send changes, not iterates", sends_changes, 1e-4),
    Law("finds the solution", "it must reach the closed form", finds_solution, 1e-3),
    Law(
        "unequal local work",
        "unequal local work must not move the solution",
        unequal_local_work,
        1e-2,
    ),
)

SINGLE_LOOP_LAWS = (
    Law("centralised SOBA", "one local step by everyone must be SOBA", is_soba, 1e-12),
    Law("eta at one step", "with one local step eta must not matter", one_step_ignores_eta, 1e-12),
    Law("unbiased sampling", "the mean over cohorts must be everyone", sampling_unbiased, 1e-12),
    Law("linear drift", "halving eta must halve the drift's bias", drift_is_linear, 0.3),
    Law(
        "exact at any local step",
        "the solution must be a fixed point for any eta and unequal local work",
        exact_at_any_step,
        1e-12,
    ),
)
