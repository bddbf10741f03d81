"""Convolution and max-pooling that stay fast on a CPU inside loops, and Gauss-Newton curvature.

XLA's own convolution is several times slower inside `lax.fori_loop`, `lax.scan` or `lax.map` than
outside. `conv2d` is therefore a single matrix product: the output is cut into small tiles, each of
which depends on a few neighbouring blocks of the input, and the kernel is expanded to the small
matrix that maps those blocks to the tile.

Both layers take and return [batch, height, width, channels], but ask XLA to keep the batch
contiguous in memory: every copy then moves whole runs of images, and elementwise functions between
the layers inherit that order at no cost.

Derivatives of any order and in any mode, `vmap`, and all floating dtypes are supported.

`gauss_newton` is for lower problems that are not convex, such as networks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from simfbo.core.problem import PyTree

_ROW_MAJOR = Layout(major_to_minor=(0, 1, 2, 3))

# The assumed cost of copying one number into the matrix of blocks, in
# multiplications: for LeNet-5 the resulting tiles take at most 5 % more CPU time than the best of
# eleven that were tried.
_COPY_COST = 64


def conv2d(images: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Convolve images with stride 1 and without padding (cross-correlation).

    Args:
        images: [batch, height, width, cin].
        kernel: [kh, kw, cin, cout].
        bias: [cout], added to every pixel; none by default.

    Returns:
        [batch, height - kh + 1, width - kw + 1, cout].

    Raises:
        ValueError: If the shapes do not fit together.
    """
    _check_conv(jnp.shape(images), jnp.shape(kernel), None if bias is None else jnp.shape(bias))
    return _conv2d(images, kernel, bias)


def max_pool(images: jax.Array, size: int = 2) -> jax.Array:
    """Take the maximum of every size x size window; windows do not overlap.

    Rows and columns left over at the end are dropped, as in PyTorch's floor mode. If several pixels
    of a window share its maximum, the derivative is that of the first of them in row-major order,
    as in PyTorch.

    Args:
        images: [batch, height, width, channels].
        size: Side of a window.

    Returns:
        [batch, height // size, width // size, channels].

    Raises:
        ValueError: If the images do not have four axes or no window fits into them.
    """
    shape = jnp.shape(images)
    if len(shape) != 4:
        raise ValueError(f"Images must be [batch, height, width, channels], not of shape {shape}.")
    if size < 1 or size > min(shape[1:3]):
        raise ValueError(f"No window of side {size} fits into images of {shape[1]} x {shape[2]}.")
    return _max_pool(images, size)


def gauss_newton(outputs: Callable[[PyTree], jax.Array], parameters: PyTree) -> jax.Array:
    """Return a network's outputs such that the Hessian of a loss becomes its Gauss-Newton matrix.

    Values and gradients are exact. The second derivative of a loss of the outputs is J' H J, with J
    the derivative of the outputs and H the Hessian of the loss with respect to them: positive
    semidefinite for a convex loss. With a penalty the lower problem is then as good as strongly
    convex, and v converges where it diverges with the exact Hessian. The hypergradient neglects the
    curvature of the network, times the residuals.

    Args:
        outputs: (parameters) -> outputs.
        parameters: where to compute them.

    Example:
        >>> from functools import partial
        >>> def loss(y, outputs):
        ...     return (outputs(y) + 2.0) ** 2
        >>> network = partial(gauss_newton, jnp.tanh)
        >>> bool(jax.grad(loss)(1.0, network) == jax.grad(loss)(1.0, jnp.tanh))
        True
        >>> bool(jax.hessian(loss)(1.0, network) > 0 > jax.hessian(loss)(1.0, jnp.tanh))
        True
    """
    at = jax.lax.stop_gradient(parameters)
    step = jax.tree.map(jnp.subtract, parameters, at)
    value, change = jax.jvp(outputs, (at,), (step,))
    return value + change


