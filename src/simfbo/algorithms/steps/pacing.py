"""The pace of x, limited by the convergence of y and v and by the change of the hypergradient.

A run is divided into windows of 2 sqrt(kappa) iterations, twice the time constant of y and v. With
h the mean hypergradient of a window and h' that of the previous one, two dimensionless numbers are
computed at its end:

    lag  = ||change of y|| / (2 ||y||), or that of v if larger: the relative change of y and v
           within their time constant. A change orthogonal to the previous one is noise, and is
           ignored.
    turn = 1 - <h, h'> / ||h'||^2: the relative decrease of the hypergradient. Unknown if h is not
           larger than its noise.

x waits until the lag is small. Then its pace is halved if lag or turn is large, and doubled if both
are small.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.core import trees
from simfbo.core.problem import Point, PyTree, Scalar

_SHORTEST, _SHORT_RUN, _SHARE = 10, 5, 10  # iterations of a window; in a short run; windows
_SMALL_LAG, _LARGE_LAG = 0.15, 0.3
_SMALL_TURN, _LARGE_TURN = 0.4, 0.8
_ALIGNED = 0.5  # the cosine of two changes above which they are not noise
_ADAM_FIRST, _ADAM_SECOND, _ADAM_FLOOR = 0.9, 0.99, 1e-4


class Window(NamedTuple):
    """The statistics of the current and the previous window.

    Attributes:
        index: the number of completed windows.
        start: y and v at the beginning of the window.
        move: the change of y and v in the previous window.
        pull: the sum of the hypergradients in the window.
        power: the sum of their squared norms.
        pull_before: `pull` of the previous window.
        power_before: `power` of the previous window.
    """

    index: Any
    start: Point[PyTree]
    move: Point[PyTree]
    pull: PyTree
    power: jax.Array
    pull_before: PyTree
    power_before: jax.Array


class UpperPace(NamedTuple):
    """The state of x's rule: iterations, those with nonzero pace, Adam's moments, and the pace."""

    iteration: jax.Array
    moved: jax.Array
    first: PyTree
    second: PyTree
    pace: jax.Array


class Following(NamedTuple):
    """The state of y's and v's rule: iterations, velocity, step size and momentum."""

    iteration: jax.Array
    speed: PyTree
    gamma: jax.Array
    momentum: jax.Array


def size_of(x: PyTree) -> PyTree:
    """Compute the size of each leaf: its root mean square, or the mean of the others if it is zero.

    If all of x is zero, as initially for logarithms and logits, the size is one.

    Example:
        >>> import numpy as np
        >>> size_of({"weight": np.array([0.3, -0.3]), "bias": np.zeros(2)})
        {'bias': 0.3, 'weight': 0.3}
    """
    leaves, structure = jax.tree.flatten(x)
    sizes = [float(np.sqrt(np.mean(np.square(leaf)))) for leaf in leaves]
    usual = np.mean([size for size in sizes if size] or [1.0])
    return jax.tree.unflatten(structure, [size or float(usual) for size in sizes])


def length_of(rate: Scalar, rounds: int) -> jax.Array:
    """Return the length of a window: 2 sqrt(kappa) iterations, but at most a tenth of the run."""
    shortest = min(_SHORTEST, max(_SHORT_RUN, rounds // (2 * _SHARE)))
    length = jnp.minimum(jnp.ceil(2 / jnp.asarray(rate, float)), rounds // _SHARE)
    return jnp.maximum(shortest, length).astype(jnp.int32)


def opened(x: PyTree, y: PyTree, v: PyTree) -> Window:
    """Return the first window; y or v may be None."""
    start = trees.on_device(Point(y=y, v=v))
    x, move, zero = trees.host_zeros((trees.on_device(x), start, np.zeros(())))
    return Window(np.zeros((), np.int32), start, move, x, zero, x, zero)


def add_pull(window: Window, h: PyTree) -> Window:
    """Add a hypergradient to the window."""
    return window._replace(pull=trees.add(window.pull, h), power=window.power + _square(h))


def emptied(window: Window, start: Point[PyTree]) -> Window:
    """Restart the window from other y and v."""
    zeros = {"pull": trees.zeros_like(window.pull), "power": jnp.zeros_like(window.power)}
    return window._replace(start=start, **zeros)


def closed(window: Window, after: Point[PyTree], settles: Scalar) -> tuple[Window, jax.Array]:
    """End a window.

    Args:
        window: the window.
        after: y and v at its end.
        settles: the length of the window in time constants of y and v.

    Returns:
        The next window; lag, turn (zero if unknown), and the largest relative change of y or v that
        was noise.
    """
    move = trees.subtract(after, window.start)
    ratios, aligned = [], []
    for before, now, z in zip(window.move, move, after, strict=True):
        if now is None:
            continue
        square = _square(now)
        ratios.append(jnp.where(square > 0, jnp.sqrt(square / _square(z)), 0.0))
        lengths = jnp.sqrt(_square(before)) * jnp.sqrt(square)
        cosine = trees.dot(before, now).astype(float) / jnp.where(lengths > 0, lengths, 1.0)
        aligned.append((cosine >= _ALIGNED) | (window.index == 0))
    lag = jnp.max(jnp.where(jnp.stack(aligned), jnp.stack(ratios), 0.0)) / settles
    noise = jnp.max(jnp.where(jnp.stack(aligned), 0.0, jnp.stack(ratios)))
    new, old = window.pull, window.pull_before
    clear = (_square(new) > 2 * window.power) & (_square(old) > 2 * window.power_before)
    turn = 1 - trees.dot(new, old).astype(float) / jnp.where(clear, _square(old), 1)
    index = window.index + jnp.ones((), window.index.dtype)
    following = Window(index, after, move, new, window.power, new, window.power)
    return emptied(following, after), jnp.stack([lag, jnp.where(clear, turn, 0.0), noise])


def next_pace(pace: Any, most: Any, lag: Any, turn: Any, early: Any) -> jax.Array:
    """Return the pace for the next window, if x does not wait."""
    slower = (lag > _LARGE_LAG) | (turn > _LARGE_TURN)
    faster = early & (lag < _SMALL_LAG) & (turn < _SMALL_TURN)
    return jnp.where(slower, pace / 2, jnp.where(faster, jnp.minimum(2 * pace, most), pace))


def may_start(window: Window, lag: Any) -> Any:
    """Check if y and v are near their solutions, after at least two windows."""
    return (window.index >= 2) & (lag < _SMALL_LAG)


def with_rates(
    state: PyTree, pace: Scalar, gamma: Scalar, momentum: Scalar, iteration: Scalar
) -> PyTree:
    """Set the pace of x, the step and momentum of y and v, and the iteration of all schedules."""

    def changed(node: Any) -> Any:
        if not isinstance(node, UpperPace | Following):
            return node
        node = node._replace(iteration=_as_array(iteration, np.int32))
        if isinstance(node, UpperPace):
            return node._replace(pace=_as_array(pace))
        return node._replace(gamma=_as_array(gamma), momentum=_as_array(momentum))

    return jax.tree.map(
        changed, state, is_leaf=lambda node: isinstance(node, UpperPace | Following)
    )


def _as_array(value: Scalar, dtype: Any = float) -> jax.Array:
    return value if isinstance(value, jax.Array) else trees.on_device(np.asarray(value, dtype))


def rules(scale: PyTree, rounds: int) -> Point[optax.GradientTransformation]:
    """Return the server's rules, with the sizes of the steps of x by leaf."""
    leaves, structure = jax.tree.flatten(scale)
    follow = following(rounds)
    return Point(_shared_adam(tuple(leaves), structure, rounds), follow, follow)


