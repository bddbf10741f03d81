"""The bilevel problem and its derivative products.

    min_x  sum_i p_i f_i(x, y*(x))    s.t.    y*(x) = argmin_y  sum_i p_i g_i(x, y)

Users write the two losses; all derivatives are products computed by JAX, without forming Hessians.
The sign of v is that of  grad^2_yy G v = grad_y F  everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simfbo.core.validation import call_loss

PyTree = Any
T = TypeVar("T", covariant=True)
Batches = tuple[PyTree, PyTree]
Scalar = ArrayLike
Loss = Callable[[PyTree, PyTree, PyTree], jax.Array]


class BilevelProblem(NamedTuple):
    """Two losses `f(x, y, batch)` and `g(x, y, batch)`: pytrees in, a scalar out.

    Both are means over the samples of the batch, plus terms that do not depend on any sample.
    `lower` should be strongly convex in y: add `lambda/2 ||y||^2` to it.

    Attributes:
        upper: f, minimised over x, on the clients' upper (validation) data.
        lower: g, minimised over y for a given x, on the clients' lower (training) data.
        lower_level: "shared": one y for all clients, y*(x) = argmin sum_i p_i g_i(x, y).
            "private": a personal y for each client, y_i*(x) = argmin g_i(x, y), which is never
            sent.

    Example:
        >>> import jax.numpy as jnp
        >>> ridge = BilevelProblem(
        ...     upper=lambda x, y, batch: jnp.mean((batch[0] @ y - batch[1]) ** 2),
        ...     lower=lambda x, y, batch: jnp.mean((batch[0] @ y - batch[1]) ** 2)
        ...     + jnp.sum(jnp.exp(x) * y**2),
        ... )
    """

    upper: Loss
    lower: Loss
    lower_level: Literal["shared", "private"] = "shared"


class Point(NamedTuple, Generic[T]):
    """One value for each of the three variables: an iterate, a direction, a step size, a rule.

    In a message it names the channels; absent variables are None.

    Attributes:
        x: for the upper variable.
        y: for the lower variable.
        v: for the solution of the linear system.

    Example:
        >>> Point(x=0.05, y=0.2)
        Point(x=0.05, y=0.2, v=None)
    """

    x: T = None  # pyright: ignore[reportAssignmentType]
    y: T = None  # pyright: ignore[reportAssignmentType]
    v: T = None  # pyright: ignore[reportAssignmentType]


def point_of(message: PyTree) -> Point[PyTree]:
    """Return the `Point` in a message: the message itself or the first `Point` in a tuple.

    Example:
        >>> point_of((Point(y=2.0), 3.0))
        Point(x=None, y=2.0, v=None)
    """
    if isinstance(message, Point):
        return message
    parts = message if isinstance(message, tuple) else ()
    return next((part for part in parts if isinstance(part, Point)), Point())


CHANNELS = Point._fields


def channel(path: Sequence[Any]) -> str | None:
    """Return the channel of a leaf in a message: the first name in its path that is x, y or v.

    Example:
        >>> message = (Point(x={"v": 1.0}, v=2.0), 3.0)
        >>> [channel(path) for path, _ in jax.tree.leaves_with_path(message)]
        ['x', 'v', None]
    """
    names = (getattr(key, "name", None) for key in path)
    return next((name for name in names if name in CHANNELS), None)


class Weighted(NamedTuple):
    """A batch of weighted samples; the weights sum to one.

    Full batches of clients with unequal numbers of samples are padded, with zero weights.
    """

    samples: PyTree
    weights: jax.Array


def evaluate(loss: Loss, x: PyTree, y: PyTree, batch: PyTree) -> jax.Array:
    """Compute `loss(x, y, batch)`; for a `Weighted` batch, the weighted mean over its samples."""
    return average(lambda samples: call_loss(loss, x, y, samples), batch)


def average(mean: Callable[[PyTree], jax.Array], batch: PyTree) -> jax.Array:
    """Compute a mean over samples; for a `Weighted` batch, the weighted mean."""
    if not isinstance(batch, Weighted):
        return mean(batch)
    singles = jax.tree.map(lambda a: a[:, None], batch.samples)
    means = jax.vmap(mean)(singles)
    return batch.weights.astype(means.dtype) @ means


def grad_upper_x(problem: BilevelProblem, x: PyTree, y: PyTree, batch: PyTree) -> PyTree:
    """Return grad_x f(x, y)."""
    return jax.grad(lambda x: evaluate(problem.upper, x, y, batch))(x)


def grad_upper_y(problem: BilevelProblem, x: PyTree, y: PyTree, batch: PyTree) -> PyTree:
    """Return grad_y f(x, y)."""
    return jax.grad(lambda y: evaluate(problem.upper, x, y, batch))(y)


def grad_lower_y(problem: BilevelProblem, x: PyTree, y: PyTree, batch: PyTree) -> PyTree:
    """Return grad_y g(x, y)."""
    return jax.grad(lambda y: evaluate(problem.lower, x, y, batch))(y)


def slope(problem: BilevelProblem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> jax.Array:
    """Compute <grad_y g(x, y), v> in forward mode.

    Its gradient in reverse mode has both second-order products: grad^2_yy g v with respect to y,
    grad^2_xy g v with respect to x.
    """
    return jax.jvp(lambda y: evaluate(problem.lower, x, y, batch), (y,), (v,))[1]


def hvp(problem: BilevelProblem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
    """Return grad^2_yy g(x, y) v, of y's shape."""
    return jax.grad(lambda y: slope(problem, x, y, v, batch))(y)


