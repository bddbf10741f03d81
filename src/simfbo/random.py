"""Random draws on the host, keyed by JAX keys.

One key serves a whole exchange: the server's draws differ by purpose and come from another
generator than the clients', who fold their id into it.

Whatever a server decides (who takes part, how much work each does) is drawn here: a full
permutation of 10,000 clients costs milliseconds inside jit and nothing on the host.
"""

import jax
import numpy as np

_key_data = jax.jit(jax.random.key_data)


def host_rng(key: jax.Array, purpose: int) -> np.random.Generator:
    """Return a NumPy generator that depends on nothing but `key` and `purpose`."""
    words = np.asarray(_key_data(key)).tolist()
    return np.random.default_rng([purpose, *words])
