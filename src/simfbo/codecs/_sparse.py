"""Sparse messages: a random subset of the numbers, or the largest."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs._entropy import packed, unpacked
from simfbo.codecs._shared_noise import random_bits
from simfbo.codecs.codec import BadMessage, Codec, Shape, cached_by_arguments
from simfbo.errors import UserError

_LEVELS = 2**16


@cached_by_arguments
def random_subset(share: float) -> Codec:
    """Send each number with probability `share`, divided by it.

    The positions follow from the shared key and cost no bytes. Unbiased, with relative variance
    1 / share - 1.

    Args:
        share: of the numbers that are sent, as float32; it is rounded to 16 bits.
    """
    _require_share(share)
    level = max(1, round(share * _LEVELS))

    def chosen(key: jax.Array, shape: Shape) -> jax.Array:
        return (random_bits(key, int(np.prod(shape))) < np.uint32(level)).reshape(shape)

    on_host = jax.jit(chosen, static_argnums=1)

    def quantise(leaf: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(chosen(key, leaf.shape), leaf, 0.0)

    def restore(symbols: Any, key: jax.Array, shape: Shape) -> jax.Array:
        return jnp.asarray(symbols, jnp.float32) * np.float32(_LEVELS / level)

    def pack(leaf: np.ndarray, symbols: Any, key: jax.Array) -> bytes:
        return np.asarray(symbols[np.asarray(on_host(key, leaf.shape))], "<f4").tobytes()

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Any:
        mask = np.asarray(on_host(key, shape))
        if len(data) != 4 * int(mask.sum()):
            raise BadMessage(f"{len(data)} bytes for {int(mask.sum())} numbers")
        numbers = np.zeros(shape, np.float32)
        numbers[mask] = np.frombuffer(data, "<f4")
        return numbers

    def size(leaf: jax.Array, symbols: Any, key: jax.Array) -> jax.Array:
        return 4.0 * jnp.sum(chosen(key, leaf.shape).astype(jnp.float32))

    name, variance = f"random_subset({share:g})", _LEVELS / level - 1
    return Codec(name, True, variance, True, quantise, restore, pack, unpack, size)


class Largest(NamedTuple):
    """The largest numbers, as bits of bfloat16, and their positions."""

    values: Any
    places: Any


@cached_by_arguments
def top_k(share: float) -> Codec:
    """Send the largest numbers of an array, as bfloat16, with their positions; others become zero.

    Biased: coordinates that are never among the largest are never sent. Theory asks for error
    feedback, where the sender adds the residual to its next message; clients are stateless here, so
    there is none.

    Args:
        share: of the numbers that are sent, at least one of each array.
    """
    _require_share(share)

    def count(shape: Shape) -> int:
        numbers = int(np.prod(shape))
        return min(numbers, max(1, round(share * numbers)))

    def width(shape: Shape) -> int:
        return max(1, (int(np.prod(shape)) - 1).bit_length())

    def encoded_bytes(shape: Shape) -> int:
        return 2 * count(shape) + -(-count(shape) * width(shape) // 8)

    def quantise(leaf: jax.Array, key: jax.Array) -> Largest:
        flat = leaf.reshape(-1)
        places = jnp.sort(jax.lax.top_k(jnp.abs(flat), count(leaf.shape))[1]).astype(jnp.int32)
        halves = flat[places].astype(jnp.bfloat16)
        return Largest(jax.lax.bitcast_convert_type(halves, jnp.uint16), places)

    def restore(symbols: Largest, key: jax.Array, shape: Shape) -> jax.Array:
        values = jax.lax.bitcast_convert_type(jnp.asarray(symbols.values), jnp.bfloat16)
        flat = jnp.zeros(int(np.prod(shape)), jnp.float32)
        return flat.at[symbols.places].set(values.astype(jnp.float32)).reshape(shape)

    def pack(leaf: np.ndarray, symbols: Largest, key: jax.Array) -> bytes:
        places = packed(symbols.places, width(leaf.shape))
        return np.asarray(symbols.values, "<u2").tobytes() + places

    def unpack(data: bytes, key: jax.Array, shape: Shape) -> Largest:
        k, bits = count(shape), width(shape)
        if len(data) != encoded_bytes(shape):
            raise BadMessage(f"{len(data)} bytes for the {k} largest numbers")
        values = np.frombuffer(data[: 2 * k], "<u2").astype(np.uint16)
        places = unpacked(data[2 * k :], k, bits)
        if k and (places.max() >= np.prod(shape) or (np.diff(places) <= 0).any()):
            raise BadMessage("invalid positions")
        return Largest(values, places.astype(np.int32))

    name = f"top_k({share:g})"
    return Codec(
        name,
        False,
        None,
        True,
        quantise,
        restore,
        pack,
        unpack,
        lambda leaf, symbols, key: float(encoded_bytes(leaf.shape)),
    )


def _require_share(share: float) -> None:
    if not 0 < share <= 1:
        raise UserError(f"The share of numbers to send must lie in (0, 1], got {share}.")