@lru_cache(maxsize=32)  # equal sizes return the same object, and share compiled programs
def _shared_adam(sizes: tuple[float, ...], structure: Any, rounds: int) -> Any:
    return paced_adam(jax.tree.unflatten(structure, sizes), rounds)


@lru_cache(maxsize=32)
def following(rounds: int) -> optax.GradientTransformation:
    """Return heavy-ball steps for y and v, with step size and momentum in the rule's state.

    The step size decays over the second half of the run, to reduce noise.
    """

    def init(params: PyTree) -> Following:
        zeros, zero = trees.host_zeros(params), trees.on_device(np.zeros(()))
        return Following(trees.on_device(np.zeros((), np.int32)), zeros, zero, zero)

    def update(updates: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Following]:
        speed = trees.add_scaled(updates, state.momentum, state.speed)
        late = jnp.maximum(0.0, 2 * jnp.asarray(state.iteration, float) / rounds - 1)
        step = trees.scale(-state.gamma * half_cosine(0.9 * late), speed)
        return step, state._replace(iteration=state.iteration + 1, speed=speed)

    return optax.GradientTransformation(init, update)


def paced_adam(scale: PyTree, rounds: int) -> optax.GradientTransformation:
    """Return Adam for x, with the pace in its state, which decays from the first nonzero pace on.

    While the pace is zero, x and Adam's moments are unchanged: far from the solutions of y and v,
    the direction of x is much larger than the hypergradient. Adam's epsilon is relative to all
    coordinates, so that the method is invariant to units. `scale` is a step of size one, by leaf.
    """

    def init(params: PyTree) -> UpperPace:
        zero, zeros = trees.on_device(np.zeros((), np.int32)), trees.host_zeros(params)
        return UpperPace(zero, zero, zeros, zeros, trees.on_device(np.zeros(())))

    def update(updates: PyTree, state: Any, params: Any = None) -> tuple[PyTree, UpperPace]:
        on = state.pace > 0
        moved = state.moved + on.astype(jnp.int32)

        def decayed(keep: float, mean: PyTree, new: PyTree) -> PyTree:
            return jax.tree.map(
                lambda m, n: jnp.where(on, jnp.asarray(keep, m.dtype) * m + (1 - keep) * n, m),
                mean,
                new,
            )

        first = decayed(_ADAM_FIRST, state.first, updates)
        second = decayed(_ADAM_SECOND, state.second, jax.tree.map(jnp.square, updates))
        done, left = (jnp.asarray(n, float) for n in (state.moved, rounds - state.iteration))
        speed = state.pace * half_cosine(done / jnp.maximum(done + left, 1.0))
        count = jnp.maximum(moved, 1).astype(float)
        mean, square = 1 - _ADAM_FIRST**count, 1 - _ADAM_SECOND**count
        sizes = jax.tree.map(lambda n: jnp.sqrt(n / square.astype(n.dtype)), second)
        numbers = sum(leaf.size for leaf in jax.tree.leaves(sizes))
        usual = jnp.sqrt(trees.squared_norm(sizes) / numbers)
        floor = jnp.where(usual > 0, _ADAM_FLOOR * usual, 1)

        def step(s: float, m: jax.Array, size: jax.Array) -> jax.Array:
            unit = m / mean.astype(m.dtype) / (size + floor.astype(size.dtype))
            return (-speed * s).astype(m.dtype) * unit

        moves = jax.tree.map(step, scale, first, sizes)
        return moves, UpperPace(state.iteration + 1, moved, first, second, state.pace)

    return optax.GradientTransformation(init, update)


def half_cosine(share: Scalar) -> jax.Array:
    """Return a half cosine, from one to zero, of the completed share of a run."""
    return (1 + jnp.cos(jnp.pi * jnp.minimum(share, 1.0))) / 2


def _square(tree: PyTree) -> jax.Array:
    return trees.squared_norm(tree).astype(float)
