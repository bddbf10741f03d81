"""Operators that create, arrange and index arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simfbo.errors import UserError

Shape = Sequence[int]


def squeeze(a: jax.Array, dims: int | Shape | None = None) -> jax.Array:
    """Remove axes of length one."""
    axes = range(a.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    return a.squeeze(tuple(d for d in axes if a.ndim and a.shape[d] == 1))


def select(a: jax.Array, dim: int, place: int) -> jax.Array:
    """Return one position of an axis."""
    return lax.index_in_dim(a, place, dim, keepdims=False)


def cut(
    a: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    """Return a slice of an axis."""
    return a[_at(a, dim, slice(start, end, step))]


def expand(a: jax.Array, shape: Shape, *, implicit: bool = False) -> jax.Array:
    """Repeat axes of length one; -1 keeps an axis."""
    lengths = (*(1,) * (len(shape) - a.ndim), *a.shape)
    return jnp.broadcast_to(a, [n if m == -1 else m for n, m in zip(lengths, shape, strict=True)])


def repeat(a: jax.Array, times: Shape) -> jax.Array:
    """Tile an array."""
    return jnp.tile(a, tuple(times))


def split(a: jax.Array, sizes: Shape, dim: int = 0) -> list[jax.Array]:
    """Split an axis into parts of the given sizes."""
    return jnp.split(a, np.cumsum(sizes)[:-1].tolist(), dim)


def pad(a: jax.Array, amounts: Shape, value: float = 0) -> jax.Array:
    """Pad an array with a constant, or crop it for negative amounts."""
    # PyTorch starts with the last axis.
    widths = [(amounts[i], amounts[i + 1], 0) for i in range(0, len(amounts), 2)][::-1]
    widths = [(0, 0, 0)] * (a.ndim - len(widths)) + widths
    return lax.pad(a, jnp.asarray(value, a.dtype), widths)


def diagonal(a: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """Return a diagonal as the last axis."""
    return jnp.diagonal(a, offset, dim1, dim2)


def gather(a: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    """Return a[i, index[i, j]] for dim 1; the index may be smaller than the array."""
    if a.ndim == 0:
        return jnp.broadcast_to(a, index.shape)
    return a[_grid(a, dim, index)]


def scatter(a: jax.Array, dim: int, index: jax.Array, src: Any) -> jax.Array:
    """Write values at indices along an axis."""
    return a.at[_grid(a, dim, index)].set(_fitting(src, index))


def scatter_add(a: jax.Array, dim: int, index: jax.Array, src: Any) -> jax.Array:
    """Add values at indices along an axis."""
    return a.at[_grid(a, dim, index)].add(_fitting(src, index))


def _fitting(src: Any, index: jax.Array) -> Any:
    """Return the part of the source that the index covers."""
    return src[tuple(map(slice, index.shape))] if isinstance(src, jax.Array) else src


def _grid(a: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """Return one index per axis: the given one along `dim`, each entry's own position elsewhere."""
    places = jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij", sparse=True)
    axis = dim % a.ndim
    return (*places[:axis], index, *places[axis + 1 :])


def index(a: jax.Array, places: Sequence[jax.Array | None]) -> jax.Array:
    """Return a[places], where None selects a whole axis."""
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
    target = a.at[_places(places)]
    return target.add(values) if accumulate else target.set(values)


def _places(places: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if place is None else place for place in places)


def index_select(a: jax.Array, dim: int, places: jax.Array) -> jax.Array:
    """Return some positions of an axis."""
    return jnp.take(a, places, dim)


def slice_scatter(
    a: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    """Replace a slice of an axis."""
    return a.at[_at(a, dim, slice(start, end, step))].set(src)


def _at(a: jax.Array, dim: int, place: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * (dim % a.ndim), place)


def arange(*bounds: Any, dtype: Any) -> jax.Array:
    """Return evenly spaced numbers."""
    return jnp.arange(*bounds, dtype=dtype)


def empty(shape: Shape, *, dtype: Any) -> jax.Array:
    """Return an array to be overwritten; zeros, unlike in PyTorch."""
    return jnp.zeros(shape, dtype)


def unfold(a: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    """Return all windows along an axis, as a new last axis."""
    starts = range(0, a.shape[dim] - size + 1, step)
    parts = [jnp.moveaxis(cut(a, dim, start, start + size), dim, -1) for start in starts]
    return jnp.stack(parts, dim % a.ndim)


def full_like(a: jax.Array, value: Any, *, dtype: Any) -> jax.Array:
    """Return a constant array of the same shape."""
    return jnp.full(a.shape, value, dtype)


def cast(a: jax.Array, *, dtype: Any) -> jax.Array:
    """Convert an array to another type."""
    return a.astype(dtype)


def same(a: jax.Array) -> jax.Array:
    """Return the array unchanged, for copies and aliases."""
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
"""Operators that create, arrange and index arrays, by name."""
