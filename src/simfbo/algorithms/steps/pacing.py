"""How fast x may move: no faster than y and v can follow, and than the hypergradient allows.

A run is divided into windows of 2 sqrt(kappa) iterations, twice the time in which y and v settle.
With h the mean hypergradient of a window and h' that of the one before, two numbers without units
are computed at its end:

    lag  = ||y's move|| / (2 ||y||), or v's where that is larger: by how much y and v change in the
           time in which they settle. A move across the previous one is noise and does not count.
    turn = 1 - <h, h'> / ||h'||^2: the share of the hypergradient that x has used up. Unknown where
           h is no larger than its noise.

x waits until the lag is small. Then its pace is halved whenever lag or turn is large, and doubled
while both are small.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from simfbo.core import trees
from simfbo.core.problem import Point, PyTree, Scalar

_SHORTEST, _SHORT_RUN, _SHARE = 10, 5, 10  # iterations; in a short run; windows in a run
_SMALL_LAG, _LARGE_LAG = 0.15, 0.3
_SMALL_TURN, _LARGE_TURN = 0.4, 0.8
_ALIGNED = 0.5  # the cosine of two moves above which both are more than noise
_ADAM_FIRST, _ADAM_SECOND, _ADAM_FLOOR = 0.9, 0.99, 1e-4


class Window(NamedTuple):
    """What the windows so far have shown.

    Attributes:
        index: windows completed.
        start: y and v at the beginning of this one.
        move: what y and v moved by in the previous one.
        pull: the sum of the hypergradients in this one.
        power: the sum of their squared norms.
        pull_before: that of the previous one.
        power_before: that of the previous one.
    """

    index: Any
    start: Point[PyTree]
    move: Point[PyTree]
    pull: PyTree
    power: jax.Array
    pull_before: PyTree
    power_before: jax.Array


class UpperPace(NamedTuple):
    """The state of x's rule: iterations, iterations since x moves, Adam's moments, and the pace."""

    iteration: jax.Array
    moved: jax.Array
    first: PyTree
    second: PyTree
    pace: jax.Array


class Following(NamedTuple):
    """The state of y's and v's rule: iterations, what is moving, the step size and the momentum."""

    iteration: jax.Array
    speed: PyTree
    gamma: jax.Array
    momentum: jax.Array


def size_of(x: PyTree) -> PyTree:
    """Return the size of each leaf: its root mean square, or that of the others where it is zero.

    Where all of x is zero, as logarithms and logits are at the beginning, the size is one.

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
    """Return the iterations of a window: 2 sqrt(kappa), but at most a tenth of the run."""
    least = min(_SHORTEST, max(_SHORT_RUN, rounds // (2 * _SHARE)))
    length = jnp.minimum(jnp.ceil(2 / jnp.asarray(rate, float)), rounds // _SHARE)
    return jnp.maximum(least, length).astype(jnp.int32)


def opened(x: PyTree, y: PyTree, v: PyTree) -> Window:
    """Return the first window; y or v may be None."""
    start = trees.on_device(Point(y=y, v=v))
    x, move, zero = trees.host_zeros((trees.on_device(x), start, np.zeros(())))
    return Window(np.zeros((), np.int32), start, move, x, zero, x, zero)


def add_pull(window: Window, h: PyTree) -> Window:
    """Return the window with one more hypergradient."""
    return window._replace(pull=trees.add(window.pull, h), power=window.power + _square(h))


def emptied(window: Window, start: Point[PyTree]) -> Window:
    """Begin the window again, from other y and v."""
    zeros = {"pull": trees.zeros_like(window.pull), "power": jnp.zeros_like(window.power)}
    return window._replace(start=start, **zeros)


def closed(window: Window, after: Point[PyTree], settles: Scalar) -> tuple[Window, jax.Array]:
    """End a window.

    Args:
        window: the window.
        after: y and v now.
        settles: in how many times the time in which y and v settle it took.

    Returns:
        The next window; lag, turn (zero where it is unknown), and the largest relative move of y or
        v that was noise.
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
    after_it = Window(index, after, move, new, window.power, new, window.power)
    return emptied(after_it, after), jnp.stack([lag, jnp.where(clear, turn, 0.0), noise])


def next_pace(pace: Any, most: Any, lag: Any, turn: Any, early: Any) -> jax.Array:
    """Return the pace for the next window, once x moves."""
    slower = (lag > _LARGE_LAG) | (turn > _LARGE_TURN)
    faster = early & (lag < _SMALL_LAG) & (turn < _SMALL_TURN)
    return jnp.where(slower, pace / 2, jnp.where(faster, jnp.minimum(2 * pace, most), pace))


def may_start(window: Window, lag: Any) -> Any:
    """Return whether y and v are near their solutions, after two windows at least."""
    return (window.index >= 2) & (lag < _SMALL_LAG)


def with_rates(
    state: PyTree, pace: Scalar, gamma: Scalar, momentum: Scalar, iteration: Scalar
) -> PyTree:
    """Set the pace of x, the step and momentum of y and v, and the iteration of all schedules."""

    def changed(part: Any) -> Any:
        if not isinstance(part, UpperPace | Following):
            return part
        part = part._replace(iteration=_like(iteration, np.int32))
        if isinstance(part, UpperPace):
            return part._replace(pace=_like(pace))
        return part._replace(gamma=_like(gamma), momentum=_like(momentum))

    return jax.tree.map(
        changed, state, is_leaf=lambda part: isinstance(part, UpperPace | Following)
    )


def _like(value: Scalar, dtype: Any = float) -> jax.Array:
    """Return a number as an array, as it may be traced."""
    return value if isinstance(value, jax.Array) else trees.on_device(np.asarray(value, dtype))


def rules(scale: PyTree, rounds: int) -> Point[optax.GradientTransformation]:
    """Return the server's rules for steps of x of these sizes, by leaf, in a run of some rounds."""
    leaves, structure = jax.tree.flatten(scale)
    follow = following(rounds)
    return Point(_shared_adam(tuple(leaves), structure, rounds), follow, follow)


@lru_cache(maxsize=32)  # the same objects for the same sizes, so that programs are shared
def _shared_adam(sizes: tuple[float, ...], structure: Any, rounds: int) -> Any:
    return paced_adam(jax.tree.unflatten(structure, sizes), rounds)


@lru_cache(maxsize=32)
def following(rounds: int) -> optax.GradientTransformation:
    """Return heavy-ball steps for y and v, at the step size and momentum in the rule's state.

    The step size decays over the second half of the run, to average out noise.
    """

    def init(params: PyTree) -> Following:
        none, zero = trees.host_zeros(params), trees.on_device(np.zeros(()))
        return Following(trees.on_device(np.zeros((), np.int32)), none, zero, zero)

    def update(updates: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Following]:
        speed = trees.add_scaled(updates, state.momentum, state.speed)
        late = jnp.maximum(0.0, 2 * jnp.asarray(state.iteration, float) / rounds - 1)
        step = trees.scale(-state.gamma * half_cosine(0.9 * late), speed)
        return step, state._replace(iteration=state.iteration + 1, speed=speed)

    return optax.GradientTransformation(init, update)


def paced_adam(scale: PyTree, rounds: int) -> optax.GradientTransformation:
    """Return Adam for x, at the pace in its state, which decays from its first move on.

    While the pace is zero x stands still and nothing is remembered: before y and v are near their
    solutions, the direction of x is far larger than the hypergradient. Adam's floor is relative to
    all coordinates, so that units do not matter. `scale` is a step of size one, by leaf.
    """

    def init(params: PyTree) -> UpperPace:
        zero, none = trees.on_device(np.zeros((), np.int32)), trees.host_zeros(params)
        return UpperPace(zero, zero, none, none, trees.on_device(np.zeros(())))

    def update(updates: PyTree, state: Any, params: Any = None) -> tuple[PyTree, UpperPace]:
        on = state.pace > 0
        moved = state.moved + on.astype(jnp.int32)

        def decayed(keep: float, mean: PyTree, new: PyTree) -> PyTree:
            return jax.tree.map(
                lambda m, n: jnp.where(on, jnp.asarray(keep, m.dtype) * m + (1 - keep) * n, m),
                mean, new,
            )  # fmt: skip

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
    """Return a half cosine, from one to zero, of the share of a run that is over."""
    return (1 + jnp.cos(jnp.pi * jnp.minimum(share, 1.0))) / 2


def _square(tree: PyTree) -> jax.Array:
    return trees.squared_norm(tree).astype(float)
