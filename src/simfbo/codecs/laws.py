"""The laws that a codec must obey; each measure takes a codec and returns a number."""

import math
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.codec import BadMessage, Codec, framed, leaf_key, received, varint

_KEYS = 2000
_MUTANTS = 100


class CodecLaw(NamedTuple):
    """A law that codecs must obey.

    Attributes:
        name: of the law.
        says: the requirement.
        measure: (codec) -> the number measured.
        limit: the largest number that obeys the law.
    """

    name: str
    says: str
    measure: Callable[[Codec], float]
    limit: float


def _examples() -> dict[str, np.ndarray]:
    """Return arrays of many kinds: normal, uneven, of low rank, zero, huge, minute and empty."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((64, 96))
    low = rng.standard_normal((64, 3)) @ rng.standard_normal((3, 96))
    arrays = {
        "normal": normal,
        "uneven": normal * np.exp(2 * rng.standard_normal((64, 1))),
        "low": low,
        "zero": 0 * normal,
        "huge": 1e30 * normal,
        "minute": 1e-30 * normal,
        "vector": rng.standard_cauchy(300),
        "kernel": normal[:2, :6].reshape(2, 2, 3, 1),
        "empty": normal[:0, :0],
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


@partial(jax.jit, static_argnums=0)
def _twin(codec: Codec, z: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a message as a simulation computes it, and its bytes."""
    restored, count_bytes = received(codec, z, leaf_key(key, 0))
    return restored, count_bytes()


