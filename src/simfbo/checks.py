"""The laws that an algorithm must obey, as checks to run on your own algorithm.

A law is a function that takes an algorithm's factory, tries it on small quadratics with a closed
form in double precision, and returns a number that must not exceed a limit. A method that breaks a
law by construction declares it in `Algorithm.known_violations`; then the check demands that it
does break the law.

The factory is called as `factory(problem, local, server)` with step sizes for x, y and v:
the clients' and the server's.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core import trees
from simfbo.core.codecs import Codec
from simfbo.core.codecs import laws as codec_laws
from simfbo.core.federation import Algorithm
from simfbo.core.local_work import constant, fixed, uniform
from simfbo.core.problem import BilevelProblem, Point, PyTree
from simfbo.core.sampling import Cohort, Sampler, everyone, without_replacement
from simfbo.engines.base import Engine
from simfbo.engines.counting import cost
from simfbo.engines.debug import DebugFederation
from simfbo.engines.simulated import SimulatedFederation
from simfbo.tasks._quadratic import random_quadratic
from simfbo.tasks.task import Task

__all__ = [
    "CODEC_LAWS",
    "LAWS",
    "SINGLE_LOOP_LAWS",
    "CheckError",
    "Finding",
    "Law",
    "check_algorithm",
    "check_codec",
    "describe",
    "examine",
]

Factory = Callable[[BilevelProblem, Point[float], Point[float]], Algorithm]
Measure = Callable[[Factory], float]

CODEC_LAWS = codec_laws.CODEC_LAWS
"""The laws that codecs must obey; see `check_codec`."""
GAMMA = Point(x=0.1, y=0.2, v=0.2)
LARGE = Point(x=0.2, y=0.4, v=0.4)  # as large as the quadratics allow: few rounds suffice
MEDIUM = Point(x=0.04, y=0.08, v=0.08)  # for messages that add up about four local steps
SMALL = Point(x=1e-4, y=1e-4, v=1e-4)


class Law(NamedTuple):
    """A law that algorithms must obey.

    Attributes:
        name: of the law.
        says: what it demands.
        measure: (factory) -> the number measured.
        limit: the largest number that obeys the law.
    """

    name: str
    says: str
    measure: Measure
    limit: float


class Finding(NamedTuple):
    """The outcome of one law.

    Attributes:
        law: which law.
        measured: the number measured.
        passed: whether the law holds, or is violated as declared.
        violation: the reason, if the algorithm declares that it violates the law.
    """

    law: Law
    measured: float
    passed: bool
    violation: str | None


class CheckError(AssertionError):
    """An algorithm broke laws; the message lists them."""


def check_algorithm(factory: Factory, laws: Sequence[Law] | None = None) -> list[Finding]:
    """Test an algorithm against laws; raise `CheckError` if one is broken.

    Args:
        factory: called as `factory(problem, local, server)`; returns the algorithm.
        laws: which to test; `LAWS` by default. `SINGLE_LOOP_LAWS` hold for SimFBO's family.

    Returns:
        A finding per law, with the number measured.

    Example:
        >>> from simfbo.algorithms import simfbo
        >>> [finding.passed for finding in check_algorithm(simfbo, [LAWS[0]])]
        [True]
    """
    findings = [examine(factory, law) for law in (LAWS if laws is None else laws)]
    broken = [f for f in findings if not f.passed]
    if broken:
        raise CheckError("\n".join(map(describe, broken)))
    return findings


def check_codec(codec: Codec) -> dict[str, float]:
    """Test a codec against `CODEC_LAWS`; raise `CheckError` if it breaks one.

    A codec that says it is biased must break the law "unbiased", and does.

    Args:
        codec: the codec.

    Returns:
        The number measured for each law, by name.

    Example:
        >>> from simfbo import codecs
        >>> check_codec(codecs.float32())["variance"]
        0.0
    """
    found = {law.name: law.measure(codec) for law in CODEC_LAWS}
    broken = [
        f"{law.name}: {law.says} (measured {found[law.name]:.2g}, limit {law.limit:.2g})."
        for law in CODEC_LAWS
        if (found[law.name] <= law.limit) == (law.name == "unbiased" and not codec.unbiased)
    ]
    if broken:
        raise CheckError("\n".join(broken))
    return found


def examine(factory: Factory, law: Law) -> Finding:
    """Test an algorithm against one law."""
    with jax.enable_x64(True):
        violation = factory(_task().problem, GAMMA, GAMMA).known_violations.get(law.name)
        measured = float(law.measure(factory))
    holds = bool(measured <= law.limit)
    return Finding(law, measured, holds if violation is None else not holds, violation)


def describe(finding: Finding) -> str:
    """Describe a finding in one sentence."""
    law = finding.law
    numbers = f"measured {finding.measured:.2g}, limit {law.limit:.2g}"
    if finding.violation and not finding.passed:
        return f"{law.name}: declared as violated ({finding.violation}) but it holds ({numbers})."
    if finding.violation:
        return f"{law.name}: violated as declared: {finding.violation} ({numbers})."
    return f"{law.name}: {law.says} ({numbers})."


def _task(clients: int = 5, heterogeneity: float = 1.0, p: Any = None, **noise: Any) -> Task:
    """Return the small quadratic on which laws are tried."""
    return random_quadratic(clients, 3, 4, heterogeneity, seed=1).task(p, **noise)


def _run(
    algorithm: Algorithm, federation: Engine, task: Task, rounds: int, state: PyTree = None
) -> PyTree:
    """Return the state after some rounds."""
    state = algorithm.init(task.x0, task.y0) if state is None else state
    for t in range(rounds):
        state = algorithm.round(state, federation, jax.random.fold_in(jax.random.key(7), t))
    return state


def _gap(a: Any, b: Any) -> float:
    """Return the largest difference of two states, infinite where they are not finite."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    gap = max(float(jnp.abs(jnp.ravel(u) - jnp.ravel(w)).max()) for u, w in leaves)
    return gap if np.isfinite(gap) else float("inf")


