"""Low rank: a matrix as the product of two thin ones, each dithered.

    Z ~ L R^T,   L = U sqrt(S), R = V sqrt(S)  of the largest singular values S

Sums of few gradients of a layer have few large singular values, and the factors of a matrix of m
rows and n columns have r (m + n) numbers in place of m n. Components below the quantisation noise
are left out, so the codec is biased; the factors' own errors are unbiased.

Factors are multiples of a 32nd of the step, so their product is exact, and the same on every
machine, as long as its entries stay below 2^14 squares of the step.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs import _entropy as entropy
from simfbo.codecs._dithered import FINEST, dithered, require_step
from simfbo.codecs._entropy import HAS_RANGE_CODER, Reader, Writer
from simfbo.codecs._shared_noise import dither, one_if_zero, root_mean_square, without_fma
from simfbo.codecs.codec import BadMessage, Codec, Shape, cached_by_arguments
from simfbo.errors import UserError

_BITS = 4  # of the dither of factors
_MORE, _TURNS = 8, 2  # of the randomised range finder: extra columns, power iterations
_FLOOR = 0.3  # added to sums of squares, so that a row of zeros has a scale
_OTHERS = 0.5  # the largest step for arrays that are not factored


class Factors(NamedTuple):
    """Symbols of a matrix: a scale, the number of components, and the integers of both factors.

    The scale is the square of the factors' step, the step of their product.
    """

    scale: Any
    rank: Any
    left: Any
    right: Any


def lowrank(rank: int, step: float, ranged: bool = HAS_RANGE_CODER) -> Codec:
    """Dithered factors of low rank; vectors and small matrices are dithered directly.

    Args:
        rank: the largest number of components.
        step: of the factors' grid, relative to the square root of the matrix's root mean square.
            Other arrays are sent by `dithered(min(step, 0.5))`, with a finer step if they are
            small.
        ranged: use the range coder of the package constriction; by default, if it is installed.
    """
    require_step(step)
    if rank < 1:
        raise UserError(f"lowrank takes a positive rank, got {rank}.")
    return _built(rank, step, ranged, 1.0)


@cached_by_arguments
def _built(rank: int, step: float, ranged: bool, share: float) -> Codec:
    """Return the codec of an array that has this share of the largest array's numbers."""
    other = dithered(max(FINEST, min(step, _OTHERS) * math.sqrt(share)), ranged)

    def is_small(shape: Shape) -> bool:
        rows, columns = _matrix(shape)
        return min(rows, columns) < 2 * (rank + _MORE)

    def quantise(leaf: jax.Array, key: jax.Array) -> Any:
        if is_small(leaf.shape):
            return other.quantise(leaf, key)
        shape, size = _matrix(leaf.shape), root_mean_square(leaf)
        matrix = leaf.reshape(shape) / one_if_zero(size)
        decomposition = factors(jnp.where(jnp.isfinite(matrix), matrix, 0.0), rank)
        left, right, values = jax.lax.optimization_barrier(decomposition)
        noise = step * step / 12 * math.sqrt(shape[0] * shape[1])
        components = jnp.maximum(1, jnp.sum((values > noise).astype(jnp.int32)))
        components = jnp.where(size > 0, components, 0).astype(jnp.int32)
        u, w = _dithers(key, shape, rank)
        used = jnp.arange(rank) < components

        def numbers(factor: jax.Array, noise: jax.Array) -> jax.Array:
            k = jnp.round(factor / jnp.float32(step) + noise)
            return jnp.where(used, k, 0.0).astype(jnp.int32)

        scale = jnp.asarray(step * step, jnp.float32) * size
        return Factors(scale, components, numbers(left, u), numbers(right, w))

    def restore(symbols: Any, key: jax.Array, shape: Shape) -> jax.Array:
        if is_small(shape):
            return other.restore(symbols, key, shape)
        table = _matrix(shape)
        u, w = _dithers(key, table, rank)
        used = jnp.arange(rank) < symbols.rank
        left = jnp.where(used, jnp.asarray(symbols.left).astype(jnp.float32) - u, 0.0)
        right = jnp.where(used, jnp.asarray(symbols.right).astype(jnp.float32) - w, 0.0)
        product = jnp.matmul(left, right.T, precision="highest")
        return without_fma(product * symbols.scale).reshape(shape)

    def size(leaf: jax.Array, symbols: Any, key: jax.Array) -> jax.Array:
        if is_small(leaf.shape):
            return other.size(leaf, symbols, key)
        u, w = _dithers(key, _matrix(leaf.shape), rank)
        left = _factor_bytes(symbols.left, u, symbols.rank, ranged)
        coded_bytes = left + _factor_bytes(symbols.right, w, symbols.rank, ranged)
        return jnp.where(symbols.scale > 0, (8 if ranged else 6) + coded_bytes, 6 if ranged else 5)

    def pack(leaf: np.ndarray, symbols: Any, key: jax.Array) -> bytes:
        if is_small(leaf.shape):
            return other.pack(leaf, symbols, key)
        out, components = Writer(ranged), int(symbols.rank)
        out.float32(symbols.scale)
        if symbols.scale > 0:
            out.whole(components)
            for k, noise in zip(symbols[2:], _DITHERS(key, _matrix(leaf.shape), rank), strict=True):
                _write(out, k[:, :components], np.asarray(noise)[:, :components])
        return out.finish()

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Any:
        if is_small(shape):
            return other.unpack(data, key, shape)
        source, table = Reader(data), _matrix(shape)
        factor_symbols = [np.zeros((length, rank), np.int32) for length in table]
        size, components = source.float32(), 0
        if not 0 <= size < np.inf:
            raise BadMessage("a step that cannot be")
        if size > 0:
            components = source.whole()
            if not 0 < components <= rank:
                raise BadMessage("a rank that cannot be")
            for rows, noise in zip(factor_symbols, _DITHERS(key, table, rank), strict=True):
                rows[:, :components] = _read(source, np.asarray(noise)[:, :components])
        source.finish()
        return Factors(size, np.int32(components), *factor_symbols)

    name = f"lowrank({rank}, {step:g})"
    return Codec(
        name,
        False,
        None,
        not ranged,
        quantise,
        restore,
        pack,
        unpack,
        size,
        finer=lambda share: _built(rank, step, ranged, share),
    )


