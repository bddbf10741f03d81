"""Low rank: a matrix as the product of two thin ones, each dithered.

    Z ~ L R^T,   L = U sqrt(S), R = V sqrt(S)  of the largest singular values S

Sums of few gradients of a layer have few large singular values, and the factors of a matrix of m
rows and n columns have r (m + n) numbers in place of m n. Components below the noise of the grid
are left out. Biased: what is left out is not sent. The factors' own errors average out.

Factors are multiples of a 32nd of the step, so that their product is exact, and the same wherever
it is computed, as long as its numbers stay below 2^14 squares of the step.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs import _entropy as entropy
from simfbo.codecs._dithered import FINEST, dithered, require_step
from simfbo.codecs._entropy import HAS_RANGE_CODER, Reader, Writer
from simfbo.codecs._shared_noise import dither, root_mean_square, safe, settled
from simfbo.codecs.codec import BadMessage, Codec, Shape, built_once
from simfbo.errors import UserError

_BITS = 4  # of the dither of factors
_MORE, _TURNS = 8, 2  # of the randomised range finder: extra columns, power iterations
_FLOOR = 0.3  # of the squares of numbers that are zero
_OTHERS = 0.5  # the step for what is no matrix, at most


class Factors(NamedTuple):
    """Symbols of a matrix: a scale, components that count, and the numbers of both factors.

    The scale is the square of the factors' step: that of their product.
    """

    scale: Any
    rank: Any
    left: Any
    right: Any


def lowrank(rank: int, step: float, ranged: bool = HAS_RANGE_CODER) -> Codec:
    """Dithered factors of low rank; arrays that are no large matrices are dithered as they are.

    Args:
        rank: the most components that are sent.
        step: of the factors' grid, in square roots of the root mean square of the matrix. Others
            are sent by `dithered(min(step, 0.5))`, finer if they are small.
        ranged: whether numbers are range-coded, by the package constriction; by default, if it is
            installed.
    """
    require_step(step)
    if rank < 1:
        raise UserError(f"lowrank takes a positive rank, got {rank}.")
    return _built(rank, step, ranged, 1.0)


@built_once
def _built(rank: int, step: float, ranged: bool, share: float) -> Codec:
    """Return the codec for an array of a share of the numbers of the largest."""
    other = dithered(max(FINEST, min(step, _OTHERS) * math.sqrt(share)), ranged)

    def thin(shape: Shape) -> bool:
        rows, columns = _matrix(shape)
        return min(rows, columns) < 2 * (rank + _MORE)

    def quantise(leaf: jax.Array, key: jax.Array) -> Any:
        if thin(leaf.shape):
            return other.quantise(leaf, key)
        shape, size = _matrix(leaf.shape), root_mean_square(leaf)
        matrix = leaf.reshape(shape) / safe(size)
        found = factors(jnp.where(jnp.isfinite(matrix), matrix, 0.0), rank)
        left, right, values = jax.lax.optimization_barrier(found)
        noise = step * step / 12 * math.sqrt(shape[0] * shape[1])
        kept = jnp.maximum(1, jnp.sum((values > noise).astype(jnp.int32)))
        kept = jnp.where(size > 0, kept, 0).astype(jnp.int32)
        u, w = _dithers(key, shape, rank)
        counts = jnp.arange(rank) < kept

        def numbers(factor: jax.Array, noise: jax.Array) -> jax.Array:
            k = jnp.round(factor / jnp.float32(step) + noise)
            return jnp.where(counts, k, 0.0).astype(jnp.int32)

        scale = jnp.asarray(step * step, jnp.float32) * size
        return Factors(scale, kept, numbers(left, u), numbers(right, w))

    def restore(symbols: Any, key: jax.Array, shape: Shape) -> jax.Array:
        if thin(shape):
            return other.restore(symbols, key, shape)
        table = _matrix(shape)
        u, w = _dithers(key, table, rank)
        counts = jnp.arange(rank) < symbols.rank
        left = jnp.where(counts, jnp.asarray(symbols.left).astype(jnp.float32) - u, 0.0)
        right = jnp.where(counts, jnp.asarray(symbols.right).astype(jnp.float32) - w, 0.0)
        product = jnp.matmul(left, right.T, precision="highest")
        return settled(product * symbols.scale).reshape(shape)

    def size(leaf: jax.Array, symbols: Any, key: jax.Array) -> jax.Array:
        if thin(leaf.shape):
            return other.size(leaf, symbols, key)
        u, w = _dithers(key, _matrix(leaf.shape), rank)
        left = _octets(symbols.left, u, symbols.rank, ranged)
        found = left + _octets(symbols.right, w, symbols.rank, ranged)
        return jnp.where(symbols.scale > 0, (8 if ranged else 6) + found, 6 if ranged else 5)

    def pack(leaf: np.ndarray, symbols: Any, key: jax.Array) -> bytes:
        if thin(leaf.shape):
            return other.pack(leaf, symbols, key)
        out, kept = Writer(ranged), int(symbols.rank)
        out.float32(symbols.scale)
        if symbols.scale > 0:
            out.whole(kept)
            for k, noise in zip(symbols[2:], _DITHERS(key, _matrix(leaf.shape), rank), strict=True):
                _write(out, k[:, :kept], np.asarray(noise)[:, :kept])
        return out.finish()

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Any:
        if thin(shape):
            return other.unpack(data, key, shape)
        source, table = Reader(data), _matrix(shape)
        found = [np.zeros((length, rank), np.int32) for length in table]
        size, kept = source.float32(), 0
        if not 0 <= size < np.inf:
            raise BadMessage("a step that cannot be")
        if size > 0:
            kept = source.whole()
            if not 0 < kept <= rank:
                raise BadMessage("a rank that cannot be")
            for rows, noise in zip(found, _DITHERS(key, table, rank), strict=True):
                rows[:, :kept] = _read(source, np.asarray(noise)[:, :kept])
        source.finish()
        return Factors(size, np.int32(kept), *found)

    name = f"lowrank({rank}, {step:g})"
    return Codec(
        name, False, None, not ranged, quantise, restore, pack, unpack, size,
        finer=lambda share: _built(rank, step, ranged, share),
    )  # fmt: skip


def factors(matrix: jax.Array, rank: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return L, R and the singular values of the best approximation L R^T of some rank, nearly.

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
    # An eigenvector's sign is arbitrary: without a rule, the last bit of a message decides it.
    sign = jnp.where(start[:, 0] @ right < 0, -1.0, 1.0).astype(right.dtype)
    return (basis @ turn) * (root * sign), right * sign, values


def _orthonormal(span: jax.Array) -> jax.Array:
    """Return an orthonormal basis of some columns, with zeros where they depend on each other.

    By the eigenvectors of their products, in a hundredth of the time of a QR decomposition.
    """
    squares, turn = jnp.linalg.eigh(span.T @ span)
    there = squares > 1e-6 * squares[-1]
    return span @ (turn * jnp.where(there, jax.lax.rsqrt(jnp.where(there, squares, 1.0)), 0.0))


def _matrix(shape: Shape) -> tuple[int, int]:
    """Return the shape of an array as a matrix: its last axis are the columns."""
    if len(shape) < 2:
        return 1, int(np.prod(shape))
    return int(np.prod(shape[:-1])), shape[-1]


def _dithers(key: jax.Array, shape: tuple[int, int], rank: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    return dither(keys[0], (shape[0], rank), _BITS), dither(keys[1], (shape[1], rank), _BITS)


_DITHERS = jax.jit(_dithers, static_argnums=(1, 2))


def _octets(k: jax.Array, noise: jax.Array, rank: jax.Array, ranged: bool) -> jax.Array:
    """Return the bytes of a factor, about."""
    counts = jnp.arange(k.shape[1]) < rank
    if not ranged:
        return jnp.sum(jnp.where(counts, 1 + jax.vmap(entropy.fixed_octets, 1)(k), 0.0))
    numbers = k.astype(jnp.float32)
    before = jnp.cumsum(numbers * numbers, 1) - numbers * numbers
    width = jnp.sqrt((before + _FLOOR) / jnp.maximum(jnp.arange(k.shape[1]), 1).astype(jnp.float32))
    scales = entropy.scale_of(entropy.exponent(jnp.mean(jnp.abs(numbers) / width, 0)))
    bits = jax.vmap(entropy.laplace_bits, 1)(numbers - noise, (scales * width))
    total = jnp.sum(jnp.where(counts, bits + 16, 0.0))
    return 4 * jnp.ceil(total / 32)


def _write(out: Writer, k: np.ndarray, noise: np.ndarray) -> None:
    """Write a factor, column after column: rows that were large before will be again."""
    before = np.zeros(len(k), np.int64)
    for j, column in enumerate(k.T):
        width = _width(before, j)
        mean = jnp.asarray(np.mean(np.abs(column) / width), jnp.float32)
        unit = int(entropy.exponent(mean))
        out.whole(unit)
        out.numbers(column, noise[:, j], width * entropy.exact_scale(np.asarray(unit)))
        before += column.astype(np.int64) ** 2


def _read(source: Reader, noise: np.ndarray) -> np.ndarray:
    """Read what `_write` wrote."""
    found = np.zeros(noise.shape, np.int32)
    before = np.zeros(len(noise), np.int64)
    for j in range(noise.shape[1]):
        scale = _width(before, j) * entropy.exact_scale(np.asarray(source.whole()))
        found[:, j] = source.numbers(len(noise), noise[:, j], scale)
        before += found[:, j].astype(np.int64) ** 2
    return found


def _width(before: np.ndarray, columns: int) -> np.ndarray:
    """Return how large the numbers of each row are, from the squares of those before."""
    return np.sqrt((before + _FLOOR) / max(1, columns))
