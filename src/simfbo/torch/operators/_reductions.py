"""Operators along axes: sums, means, extremes, norms, sorting."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Dims = int | Sequence[int] | None


def axes_of(a: jax.Array, dims: Dims) -> tuple[int, ...]:
    """Convert PyTorch's `dim` to axes; all for None or an empty list."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return tuple(range(a.ndim))
    return (dims,) if isinstance(dims, int) else tuple(dims)


def along(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Give a NumPy reduction PyTorch's arguments."""

    def reduced(a: jax.Array, dims: Dims = None, keepdim: bool = False, **more: Any) -> jax.Array:
        return reduce(a, axis=axes_of(a, dims), keepdims=keepdim, **more)

    return reduced


def indices(a: jax.Array) -> jax.Array:
    """Convert indices to PyTorch's type, if JAX has it enabled."""
    return a.astype(jax.dtypes.canonicalize_dtype("int64"))


def extreme(
    reduce: Callable[..., jax.Array], place: Callable[..., jax.Array]
) -> Callable[..., Any]:
    """Return `max` or `min`: of all entries, or along one axis together with the indices."""

    def reduced(a: jax.Array, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return reduce(a)
        if a.ndim == 0:
            return a, indices(jnp.zeros(()))
        places = place(a, axis=dim, keepdims=True)
        values = jnp.take_along_axis(a, places, dim)
        result = values, indices(places)
        return result if keepdim else tuple(part.squeeze(dim) for part in result)

    return reduced


def place_of(place: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `argmax` or `argmin`."""

    def index_of(a: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
        return indices(place(a, axis=dim, keepdims=keepdim))

    return index_of


def variance(
    a: jax.Array, dims: Dims = None, *, correction: int | None = 1, keepdim: bool = False
) -> jax.Array:
    """Return the variance, with N - correction in the denominator."""
    ddof = 1 if correction is None else correction
    return a.var(axes_of(a, dims), ddof=ddof, keepdims=keepdim)


def deviation(
    a: jax.Array, dims: Dims = None, *, correction: int | None = 1, keepdim: bool = False
) -> jax.Array:
    """Return the standard deviation, with derivative 0 where it is 0."""
    return root(variance(a, dims, correction=correction, keepdim=keepdim))


def variance_and_mean(
    a: jax.Array, dims: Dims = None, *, correction: int | None = 1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return variance and mean."""
    spread = variance(a, dims, correction=correction, keepdim=keepdim)
    return spread, a.mean(axes_of(a, dims), keepdims=keepdim)


def vector_norm(
    a: jax.Array, ord: float = 2, dims: Dims = None, keepdim: bool = False, **_: Any
) -> jax.Array:
    """Return the norm of order `ord`, with derivative 0 where it is 0."""
    axes = axes_of(a, dims)
    if math.isinf(ord):
        reduce = jnp.max if ord > 0 else jnp.min
        return reduce(jnp.abs(a), axis=axes, keepdims=keepdim)
    if ord == 0:
        return (a != 0).sum(axes, keepdims=keepdim).astype(a.dtype)
    if ord == 1:
        return (jnp.sign(a) * a).sum(axes, keepdims=keepdim)
    nonzero = jnp.where(a == 0, 1.0, a)
    powers = a * a if ord == 2 else jnp.where(a == 0, 0.0, jnp.abs(nonzero) ** ord)
    return root(powers.sum(axes, keepdims=keepdim), ord)


def root(a: jax.Array, order: float = 2) -> jax.Array:
    """Return a^(1/order), with derivative 0 at 0."""
    nonzero = jnp.where(a == 0, 1.0, a)
    roots = jnp.sqrt(nonzero) if order == 2 else nonzero ** (1 / order)
    return jnp.where(a == 0, 0.0, roots)


def distances(a: jax.Array, b: jax.Array, order: float = 2, _: int | None = None) -> jax.Array:
    """Return the distances between all rows of a and of b."""
    return vector_norm(a[..., :, None, :] - b[..., None, :, :], order, -1)


def product(
    a: jax.Array, dim: int | None = None, keepdim: bool = False, dtype: Any = None
) -> jax.Array:
    """Return the product of all entries or along an axis."""
    return a.prod(axes_of(a, dim), keepdims=keepdim, dtype=dtype)


def sort(
    a: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the sorted values and their indices; the order of equal ones is kept."""
    places = jnp.argsort(a, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(a, places, dim), indices(places)


def top(
    a: jax.Array, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[jax.Array, ...]:
    """Return the k largest or smallest values in order, and their indices."""
    first = [slice(None)] * a.ndim
    first[dim] = slice(k)
    return tuple(part[tuple(first)] for part in sort(a, dim, largest))


def softmax(a: jax.Array, dim: int, half_to_float: bool = False) -> jax.Array:
    """Return exp(a) / sum exp(a)."""
    return jax.nn.softmax(a, dim)


def log_softmax(a: jax.Array, dim: int, half_to_float: bool = False) -> jax.Array:
    """Return a - log sum exp(a)."""
    return jax.nn.log_softmax(a, dim)


def cumulative(total: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a running sum or product."""
    return lambda a, dim, dtype=None: total(a, axis=dim, dtype=dtype)


REDUCTIONS = {
    "_cdist_forward": distances, "_log_softmax": log_softmax, "_softmax": softmax,
    "amax": along(jnp.max), "amin": along(jnp.min), "any": along(jnp.any),
    "argmax": place_of(jnp.argmax), "argmin": place_of(jnp.argmin),
    "cumprod": cumulative(jnp.cumprod), "cumsum": cumulative(jnp.cumsum),
    "linalg_vector_norm": vector_norm, "max": extreme(jnp.max, jnp.argmax),
    "mean": along(jnp.mean), "min": extreme(jnp.min, jnp.argmin), "prod": product, "sort": sort,
    "std": deviation, "sum": along(jnp.sum), "topk": top, "var": variance,
    "var_mean": variance_and_mean,
}  # fmt: skip
"""Operators along axes, by name."""