def _check_conv(
    images: tuple[int, ...], kernel: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    """Raise ValueError unless the three shapes fit together."""
    if len(images) != 4:
        raise ValueError(f"Images must be [batch, height, width, channels], not of shape {images}.")
    if len(kernel) != 4:
        raise ValueError(f"A kernel must be [kh, kw, cin, cout], not of shape {kernel}.")
    if images[3] != kernel[2]:
        raise ValueError(f"The images have {images[3]} channels, but the kernel takes {kernel[2]}.")
    if kernel[0] > images[1] or kernel[1] > images[2] or min(kernel[:2]) < 1:
        sides = f"{kernel[0]} x {kernel[1]} does not fit into images of {images[1]} x {images[2]}"
        raise ValueError(f"A kernel of {sides}.")
    if bias is not None and bias != kernel[3:]:
        raise ValueError(f"The bias must have shape ({kernel[3]},), not {bias}.")


@jax.jit
def _conv2d(images: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Multiply the expanded kernel with the blocks of all tiles."""
    batch, height, width, cin = images.shape
    kh, kw, _, cout = kernel.shape
    tile_h, tile_w = _choose_tiles(height, width, kh, kw, cin, cout)
    count_h, count_w = -(-(height - kh + 1) // tile_h), -(-(width - kw + 1) // tile_w)
    blocks = _gather_blocks(images, (count_h, count_w), (tile_h, tile_w), (kh, kw))
    tiles = _expand_kernel(kernel, tile_h, tile_w) @ blocks
    if bias is not None:
        tiles = tiles + jnp.tile(bias, tile_h * tile_w)[:, None]
    tiles = tiles.reshape(tile_h, tile_w, cout, count_h, count_w, batch)
    joined = tiles.transpose(2, 3, 0, 4, 1, 5).reshape(
        cout, count_h * tile_h, count_w * tile_w, batch
    )
    return _from_batch_minor(joined[:, : height - kh + 1, : width - kw + 1])


def _gather_blocks(
    images: jax.Array, counts: tuple[int, int], tile: tuple[int, int], kernel: tuple[int, int]
) -> jax.Array:
    """Return [block pixels x cin, tiles x batch]: a column holds the inputs of one tile.

    The images are cut into blocks of a tile's size, padded with zeros to whole blocks; the tile at
    (i, j) depends on the blocks from (i, j) up to as many more as the kernel overhangs.
    """
    batch, height, width, cin = images.shape
    reach = [_blocks_per_tile(t, k) for t, k in zip(tile, kernel, strict=True)]
    rows, columns = (n + r - 1 for n, r in zip(counts, reach, strict=True))
    missing = (rows * tile[0] - height, columns * tile[1] - width)
    padding = ((0, 0), (0, max(missing[0], 0)), (0, max(missing[1], 0)), (0, 0))
    pixels = jnp.pad(_to_batch_minor(images), padding)[:, : rows * tile[0], : columns * tile[1]]
    split = pixels.reshape(cin, rows, tile[0], columns, tile[1], batch)
    blocks = split.transpose(2, 4, 0, 1, 3, 5).reshape(-1, rows, columns, batch)
    near = [
        blocks[:, i : i + counts[0], j : j + counts[1]]
        for i in range(reach[0])
        for j in range(reach[1])
    ]
    return jnp.concatenate(near).reshape(-1, counts[0] * counts[1] * batch)


def _expand_kernel(kernel: jax.Array, tile_h: int, tile_w: int) -> jax.Array:
    """Return the Toeplitz matrix [tile pixels x cout, block pixels x cin] of the kernel."""
    kh, kw, cin, cout = kernel.shape
    places = jnp.asarray(_toeplitz_places(kh, kw, tile_h, tile_w), kernel.dtype)
    expanded = jnp.einsum("kpb,kio->pobi", places, kernel.reshape(kh * kw, cin, cout))
    return expanded.reshape(tile_h * tile_w * cout, -1)


@functools.cache
def _toeplitz_places(kh: int, kw: int, tile_h: int, tile_w: int) -> np.ndarray:
    """Return the 0/1 tensor [kernel pixel, tile pixel, block pixel] of products in the convolution.

    Block pixels are ordered as in `_gather_blocks`: block row, block column, then row and column
    within the block.
    """
    joint = np.einsum("apmi,bqnj->abpqmnij", _line_places(kh, tile_h), _line_places(kw, tile_w))
    return joint.reshape(kh * kw, tile_h * tile_w, -1)


def _line_places(taps: int, tile: int) -> np.ndarray:
    """Return the 0/1 tensor [tap, output, block, pixel in block] in one dimension."""
    reach = _blocks_per_tile(tile, taps)
    tap, output, pixel = np.ogrid[:taps, :tile, : reach * tile]
    return (tap + output == pixel).astype(np.int8).reshape(taps, tile, reach, tile)


def _blocks_per_tile(tile: int, taps: int) -> int:
    """Return the number of blocks in a row that one tile's outputs depend on."""
    return -(-(tile + taps - 1) // tile)


@functools.cache
def _choose_tiles(
    height: int, width: int, kh: int, kw: int, cin: int, cout: int
) -> tuple[int, int]:
    """Return the tile sides with the lowest cost of copying and multiplying."""

    def cost(sides: tuple[int, int]) -> float:
        counts = (-(-(height - kh + 1) // sides[0]), -(-(width - kw + 1) // sides[1]))
        reach = (_blocks_per_tile(sides[0], kh), _blocks_per_tile(sides[1], kw))
        pixels = math.prod(sides)
        return math.prod(counts) * math.prod(reach) * pixels * cin * (pixels * cout + _COPY_COST)

    return min(((h, w) for h in range(1, kh + 1) for w in range(1, kw + 1)), key=cost)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
def _max_pool(images: jax.Array, size: int) -> jax.Array:
    return _from_batch_minor(_first_maximum(_windows(images, size))[0])


@_max_pool.defjvp
@functools.partial(jax.jit, static_argnums=0)
def _max_pool_jvp(
    size: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the pooled images and the tangent at each window's first maximum.

    The tangent is a masked sum because its transpose is a masked broadcast, far cheaper than the
    padded sums that transposed slices become.
    """
    largest, place = _first_maximum(_windows(primals[0], size))
    places = jnp.arange(size * size, dtype=jnp.int32).reshape(1, 1, size, 1, size, 1)
    chosen = jnp.where(place[:, :, None, :, None] == places, _windows(tangents[0], size), 0)
    return _from_batch_minor(largest), _from_batch_minor(chosen.sum((2, 4)))


def _windows(images: jax.Array, size: int) -> jax.Array:
    """Return [channels, row of windows, row, column of windows, column, batch]."""
    batch, height, width, channels = images.shape
    rows, columns = height // size, width // size
    pixels = _to_batch_minor(images)[:, : rows * size, : columns * size]
    return pixels.reshape(channels, rows, size, columns, size, batch)


def _first_maximum(windows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each window's maximum and the row-major position of its first occurrence."""
    size = windows.shape[2]
    largest = windows[:, :, 0, :, 0]
    place = jnp.zeros(largest.shape, jnp.int32)
    for k in range(1, size * size):
        pixel = windows[:, :, k // size, :, k % size]
        place = jnp.where(pixel > largest, k, place)
        largest = jnp.maximum(largest, pixel)
    return largest, place


def _to_batch_minor(images: jax.Array) -> jax.Array:
    """Transpose images to [channels, height, width, batch], in memory too.

    Without the constraint XLA keeps [batch, height, width, channels] in memory and a round of the
    CIFAR network takes 1.6 times as long. The constraint must name the default order of the array
    it applies to: JAX 0.10 misreads arrays that leave `jit` in any other order.
    """
    return with_layout_constraint(images.transpose(3, 1, 2, 0), _ROW_MAJOR)


def _from_batch_minor(pixels: jax.Array) -> jax.Array:
    """Transpose [channels, height, width, batch] to [batch, height, width, channels]."""
    return pixels.transpose(3, 1, 2, 0)