def _variables(state: PyTree) -> tuple[PyTree, ...]:
    """Return the variables of a state."""
    return tuple(getattr(state, name) for name in ("x", "y", "v") if hasattr(state, name))


def repeatable(factory: Factory) -> float:
    """Return how much two runs with the same keys differ."""
    task = _task(samples=6, noise=1.0, batch_size=2)
    algorithm = factory(task.problem, GAMMA, GAMMA)
    start = algorithm.init(task.x0, task.y0)
    kept = jax.tree.map(np.array, start)
    runs = [
        _run(
            algorithm,
            SimulatedFederation(task.data, without_replacement(2), uniform(1, 3)),
            task,
            3,
            start,
        )
        for _ in range(2)
    ]
    return max(_gap(*runs), _gap(start, kept))


def engines_agree(factory: Factory) -> float:
    """Return how much the compiled and the debug engine differ after two rounds."""
    task = _task(samples=6, noise=1.0, batch_size=2)
    algorithm = factory(task.problem, GAMMA, GAMMA)
    parts = (task.data, without_replacement(2), uniform(1, 3))
    return _gap(
        *(
            _run(algorithm, engine(*parts), task, 2)
            for engine in (SimulatedFederation, DebugFederation)
        )
    )


def ledger_is_cost(factory: Factory) -> float:
    """Return by how many floats and rounds three iterations differ from three times the cost."""
    task = _task()
    algorithm = factory(task.problem, GAMMA, GAMMA)
    federation = SimulatedFederation(task.data, without_replacement(2))
    expected = cost(algorithm, federation, task.x0, task.y0).total
    _run(algorithm, federation, task, 3)
    got = federation.ledger.total
    fields = ("rounds", "floats_up", "floats_down", "bytes_up", "bytes_down")
    return max(abs(getattr(got, name) - 3 * getattr(expected, name)) for name in fields)


def any_pytree(factory: Factory) -> float:
    """Return how much the iterates change when x and y come as nested pytrees."""
    task = _task()

    def flat(tree: PyTree) -> PyTree:
        return jnp.concatenate(jax.tree.leaves(tree))

    def nested(vector: Any) -> PyTree:
        return {"a": vector[:1], "b": (vector[1:],)}

    wrapped = BilevelProblem(
        *(lambda x, y, batch, f=f: f(flat(x), flat(y), batch) for f in task.problem)
    )
    other = task._replace(problem=wrapped, x0=nested(task.x0), y0=nested(task.y0))
    ends = [
        _run(factory(t.problem, GAMMA, GAMMA), SimulatedFederation(t.data), t, 3)
        for t in (task, other)
    ]
    plain, tree = map(_variables, ends)
    return _gap(plain, tuple(map(flat, tree)))


def identical_clients(factory: Factory) -> float:
    """Return how much sampling changes the iterates where all clients are the same."""
    task = _task(heterogeneity=0.0)
    algorithm = factory(task.problem, GAMMA, GAMMA)
    samplers = (everyone(), without_replacement(2))
    runs = [_run(algorithm, SimulatedFederation(task.data, s), task, 5) for s in samplers]
    return _gap(*map(_variables, runs))