def factors(matrix: jax.Array, rank: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Approximate the L, R and singular values of the best approximation L R^T of some rank.

    A randomised range finder with power iterations (Halko, Martinsson, Tropp 2011).
    """
    # Drawn on the host: a compiler that folds constants may round the last bit otherwise.
    start = np.random.default_rng(0).standard_normal((matrix.shape[1], rank + _MORE), np.float32)
    span = matrix @ start
    for _ in range(_TURNS):
        span = matrix @ (matrix.T @ _orthonormal(span))
    basis = _orthonormal(span)
    inside = basis.T @ matrix
    squares, turn = jnp.linalg.eigh(inside @ inside.T)
    values = jnp.sqrt(jnp.maximum(squares[::-1][:rank], 0.0))
    turn = turn[:, ::-1][:, :rank]
    root = jnp.sqrt(values)
    right = (inside.T @ turn) / jnp.where(root > 0, root, 1.0)
    # An eigenvector's sign is arbitrary: fixed here, or the last bit of a message would decide it.
    sign = jnp.where(start[:, 0] @ right < 0, -1.0, 1.0).astype(right.dtype)
    return (basis @ turn) * (root * sign), right * sign, values


def _orthonormal(span: jax.Array) -> jax.Array:
    """Return an orthonormal basis of some columns, with zeros for dependent ones.

    By the eigenvectors of their products, in a hundredth of the time of a QR decomposition.
    """
    squares, turn = jnp.linalg.eigh(span.T @ span)
    independent = squares > 1e-6 * squares[-1]
    return span @ (
        turn * jnp.where(independent, jax.lax.rsqrt(jnp.where(independent, squares, 1.0)), 0.0)
    )


def _matrix(shape: Shape) -> tuple[int, int]:
    """Return the shape of an array as a matrix; its last axis are the columns."""
    if len(shape) < 2:
        return 1, int(np.prod(shape))
    return int(np.prod(shape[:-1])), shape[-1]


def _dithers(key: jax.Array, shape: tuple[int, int], rank: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    return dither(keys[0], (shape[0], rank), _BITS), dither(keys[1], (shape[1], rank), _BITS)


_DITHERS = jax.jit(_dithers, static_argnums=(1, 2))


def _factor_bytes(k: jax.Array, noise: jax.Array, rank: jax.Array, ranged: bool) -> jax.Array:
    """Estimate the bytes of a factor."""
    counts = jnp.arange(k.shape[1]) < rank
    if not ranged:
        return jnp.sum(jnp.where(counts, 1 + jax.vmap(entropy.fixed_length_bytes, 1)(k), 0.0))
    numbers = k.astype(jnp.float32)
    before = jnp.cumsum(numbers * numbers, 1) - numbers * numbers
    width = jnp.sqrt((before + _FLOOR) / jnp.maximum(jnp.arange(k.shape[1]), 1).astype(jnp.float32))
    scales = entropy.scale_of(entropy.exponent(jnp.mean(jnp.abs(numbers) / width, 0)))
    bits = jax.vmap(entropy.laplace_bits, 1)(numbers - noise, (scales * width))
    total = jnp.sum(jnp.where(counts, bits + 16, 0.0))
    return 4 * jnp.ceil(total / 32)


def _write(out: Writer, k: np.ndarray, noise: np.ndarray) -> None:
    """Write a factor column by column, with row scales estimated from earlier columns."""
    before = np.zeros(len(k), np.int64)
    for j, column in enumerate(k.T):
        width = _width(before, j)
        mean = jnp.asarray(np.mean(np.abs(column) / width), jnp.float32)
        unit = int(entropy.exponent(mean))
        out.whole(unit)
        out.numbers(column, noise[:, j], width * entropy.exact_scale(np.asarray(unit)))
        before += column.astype(np.int64) ** 2


def _read(source: Reader, noise: np.ndarray) -> np.ndarray:
    """Read a factor; the inverse of `_write`."""
    factor = np.zeros(noise.shape, np.int32)
    before = np.zeros(len(noise), np.int64)
    for j in range(noise.shape[1]):
        scale = _width(before, j) * entropy.exact_scale(np.asarray(source.whole()))
        factor[:, j] = source.numbers(len(noise), noise[:, j], scale)
        before += factor[:, j].astype(np.int64) ** 2
    return factor


def _width(before: np.ndarray, columns: int) -> np.ndarray:
    """Return the scale of each row, from the squares of its earlier numbers."""
    return np.sqrt((before + _FLOOR) / max(1, columns))