def mixed(problem: BilevelProblem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
    """Return grad^2_xy g(x, y) v, of x's shape."""
    return jax.grad(lambda x: slope(problem, x, y, v, batch))(x)


def residual(
    problem: BilevelProblem, x: PyTree, y: PyTree, v: PyTree, lower: PyTree, upper: PyTree
) -> jax.Array:
    """Return <grad_y g, v> - f, whose gradient is (-d_x, d_v) at fixed v."""
    return slope(problem, x, y, v, lower) - evaluate(problem.upper, x, y, upper)


def directions(
    problem: BilevelProblem, x: PyTree, y: PyTree, v: PyTree, lower: PyTree, upper: PyTree
) -> Point[PyTree]:
    """Compute SimFBO's three directions from one shared second-order pass.

        d_y = grad_y g,   d_v = grad^2_yy g v - grad_y f,   d_x = grad_x f - grad^2_xy g v

    Yang, Xiao, Ji (2023), equation (6), with one lower batch (zeta) and one upper batch (xi).

    Args:
        problem: the two losses.
        x: the upper iterate.
        y: the lower iterate.
        v: the iterate of the linear system.
        lower: batch of the lower data.
        upper: batch of the upper data.

    Returns:
        The directions, to be subtracted, as a `Point`.
    """

    def scalars(x: PyTree, y: PyTree) -> tuple[jax.Array, jax.Array]:
        value, slope = jax.jvp(lambda y: evaluate(problem.lower, x, y, lower), (y,), (v,))
        return value, slope - evaluate(problem.upper, x, y, upper)

    # One graph for all three directions: with a separate grad_y g, XLA would compute g's
    # features twice (docs/explanation-performance.md). Each of its two outputs is transposed
    # by itself: a cotangent of zero for the other would be multiplied through.
    (value, _), push = jax.linearize(scalars, x, y)
    _, d_y = jax.linear_transpose(lambda *dz: push(*dz)[0], x, y)(jnp.ones_like(value))
    down_x, d_v = jax.linear_transpose(lambda *dz: push(*dz)[1], x, y)(jnp.ones_like(value))
    return Point(jax.tree.map(jnp.negative, down_x), d_y, d_v)


def independent_directions(
    problem: BilevelProblem,
    x: PyTree,
    y: PyTree,
    v: PyTree,
    zeta: PyTree,
    psi: Batches,
    xi: Batches,
) -> Point[PyTree]:
    """Compute the three directions from separate batches, as in the paper.

    Args:
        problem: the two losses.
        x: the upper iterate.
        y: the lower iterate.
        v: the iterate of the linear system.
        zeta: lower batch for d_y.
        psi: (lower, upper) batches for d_v.
        xi: (lower, upper) batches for d_x.

    Returns:
        The directions, to be subtracted, as a `Point`.
    """
    d_v = jax.grad(lambda y: residual(problem, x, y, v, *psi))(y)
    d_x = jax.grad(lambda x: -residual(problem, x, y, v, *xi))(x)
    return Point(d_x, grad_lower_y(problem, x, y, zeta), d_v)
