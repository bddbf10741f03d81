"""Convolution and pooling by slices and matrix products, in any number of dimensions.

XLA's own are several times slower on a CPU inside a loop over clients. The fast cases are those of
`simfbo.tasks.layers`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from simfbo.errors import UserError
from simfbo.tasks.layers import conv2d
from simfbo.tasks.layers import max_pool as pool_squares
from simfbo.torch.operators._types import require_same_type

Ints = Sequence[int]


def convolution(
    a: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> jax.Array:
    """Convolve [batch, channels, ...] with a kernel, or with its transpose."""
    require_same_type(a, kernel)
    n = a.ndim - 2
    stride, padding, dilation, output_padding = (
        tuple(setting) * (n // len(setting))
        for setting in (stride, padding, dilation, output_padding)
    )
    if transposed:
        a, kernel = _spread(a, kernel, stride, padding, dilation, output_padding, groups)
        stride, padding = (1,) * n, (0,) * n
    if any(padding):
        a = jnp.pad(a, [(0, 0), (0, 0), *((p, p) for p in padding)])
    if n == 2 and groups == 1 and {*stride, *dilation} == {1} and kernel.shape[2:] != (1, 1):
        out = conv2d(a.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0), bias)
        return out.transpose(0, 3, 1, 2)
    out = _by_slices(a, kernel, stride, dilation, groups)
    return out if bias is None else out + bias.reshape(-1, *(1,) * n)


def _spread(
    a: jax.Array,
    kernel: jax.Array,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    output_padding: Ints,
    groups: int,
) -> tuple[jax.Array, jax.Array]:
    """Convert input and kernel of a transposed convolution to those of an equal plain one."""
    sizes = kernel.shape[2:]
    edges = [d * (k - 1) - p for k, d, p in zip(sizes, dilation, padding, strict=True)]
    widths = [(e, e + o, s - 1) for e, o, s in zip(edges, output_padding, stride, strict=True)]
    spread = lax.pad(a, jnp.zeros((), a.dtype), [(0, 0, 0), (0, 0, 0), *widths])
    flipped = jnp.flip(kernel, tuple(range(2, kernel.ndim)))
    parts = flipped.reshape(groups, -1, *kernel.shape[1:])  # groups, in, out, ...
    return spread, parts.swapaxes(1, 2).reshape(-1, kernel.shape[0] // groups, *sizes)


def _by_slices(
    a: jax.Array, kernel: jax.Array, stride: Ints, dilation: Ints, groups: int
) -> jax.Array:
    """Multiply the kernel with shifted slices of the input, group by group."""
    sizes, batch = kernel.shape[2:], a.shape[0]
    slices = [part for _, part in windows(a, sizes, stride, dilation)]
    places = slices[0].shape[2:]
    if groups == a.shape[1] == kernel.shape[0]:  # depthwise: no matrix product
        shape = (1, groups, *(1,) * len(places))
        taps = kernel.reshape(groups, -1).T
        return sum(s * tap.reshape(shape) for s, tap in zip(slices, taps, strict=True))  # pyright: ignore[reportReturnType]
    stacked = jnp.stack(slices, 2).reshape(batch, groups, -1, math.prod(places))
    weights = kernel.reshape(groups, kernel.shape[0] // groups, -1)
    out = jnp.einsum("goi,bgip->bgop", weights, stacked)
    return out.reshape(batch, kernel.shape[0], *places)


def windows(
    a: jax.Array, sizes: Ints, stride: Ints, dilation: Ints
) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Yield, for each position in a window in row-major order, its values in all windows."""
    extents = [d * (k - 1) + 1 for k, d in zip(sizes, dilation, strict=True)]
    counts = [(m - r) // s + 1 for m, r, s in zip(a.shape[2:], extents, stride, strict=True)]
    for position in itertools.product(*map(range, sizes)):
        starts = [i * d for i, d in zip(position, dilation, strict=True)]
        cuts = (
            slice(start, start + (count - 1) * s + 1, s)
            for start, count, s in zip(starts, counts, stride, strict=True)
        )
        yield position, a[(slice(None), slice(None), *cuts)]


def max_pool(
    a: jax.Array,
    sizes: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    ceil_mode: bool = False,
) -> tuple[jax.Array, None]:
    """Return the maximum of every window, with the derivative of its first occurrence."""
    images, (sizes, stride, padding, dilation) = _batched(a, sizes, stride, padding, dilation)
    square = len(sizes) == 2 and sizes == stride and sizes[0] == sizes[1]
    if square and not any(padding) and not ceil_mode and set(dilation) == {1}:
        pooled = pool_squares(images.transpose(0, 2, 3, 1), sizes[0]).transpose(0, 3, 1, 2)
        return _like(pooled, a, sizes), None
    lowest = -jnp.inf if jnp.issubdtype(a.dtype, jnp.floating) else jnp.iinfo(a.dtype).min
    images = _padded(images, sizes, stride, padding, dilation, ceil_mode, lowest)
    maximum = None
    for _, values in windows(images, sizes, stride, dilation):
        maximum = (
            values
            if maximum is None
            else jnp.where((values > maximum) | (values != values), values, maximum)
        )
    assert maximum is not None
    return _like(maximum, a, sizes), None


def avg_pool(
    a: jax.Array,
    sizes: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> jax.Array:
    """Return the mean of every window."""
    images, (sizes, stride, padding, once) = _batched(a, sizes, stride, padding, (1,))
    ones = np.ones((1, 1, *images.shape[2:]), a.dtype)
    if count_include_pad:
        ones = np.pad(ones, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=1)
    outer = (0,) * len(sizes) if count_include_pad else padding
    total, count = (
        sum(part for _, part in windows(padded, sizes, stride, once))
        for padded in (
            _padded(images, sizes, stride, padding, once, ceil_mode, 0),
            _padded(jnp.asarray(ones), sizes, stride, outer, once, ceil_mode, 0),
        )
    )
    return _like(jnp.asarray(total / (count if divisor is None else divisor)), a, sizes)


def _batched(
    a: jax.Array, sizes: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[jax.Array, list[tuple[int, ...]]]:
    """Add a batch axis if there is none, and repeat the settings for every dimension."""
    n = len(sizes)
    settings = [tuple(g) * (n // len(g)) for g in (sizes, stride or sizes, padding, dilation)]
    return (a if a.ndim == n + 2 else a[None]), settings


def _like(pooled: jax.Array, a: jax.Array, sizes: Ints) -> jax.Array:
    return pooled if a.ndim == len(sizes) + 2 else pooled[0]


def _padded(
    a: jax.Array,
    sizes: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    value: float,
) -> jax.Array:
    """Pad both sides, and the end until the last window fits."""
    widths = [(0, 0, 0), (0, 0, 0)]
    for m, k, s, p, d in zip(a.shape[2:], sizes, stride, padding, dilation, strict=True):
        room, more = m + 2 * p - d * (k - 1) - 1, 0
        if ceil_mode and room % s and (room // s + 1) * s < m + p:  # a window begins inside
            more = s - room % s
        widths.append((p, p + more, 0))
    return lax.pad(a, jnp.asarray(value, a.dtype), widths)


def adaptive_avg_pool(a: jax.Array, sizes: Ints) -> jax.Array:
    """Return the means of the requested number of windows per axis."""
    for axis, size in zip(range(a.ndim - len(sizes), a.ndim), sizes, strict=True):
        means = jnp.asarray(_means(a.shape[axis], size), a.dtype)
        a = jnp.moveaxis(jnp.moveaxis(a, axis, -1) @ means, -1, axis)
    return a


def _means(length: int, parts: int) -> np.ndarray:
    """Return the [length, parts] matrix of means over PyTorch's adaptive windows."""
    place, part = np.ogrid[:length, :parts]
    inside = (place >= part * length // parts) & (place < -(-(part + 1) * length // parts))
    return inside / inside.sum(0)


def adaptive_max_pool(a: jax.Array, sizes: Ints) -> tuple[jax.Array, None]:
    """Return the maxima of the requested number of equal windows per axis."""
    lengths = a.shape[a.ndim - len(sizes) :]
    if any(n % size for n, size in zip(lengths, sizes, strict=True)):
        raise UserError(
            f"Adaptive max-pooling of {list(lengths)} to {list(sizes)} needs windows of unequal "
            "size: use sizes that divide the input's, or max_pool2d."
        )
    return max_pool(a, [n // size for n, size in zip(lengths, sizes, strict=True)])


CONVOLUTIONS = {
    "_adaptive_avg_pool2d": adaptive_avg_pool,
    "_adaptive_avg_pool3d": adaptive_avg_pool,
    "adaptive_max_pool2d": adaptive_max_pool,
    "adaptive_max_pool3d": adaptive_max_pool,
    "avg_pool2d": avg_pool,
    "avg_pool3d": avg_pool,
    "convolution": convolution,
    "max_pool2d_with_indices": max_pool,
    "max_pool3d_with_indices": max_pool,
}
"""Convolution and pooling, by name."""
