"""Random draws on the host, keyed by JAX keys.

One key serves a whole exchange: the server's draws differ by purpose and come from another
generator than the clients', who fold their id into it.

Whatever a server decides (who takes part, how much work each does) is drawn here: a full
permutation of 10,000 clients costs milliseconds inside jit and nothing on the host.
"""

import os

import jax
import numpy as np

_key_data = jax.jit(jax.random.key_data)


def host_rng(key: jax.Array, purpose: int) -> np.random.Generator:
    """Return a NumPy generator that depends on nothing but `key` and `purpose`."""
    words = np.asarray(_key_data(key)).tolist()
    return np.random.default_rng([purpose, *words])


def secret_key() -> jax.Array:
    """Return a key that nobody else can draw again, from the system's own randomness."""
    like = jax.random.key_data(jax.random.key(0))
    words = np.frombuffer(os.urandom(like.nbytes), np.uint32)
    return jax.random.wrap_key_data(jax.numpy.asarray(words))
