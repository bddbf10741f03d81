"""Tuning-free step sizes: Yang, Ban, Huang, Ma, Ji, "Tuning-Free Bilevel Optimization: New
Algorithms and Convergence Analysis", ICLR 2025, S-TFBO, for federated methods with server steps:
our reading of the abstract.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from simfbo.algorithms.steps.auto import Plan
from simfbo.core import Federation, Method, Point, Wrapper, trees
from simfbo.core.problem import PyTree, Scalar
from simfbo.errors import UserError

Build = Callable[[Plan], Method]


class Gathered(NamedTuple):
    """The rule's state: a^2, b^2 and c^2, of x, y and v, and the iteration count."""

    squares: Point[jax.Array]
    iterations: jax.Array


class TuningFree(Wrapper):
    """A method with tuning-free step sizes; `tuning_free` has the equations."""

    build: Build = eqx.field(static=True)
    rule: Any = eqx.field(static=True)

    def init(self, x: PyTree, y: PyTree) -> Any:
        state = self.inner.init(x, y)
        _gathered(state)
        return state

    def round(self, state: Any, federation: Federation, key: jax.Array) -> Any:
        work = federation.mean_norm(key)
        eta = _local_sizes(_gathered(state), 1.0 if work is None else work)
        if not isinstance(eta.x, Tracer):
            eta = Point(*map(float, eta))
        return self.build(Plan(eta, self.rule, eta)).round(state, federation, key)


def tuning_free(build: Build, initial: Point[float] = Point(1.0, 1.0, 1.0)) -> Method:
    """Use tuning-free step sizes in a method with server steps.

    Our reading of the abstract of S-TFBO: the algorithm in the paper may differ. Every step size is
    the inverse root of the sum of the squared norms of its directions so far, as in AdaGrad-Norm,
    and that of x also depends on the slower of y and v. With d the directions of the server,

        b^2 += ||d_y||^2,    c^2 += ||d_v||^2,    phi = max(b, c),    a^2 += ||d_x||^2;
        y -= d_y / b,        v -= d_v / phi,      x -= d_x / (a phi)

    in every iteration, without measurements or additional messages.

    The clients' step sizes are those of the server before the exchange, divided by the mean local
    work if the server knows it. They are zero in the first round, when the sizes of directions are
    unknown, and without effect if clients take one local step.

    Args:
        build: (plan) -> the method with these steps, as
            `lambda plan: simfbo(problem, plan.local, plan.server)`.
        initial: a, b and c, for x, y and v. They have no effect if they are small relative to the
            first directions; large numbers reduce the first steps.

    Returns:
        The method; its state is that of the method with these steps.

    Example:
        >>> from simfbo import SimulatedFederation, run
        >>> from simfbo.algorithms import simfbo
        >>> from simfbo.tasks import quadratic
        >>> task = quadratic()
        >>> method = tuning_free(lambda plan: simfbo(task.problem, plan.local, plan.server))
        >>> clients, settings = SimulatedFederation(task.data), {"rounds": 300, "every": 300}
        >>> history = run(method, clients, task.x0, task.y0, evaluate=task.evaluate, **settings)
        >>> history.records[-1]["x_error"] < 0.1
        True
    """
    for number in initial:
        if not 0 < number < float("inf"):
            raise UserError(f"The initial a, b and c must be positive numbers, got {number}.")
    rule = _rule(*map(float, initial))
    ones = Point(1.0, 1.0, 1.0)
    return TuningFree(build(Plan(ones, rule, ones)), build, rule)


@jax.jit
def _sizes(squares: Point[jax.Array]) -> Point[jax.Array]:
    """Return the server's step sizes, 1 / (a phi), 1 / b and 1 / phi."""
    a, b, c = (jnp.sqrt(square) for square in squares)
    phi = jnp.maximum(b, c)
    return Point(1 / (a * phi), 1 / b, 1 / phi)


@jax.jit
def _local_sizes(gathered: Gathered, work: Scalar) -> Point[Any]:
    """Return the clients' step sizes; zero in the first round."""
    share = jnp.where(gathered.iterations > 0, 1 / jnp.asarray(work, float), 0.0)
    return trees.scale(share, _sizes(gathered.squares))


@lru_cache(maxsize=32)
def _rule(a: float, b: float, c: float) -> Any:
    """Return the server's rule for all three variables, the same object for equal numbers."""
    initial = Point(a, b, c)

    def init(params: PyTree) -> Gathered:
        squares = trees.on_device(Point(*(np.asarray(number**2) for number in initial)))
        return Gathered(squares, trees.on_device(np.zeros((), np.int32)))

    def update(updates: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Gathered]:
        new = Point(*(trees.squared_norm(d).astype(float) for d in updates))
        squares = trees.add(state.squares, new)
        steps = zip(_sizes(squares), updates, strict=True)
        moves = Point(*(trees.scale(-size, d) for size, d in steps))
        return moves, Gathered(squares, state.iterations + 1)

    return optax.GradientTransformation(init, update)


def _gathered(state: Any) -> Gathered:
    """Return the rule's state in a method's state; raise if the method does not use the rule."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Gathered))
    rule_state = next((leaf for leaf in leaves if isinstance(leaf, Gathered)), None)
    if rule_state is None:
        raise UserError(
            "Tuning-free steps are the server's, and this method has none: use simfbo, shrofbo or "
            "mimefbo."
        )
    return rule_state
