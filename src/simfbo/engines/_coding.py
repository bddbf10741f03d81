"""Coded payloads and messages in an engine: what is sent, what arrives, how many bytes it takes."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.codecs.messages import (
    Codecs,
    code_payload,
    decode_message,
    decode_payload,
    down_key,
    encode_payload,
    start_of,
    up_key,
)
from simfbo.core import trees
from simfbo.core.federation import ClientStep
from simfbo.core.gate import Decode
from simfbo.core.keys import client_key
from simfbo.core.ledger import Octets, is_per_client
from simfbo.core.problem import Point, PyTree
from simfbo.privacy import clipped_again


class Sent(NamedTuple):
    """A coded payload: its bytes, where they were made, and how many there are for one client."""

    data: bytes | None
    octets: float


def delivered(
    codecs: Codecs, payload: PyTree, start: Point[PyTree] | None, key: jax.Array
) -> tuple[PyTree, Sent]:
    """Return what clients receive of a payload, computed in JAX, without any bytes."""
    payload = jax.tree.map(jnp.asarray, payload)
    base = trees.on_device(start_of(codecs, payload, start))
    found, octets = _delivered(codecs, payload, base, down_key(key))
    return found, Sent(None, float(octets))


@partial(jax.jit, static_argnums=0)
def _delivered(codecs: Codecs, payload: PyTree, start: PyTree, key: jax.Array) -> Any:
    coded = code_payload(codecs, payload, start, key)
    return coded.tree, coded.weigh()


def really_delivered(
    codecs: Codecs, payload: PyTree, start: Point[PyTree] | None, key: jax.Array
) -> tuple[PyTree, Sent]:
    """Return what clients receive of a payload, decoded from its bytes."""
    payload = jax.tree.map(jnp.asarray, payload)
    own, base = down_key(key), trees.on_device(start_of(codecs, payload, start))
    data = encode_payload(codecs, payload, base, own)
    rest = sum(
        leaf.nbytes // max(1, len(leaf))
        for part in jax.tree.leaves(payload, is_leaf=is_per_client) if is_per_client(part)
        for leaf in jax.tree.leaves(part)
    )  # fmt: skip
    return decode_payload(codecs, data, base, own, payload), Sent(data, len(data) + rest)


def code_key(key: jax.Array, ids: np.ndarray, position: int) -> jax.Array:
    """Return the key that the message at a position of a cohort is coded with."""
    repeat = int(np.count_nonzero(ids[:position] == ids[position]))
    return client_key(up_key(key), int(ids[position]), repeat)


def decoder(
    codecs: Codecs | None, client_step: ClientStep, key: jax.Array, ids: np.ndarray, like: PyTree
) -> Decode | None:
    """Return what decodes the replies of a cohort; None where they are not coded."""
    if codecs is None:
        return None

    def decode(position: int, data: bytes) -> dict[str, np.ndarray]:
        found = decode_message(codecs, data, code_key(key, ids, position), like)
        return trees.as_arrays(clipped_again(client_step, found))

    return decode


def weighed(octets: np.ndarray, replied: int, down: float, computed: bool) -> Octets:
    """Return the bytes of an exchange, of which some clients' messages were weighed.

    Args:
        octets: by position; not a number where they are unknown.
        replied: clients that replied.
        down: bytes of the payloads.
        computed: whether bytes are lengths of codes rather than counted.
    """
    known = octets[np.isfinite(octets)]
    up = replied * float(known.mean()) if len(known) else 0.0
    variance = 0.0
    if 1 < len(known) < replied:  # of a sample without replacement
        variance = replied**2 * (1 - len(known) / replied) * float(known.var(ddof=1)) / len(known)
    some = computed or len(known) < replied
    return Octets(down, up, down * computed + up * some, variance)
