"""Subtractive dither: round to a grid that a shared key shifts, and shift back.

    k = round(z / s + u),   z^ = s (k - u),   u uniform in (-1/2, 1/2), known to both sides

For every z the error z^ - z is uniform in (-s/2, s/2): unbiased at any step, of variance s^2 / 12,
and independent of z (Schuchman 1964). A coarse step makes most k zero, and range coding makes zeros
nearly free. The scales of rows and columns are sent along as the parameters of the entropy code.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs import _entropy as entropy
from simfbo.codecs._entropy import HAS_RANGE_CODER, Reader, Writer
from simfbo.codecs._shared_noise import dither, one_if_zero, root_mean_square, without_fma
from simfbo.codecs.codec import BadMessage, Codec, Shape, cached_by_arguments
from simfbo.errors import UserError

FINEST = 1e-4  # the smallest step
_WORTH = 16  # numbers per scale that is sent


class Dithered(NamedTuple):
    """Symbols of a dithered leaf: the step and the integers k."""

    step: Any
    k: Any


@cached_by_arguments
def dithered(step: float, ranged: bool = HAS_RANGE_CODER) -> Codec:
    """Subtractive dither, with entropy coding.

    Args:
        step: of the grid, relative to the root mean square of the array: 0.1 is fine, 4 is coarse.
            The relative variance is step^2 / 12. Of several arrays the largest has this step; one
            with a share s of its numbers has sqrt(s) times that step.
        ranged: use the range coder of the package constriction; by default, if it is installed.

    Example:
        >>> import numpy as np
        >>> codec, z = dithered(0.5), np.ones(1000, "float32")
        >>> data = codec.encode(z, jax.random.key(0))
        >>> decoded = codec.decode(data, jax.random.key(0), like=z)
        >>> bool(abs(decoded - z).max() <= 0.25), len(data) < 600
        (True, True)
    """
    require_step(step)

    def quantise(leaf: jax.Array, key: jax.Array) -> Dithered:
        size = jnp.asarray(step, jnp.float32) * root_mean_square(leaf)
        k = jnp.round(leaf / one_if_zero(size) + dither(key, leaf.shape))
        return Dithered(size, jnp.where(size > 0, k, 0.0).astype(jnp.int32))

    def size(leaf: jax.Array, symbols: Dithered, key: jax.Array) -> jax.Array:
        if ranged:
            coded_bytes = _range_coded_bytes(leaf, symbols, dither(key, leaf.shape))
        else:
            coded_bytes = 5 + entropy.fixed_length_bytes(symbols.k)
        large = jnp.max(jnp.abs(symbols.k), initial=0) >= (entropy.MOST if ranged else 2**30)
        return jnp.where(large, 4 * leaf.size, jnp.where(symbols.step > 0, coded_bytes, 5))

    def pack(leaf: np.ndarray, symbols: Dithered, key: jax.Array) -> bytes:
        out = Writer(ranged)
        out.float32(symbols.step)
        if symbols.step > 0:
            _write(out, leaf, symbols, np.asarray(_DITHER(key, leaf.shape)), ranged)
        return out.finish()

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Dithered:
        source = Reader(data)
        size = source.float32()
        if not 0 <= size < np.inf:
            raise BadMessage("an invalid step")
        k = np.zeros(shape, np.int32)
        if size > 0:
            k = _read(source, np.asarray(_DITHER(key, shape)), shape)
        source.finish()
        return Dithered(size, k)

    name = f"dithered({step:g})"
    return Codec(
        name,
        True,
        step**2 / 12,
        not ranged,
        quantise,
        restore,
        pack,
        unpack,
        size,
        finer=lambda share: dithered(max(FINEST, step * math.sqrt(share)), ranged),
    )


def require_step(step: float) -> None:
    """Raise unless the step is finite and not too small."""
    if not FINEST <= step < float("inf"):
        raise UserError(f"The step of a codec must be at least {FINEST:g}, got {step}.")


_DITHER = jax.jit(dither, static_argnums=1)


def restore(symbols: Dithered, key: jax.Array, shape: Shape) -> jax.Array:
    """Return s (k - u); zeros for a step of zero."""
    u = dither(key, shape)
    return without_fma((symbols.k.astype(jnp.float32) - u) * symbols.step)


def _table(shape: Shape) -> tuple[int, int]:
    """Return the numbers of row and column scales of an array; (1, 0) for a single scale."""
    if len(shape) < 2:
        return 1, 0
    columns = shape[-1]
    rows = int(np.prod(shape[:-1]))
    return (rows, columns) if rows * columns >= _WORTH * (rows + columns) else (1, 0)


def _scales(leaf: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return exponents of row and column scales whose product approximates |leaf| / step.

    Arrays for which they cost more than they save have a single scale.
    """
    units = leaf / one_if_zero(step)
    rows, columns = _table(units.shape)
    if not columns:
        mean = jnp.mean(jnp.abs(units)) if units.size else jnp.zeros((), jnp.float32)
        return entropy.exponent(mean)[None], jnp.zeros(0, jnp.int32)
    size = jnp.abs(units).reshape(rows, columns)
    r = jnp.maximum(jnp.mean(size, 1), 2.0**-20)
    c = jnp.maximum(jnp.mean(size / r[:, None], 0), 2.0**-20)
    r = jnp.mean(size / c, 1)
    return entropy.exponent(r), entropy.exponent(c)


_SCALES = jax.jit(_scales)


def _range_coded_bytes(leaf: jax.Array, symbols: Dithered, u: jax.Array) -> jax.Array:
    """Estimate the number of bytes that the range coder needs."""
    rows, columns = jax.lax.optimization_barrier(_scales(leaf, symbols.step))
    distance = symbols.k.astype(jnp.float32) - u
    bits = entropy.side_bits(rows)
    scale = entropy.scale_of(rows[0])
    if columns.size:
        exponents = rows[:, None] + columns
        scale = entropy.scale_of(exponents)
        distance = distance.reshape(scale.shape)
        bits = bits + entropy.side_bits(columns)
    bits = bits + entropy.laplace_bits(distance, scale)
    return 8 + (6 if columns.size else 0) + 4 * jnp.ceil(bits / 32)


def _write(out: Writer, leaf: np.ndarray, symbols: Dithered, u: np.ndarray, ranged: bool) -> None:
    if not ranged:
        out.numbers(symbols.k, 0.0, 1.0)
        return
    rows, columns = map(np.asarray, _SCALES(leaf, symbols.step))
    if not columns.size:
        out.whole(int(rows[0]))
        out.numbers(symbols.k, u, entropy.exact_scale(rows[0]))
        return
    out.exponents(rows)
    out.exponents(columns)
    out.numbers(symbols.k, u, entropy.exact_scale(rows[:, None] + columns))


def _read(source: Reader, u: np.ndarray, shape: Shape) -> np.ndarray:
    count = int(np.prod(shape))
    if not source.ranged:
        return source.numbers(count, 0.0, 1.0).reshape(shape)
    rows, columns = _table(shape)
    if not columns:
        exponents = np.asarray(source.whole())
        if abs(int(exponents)) > 2**15:
            raise BadMessage("an invalid scale")
    else:
        exponents = source.exponents(rows)[:, None] + source.exponents(columns)
    return source.numbers(count, u, entropy.exact_scale(exponents)).reshape(shape)
