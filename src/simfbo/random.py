"""Random draws on the host, keyed by JAX keys.

Whatever a server decides (who takes part, how much work each does) is drawn here: a full
permutation of 10,000 clients costs milliseconds inside jit and nothing on the host.
"""

import jax
import numpy as np


def host_rng(key: jax.Array, purpose: int) -> np.random.Generator:
    """Return a NumPy generator that depends on nothing but `key` and `purpose`."""
    words = np.asarray(jax.random.key_data(key)).tolist()
    return np.random.default_rng([purpose, *words])
