"""Operators that make, arrange and index arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simfbo.errors import UserError

Shape = Sequence[int]


def squeeze(a: jax.Array, dims: int | Shape | None = None) -> jax.Array:
    """Leave out axes of length one."""
    wanted = range(a.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    return a.squeeze(tuple(d for d in wanted if a.ndim and a.shape[d] == 1))


def select(a: jax.Array, dim: int, place: int) -> jax.Array:
    """Return what is at one place of an axis."""
    return lax.index_in_dim(a, place, dim, keepdims=False)


def cut(
    a: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    """Return a slice of an axis."""
    return a[_at(a, dim, slice(start, end, step))]


def expand(a: jax.Array, shape: Shape, *, implicit: bool = False) -> jax.Array:
    """Repeat axes of length one; -1 keeps an axis as it is."""
    own = (*(1,) * (len(shape) - a.ndim), *a.shape)
    return jnp.broadcast_to(a, [n if m == -1 else m for n, m in zip(own, shape, strict=True)])


def repeat(a: jax.Array, times: Shape) -> jax.Array:
    """Lay copies side by side."""
    return jnp.tile(a, tuple(times))


def split(a: jax.Array, sizes: Shape, dim: int = 0) -> list[jax.Array]:
    """Cut an axis into parts of the given sizes."""
    return jnp.split(a, np.cumsum(sizes)[:-1].tolist(), dim)


def pad(a: jax.Array, amounts: Shape, value: float = 0) -> jax.Array:
    """Add constants around an array, or cut some off where amounts are negative."""
    widths = [(low, high, 0) for low, high in _pairs(a, amounts)]
    return lax.pad(a, jnp.asarray(value, a.dtype), widths)


def _pairs(a: jax.Array, amounts: Shape) -> list[tuple[int, int]]:
    """Return (before, after) for every axis; PyTorch begins with the last."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    return [(0, 0)] * (a.ndim - len(pairs)) + pairs[::-1]


def diagonal(a: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """Return a diagonal as the last axis."""
    return jnp.diagonal(a, offset, dim1, dim2)


def gather(a: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    """Return a[i, index[i, j]], as for dim 1; the index may be smaller than the array."""
    if a.ndim == 0:
        return jnp.broadcast_to(a, index.shape)
    return a[_grid(a, dim, index)]


def scatter(a: jax.Array, dim: int, index: jax.Array, src: Any) -> jax.Array:
    """Write values where an index says."""
    return a.at[_grid(a, dim, index)].set(_fitting(src, index))


def scatter_add(a: jax.Array, dim: int, index: jax.Array, src: Any) -> jax.Array:
    """Add values where an index says."""
    return a.at[_grid(a, dim, index)].add(_fitting(src, index))


def _fitting(src: Any, index: jax.Array) -> Any:
    """Return the part of the source that the index covers."""
    return src[tuple(map(slice, index.shape))] if isinstance(src, jax.Array) else src


def _grid(a: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """Return one index per axis: the given one along `dim`, the own place along the others."""
    places = jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij", sparse=True)
    return _at_axis(tuple(places), dim % a.ndim, index)


def _at_axis(places: tuple[Any, ...], axis: int, index: Any) -> tuple[Any, ...]:
    return (*places[:axis], index, *places[axis + 1 :])


def index(a: jax.Array, places: Sequence[jax.Array | None]) -> jax.Array:
    """Return a[places], where None takes a whole axis."""
    return a[_places(places)]


def index_put(
    a: jax.Array, places: Sequence[jax.Array | None], values: jax.Array, accumulate: bool = False
) -> jax.Array:
    """Write or add values at places."""
    first = places[0]
    if len(places) == 1 and first is not None and first.dtype == bool:
        if values.size != 1:
            raise UserError("Only one value can be written by a boolean mask: use torch.where.")
        mask = first.reshape(*first.shape, *(1,) * (a.ndim - first.ndim))
        return jnp.where(mask, a + values.ravel() if accumulate else values.reshape(()), a)
    found = a.at[_places(places)]
    return found.add(values) if accumulate else found.set(values)


def _places(places: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if place is None else place for place in places)


def index_select(a: jax.Array, dim: int, places: jax.Array) -> jax.Array:
    """Return some places of an axis."""
    return jnp.take(a, places, dim)


def slice_scatter(
    a: jax.Array, src: jax.Array, dim: int = 0, start: int | None = None,
    end: int | None = None, step: int = 1,
) -> jax.Array:  # fmt: skip
    """Replace a slice of an axis."""
    return a.at[_at(a, dim, slice(start, end, step))].set(src)


def _at(a: jax.Array, dim: int, place: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * (dim % a.ndim), place)


def arange(*bounds: Any, dtype: Any) -> jax.Array:
    """Return numbers in steps."""
    return jnp.arange(*bounds, dtype=dtype)


def empty(shape: Shape, *, dtype: Any) -> jax.Array:
    """Return an array to be written to: zeros, whatever PyTorch leaves in it."""
    return jnp.zeros(shape, dtype)


def unfold(a: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    """Return all windows along an axis; the last axis goes through a window."""
    starts = range(0, a.shape[dim] - size + 1, step)
    parts = [jnp.moveaxis(cut(a, dim, start, start + size), dim, -1) for start in starts]
    return jnp.stack(parts, dim % a.ndim)


def full_like(a: jax.Array, value: Any, *, dtype: Any) -> jax.Array:
    """Return one value in an array's shape."""
    return jnp.full(a.shape, value, dtype)


def cast(a: jax.Array, *, dtype: Any) -> jax.Array:
    """Return an array in another type."""
    return a.astype(dtype)


def same(a: jax.Array) -> jax.Array:
    """Return the array: there is nothing to copy or to share."""
    return a


SHAPES = {
    "_to_copy": cast, "alias": same, "arange": arange,
    "cat": lambda parts, dim=0: jnp.concatenate(parts, dim), "clone": same,
    "constant_pad_nd": pad, "copy": lambda a, b: jnp.broadcast_to(b.astype(a.dtype), a.shape),
    "detach": lax.stop_gradient, "diagonal": diagonal, "empty": empty,
    "empty_permuted": lambda shape, order, *, dtype: empty(shape, dtype=dtype), "expand": expand,
    "flip": lambda a, dims: jnp.flip(a, tuple(dims)),
    "full": lambda shape, value, *, dtype: jnp.full(shape, value, dtype), "full_like": full_like,
    "gather": gather, "index": index, "index_put": index_put, "index_select": index_select,
    "permute": lambda a, dims: a.transpose(dims),
    "repeat": repeat, "scalar_tensor": lambda value, *, dtype: jnp.asarray(
        value, dtype), "scatter": scatter, "scatter_add": scatter_add, "select": select,
    "slice": cut, "slice_scatter": slice_scatter,
    "split_with_sizes": split, "squeeze": squeeze, "unfold": unfold,
    "unsqueeze": jnp.expand_dims, "view": jnp.reshape,
}  # fmt: skip
"""Operators that make, arrange and index arrays, by name."""