def sends_changes(factory: Factory) -> float:
    """Return how far a cohort whose weights do not sum to one throws a converged state."""
    task = _task(heterogeneity=0.0, p=np.arange(1, 6))
    algorithm = factory(task.problem, LARGE, LARGE)
    solved = _run(algorithm, SimulatedFederation(task.data), task, 100)
    after = _run(algorithm, SimulatedFederation(task.data, without_replacement(2)), task, 3, solved)
    return _gap(_variables(solved), _variables(after))


def finds_solution(factory: Factory) -> float:
    """Return the distance from the closed form on clients that differ, one local step each."""
    task = _task()
    algorithm = factory(task.problem, LARGE, LARGE)
    return task.evaluate(_run(algorithm, SimulatedFederation(task.data), task, 60))["x_error"]


def unequal_local_work(factory: Factory) -> float:
    """Return the distance from the closed form where clients take 1 to 9 small local steps."""
    task = _task()
    algorithm = factory(task.problem, SMALL, MEDIUM)
    federation = SimulatedFederation(task.data, local_work=fixed([1, 2, 3, 5, 9]))
    return task.evaluate(_run(algorithm, federation, task, 100))["x_error"]


def is_soba(factory: Factory) -> float:
    """Return the distance from centralised SOBA, written in NumPy, after 20 iterations."""
    quadratic = random_quadratic(5, 3, 4, 1.0, seed=1)
    task, m = quadratic.task(), quadratic.closed_form()
    state = _run(factory(task.problem, GAMMA, GAMMA), SimulatedFederation(task.data), task, 20)
    x, y, v = np.zeros(3), np.zeros(4), np.zeros(4)
    for _ in range(20):
        d_y, d_v = m.A @ y - m.B @ x - m.c, m.A @ v - m.C @ y + m.Ct
        d_x = m.D @ x - m.Ds + m.B.T @ v
        x, y, v = x - GAMMA.x * d_x, y - GAMMA.y * d_y, v - GAMMA.v * d_v
    return _gap((x, y, v), _variables(state))


def one_step_ignores_eta(factory: Factory) -> float:
    """Return how much the local step sizes matter where clients take one local step."""
    task = _task()
    ends = [
        _run(
            factory(task.problem, Point(x=e, y=e, v=e), GAMMA),
            SimulatedFederation(task.data),
            task,
            5,
        )
        for e in (1e-3, 0.5)
    ]
    return _gap(*map(_variables, ends))


def sampling_unbiased(factory: Factory) -> float:
    """Return how far the mean over all cohorts of two is from everyone taking part."""
    task = _task(p=np.arange(1, 6))
    algorithm = factory(task.problem, GAMMA, GAMMA)
    start = _run(algorithm, SimulatedFederation(task.data), task, 3)

    def after(sampler: Sampler) -> tuple[PyTree, ...]:
        federation = SimulatedFederation(task.data, sampler, constant(3))
        return _variables(_run(algorithm, federation, task, 1, start))

    pairs = [after(_exactly(ids)) for ids in itertools.combinations(range(5), 2)]
    mean = trees.scale(1 / len(pairs), jax.tree.map(lambda *leaves: sum(leaves), *pairs))
    return _gap(mean, after(everyone()))


def drift_is_linear(factory: Factory) -> float:
    """Return how far from 2 the bias falls when eta is halved, at worst over four halvings."""
    task = _task()
    federation = SimulatedFederation(task.data, local_work=fixed([1, 2, 3, 5, 9]))
    ends = []
    for eta in 0.02 * 0.5 ** np.arange(6):
        algorithm = factory(task.problem, Point(x=eta, y=eta, v=eta), MEDIUM)
        ends.append(np.asarray(_run(algorithm, federation, task, 150).x))
    falls = np.linalg.norm(np.diff(np.stack(ends), axis=0), axis=1)
    return float(np.abs(falls[:-1] / falls[1:] - 2).max())


def _exactly(ids: tuple[int, ...]) -> Sampler:
    """Return the sampler that always draws these clients, weighted as if they had been drawn."""

    def sample(key: jax.Array, p: np.ndarray) -> Cohort:
        return Cohort(np.array(ids, np.int32), p[list(ids)] * (len(p) / len(ids)))

    return sample


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
"""The laws that every algorithm must obey, or declare in `known_violations`."""

SINGLE_LOOP_LAWS = (
    Law("centralised SOBA", "one local step by everyone must be SOBA", is_soba, 1e-12),
    Law("eta at one step", "with one local step eta must not matter", one_step_ignores_eta, 1e-12),
    Law("unbiased sampling", "the mean over cohorts must be everyone", sampling_unbiased, 1e-12),
    Law("linear drift", "halving eta must halve the drift's bias", drift_is_linear, 0.3),
)
"""Further laws, for single-loop methods with steps of clients and server, as SimFBO."""
