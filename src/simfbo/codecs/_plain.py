"""Floats coded one by one: unchanged, or with 8 bits of mantissa."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.codec import BadMessage, Codec, Shape, cached_by_arguments, floats


@cached_by_arguments
def float32() -> Codec:
    """Floats of 32 bits, unchanged."""

    def pack(leaf: np.ndarray, symbols: Any, key: jax.Array) -> bytes:
        return np.asarray(symbols, "<f4").tobytes()

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Any:
        return floats(data, shape)

    def same(symbols: Any, key: jax.Array, shape: Shape) -> jax.Array:
        return symbols

    return Codec(
        "float32()",
        True,
        0.0,
        True,
        lambda leaf, key: leaf,
        same,
        pack,
        unpack,
        lambda leaf, symbols, key: 4.0 * leaf.size,
    )


@cached_by_arguments
def bfloat16() -> Codec:
    """Floats of 16 bits, rounded to 8 bits of mantissa: half the bytes, and nearly unbiased.

    Rounding is deterministic, with an error of up to 0.4 %, so the codec counts as biased.
    """

    def quantise(leaf: jax.Array, key: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(leaf.astype(jnp.bfloat16), jnp.uint16)

    def restore(symbols: Any, key: jax.Array, shape: Shape) -> jax.Array:
        halves = jax.lax.bitcast_convert_type(symbols, jnp.bfloat16)
        return halves.astype(jnp.float32)

    def pack(leaf: np.ndarray, symbols: Any, key: jax.Array) -> bytes:
        return np.asarray(symbols, "<u2").tobytes()

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Any:
        if len(data) != 2 * int(np.prod(shape, dtype=object)):
            raise BadMessage(f"{len(data)} bytes for an array of shape {shape}")
        return np.frombuffer(data, "<u2").astype(np.uint16).reshape(shape)

    return Codec(
        "bfloat16()",
        False,
        None,
        True,
        quantise,
        restore,
        pack,
        unpack,
        lambda leaf, symbols, key: 2.0 * leaf.size,
    )