@partial(jax.jit, static_argnums=0)
def _many(codec: Codec, z: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.lax.map(lambda key: received(codec, z, key)[0], keys)


@lru_cache(maxsize=2)  # shared by two laws; an array may have 50 MB
def _decoded_examples(codec: Codec, name: str) -> np.ndarray:
    """Decode an example with each of many keys."""
    keys = jax.random.split(jax.random.key(1), _KEYS)
    return np.asarray(_many(codec, _examples()[name], keys))


def bias(codec: Codec) -> float:
    """Return the bias of the mean over keys, in standard errors.

    The largest over three directions: the message itself, a random one, and the vector of ones.
    """
    rng, worst = np.random.default_rng(3), 0.0
    for name in ("vector", "normal"):
        z = _examples()[name]
        decoded = _decoded_examples(codec, name).astype(float)
        gaps = (decoded - z).reshape(_KEYS, -1)
        for direction in (z.ravel(), rng.standard_normal(z.size), np.ones(z.size)):
            along = gaps @ (direction / np.linalg.norm(direction))
            error = along.std(ddof=1) / math.sqrt(_KEYS)
            floor = 1e-6 * np.linalg.norm(z)  # rounding error
            worst = max(worst, abs(along.mean()) / max(error, floor))
    return float(worst)


def variance_gap(codec: Codec) -> float:
    """Return the relative deviation of the measured variance from the stated one."""
    if not codec.variance:
        return 0.0
    z = _examples()["normal"]
    decoded = _decoded_examples(codec, "normal").astype(float)
    measured = ((decoded - z) ** 2).sum() / (_KEYS * (z.astype(float) ** 2).sum())
    return float(abs(measured - codec.variance) / codec.variance)


def scale_gap(codec: Codec) -> float:
    """Return the spread of relative errors over huge, minute and usual numbers."""
    errors, key = {}, jax.random.key(10)
    for name in ("normal", "huge", "minute"):
        z = _examples()[name].astype(float)
        decoded = codec.decode(codec.encode(z, key), key, _examples()[name])
        errors[name] = np.linalg.norm((decoded - z) / np.abs(z).max()) / np.linalg.norm(
            z / np.abs(z).max()
        )
    return float(max(errors.values()) - min(errors.values()))


def twin_gap(codec: Codec) -> float:
    """Return the number of entries in which decode(encode) and its equivalent in JAX differ."""
    key, different = jax.random.key(3), 0
    for z in _examples().values():
        real = codec.decode(codec.encode(z, key), key, z)
        twin = np.asarray(_twin(codec, z, key)[0])
        different += int((real.view(np.uint32) != twin.view(np.uint32)).sum())
    return float(different)


def size_gap(codec: Codec) -> float:
    """Return the largest relative error of computed sizes; of less than 1,000 bytes, per 1,000."""
    key, worst = jax.random.key(4), 0.0
    for z in _examples().values():
        real = len(codec.encode(z, key)) - 4
        encoded_bytes = float(_twin(codec, z, key)[1])
        framed = encoded_bytes + sum(encoded_bytes >= 2**bits for bits in (7, 14, 21)) + 1
        gap = abs(framed - real)
        worst = max(worst, gap if codec.exact_size else gap / max(real, 1000))
    return worst


def excess(codec: Codec) -> float:
    """Return the largest number of bytes by which a message exceeds its float32 form."""
    key = jax.random.key(5)
    return float(max(len(codec.encode(z, key)) - z.nbytes for z in _examples().values()))


def crashes(codec: Codec) -> float:
    """Count mutated messages that are neither rejected nor decoded to an array of the shape."""
    rng, key, failed = np.random.default_rng(11), jax.random.key(6), 0
    for name in ("vector", "uneven"):
        z = _examples()[name]
        data = codec.encode(z, key)
        for _ in range(_MUTANTS):
            failed += not survives(codec, mutated(data, rng), key, z)
    return float(failed)


def survives(codec: Codec, data: bytes, key: jax.Array, like: Any) -> bool:
    """Check whether bytes are decoded to an array of the right shape, or rejected."""
    try:
        decoded = codec.decode(data, key, like)
    except BadMessage:
        return True
    except Exception:
        return False
    return decoded.shape == like.shape and decoded.dtype == like.dtype


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a message with bytes changed, cut, repeated or added, and a valid checksum."""
    body = bytearray(data[:-4])
    kind, at = rng.integers(5), int(rng.integers(max(1, len(body))))
    if kind == 0 and body:
        for place in rng.integers(len(body), size=rng.integers(1, 5)):
            body[place] = rng.integers(256)
    elif kind == 1:
        del body[at:]
    elif kind == 2:
        body[at:at] = rng.bytes(int(rng.integers(1, 20)))
    elif kind == 3:
        body[at : at + 4] = b"\xff" * 4
    elif body:
        body[at : at + 1] = bytes([body[at] ^ 1 << int(rng.integers(8))])
    inner = bytes(body)
    if rng.random() < 0.5:  # a valid frame around invalid contents
        head = len(varint(len(data)))
        return framed([inner[head:]])
    return inner + zlib.crc32(inner).to_bytes(4, "little")


def identity_gap(codec: Codec) -> float:
    """Count entries that a lossless codec changes; zero for the others."""
    if codec.variance != 0.0:
        return 0.0
    key, different = jax.random.key(8), 0
    for z in _examples().values():
        real = codec.decode(codec.encode(z, key), key, z)
        different += int((real.view(np.uint32) != z.view(np.uint32)).sum())
    return float(different)


def infinity_gap(codec: Codec) -> float:
    """Count messages that are not finite but are decoded to finite numbers."""
    key, passed = jax.random.key(9), 0
    for bad in (np.nan, np.inf, -np.inf):
        z = _examples()["vector"]
        z[7] = bad
        passed += bool(np.isfinite(codec.decode(codec.encode(z, key), key, z)).all())
        passed += bool(jnp.isfinite(_twin(codec, z, key)[0]).all())
    return float(passed)


CODEC_LAWS = (
    CodecLaw("unbiased", "The mean over keys is the message, to 3 standard errors.", bias, 3.0),
    CodecLaw("variance", "The relative variance is as stated, to 2 %.", variance_gap, 0.02),
    CodecLaw("scale", "Relative errors do not depend on units.", scale_gap, 1e-3),
    CodecLaw("twin", "The simulated message equals decode(encode) to the bit.", twin_gap, 0.0),
    CodecLaw("size", "Computed sizes are right: to 0.5 %, exactly if so stated.", size_gap, 0.005),
    CodecLaw("small", "A message has at most 64 bytes more than as float32.", excess, 64.0),
    CodecLaw("identity", "A codec of variance zero changes no bit.", identity_gap, 0.0),
    CodecLaw("not finite", "Messages that are not finite stay so.", infinity_gap, 0.0),
    CodecLaw("hostile", "Mutated messages are rejected, or decoded to some array.", crashes, 0.0),
)
