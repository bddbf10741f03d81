"""Samplers: who takes part in a round, and with which weights.

A sampler is a function (key, p) -> Cohort whose weights make every weighted sum unbiased:

    E sum_{i in C} w_i z_i = sum_i p_i z_i
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from simfbo.core.keys import host_rng
from simfbo.errors import UserError

_PURPOSE = 1
_ABSENCE = 10


class Cohort(NamedTuple):
    """The clients of a round, in ascending order, and the weight of each one's message."""

    ids: np.ndarray
    weights: np.ndarray


Sampler = Callable[[jax.Array, np.ndarray], Cohort]
Absence = Callable[[jax.Array, np.ndarray], np.ndarray]


def everyone() -> Sampler:
    """Return the sampler that takes all clients, with weights p_i."""
    return lambda key, p: Cohort(np.arange(len(p), dtype=np.int32), p)


def without_replacement(size: int) -> Sampler:
    """Return the sampler of `size` distinct clients, with weights (n/P) p_i.

    Variance of the weighted sum: (n-P)/(P(n-1)) times the clients' own; zero at P = n.

    Example:
        >>> import jax, numpy as np
        >>> cohort = without_replacement(2)(jax.random.key(0), np.full(4, 0.25))
        >>> cohort.weights.tolist()
        [0.5, 0.5]
    """
    return _uniform(size, replace=False)


def with_replacement(size: int) -> Sampler:
    """Return the sampler of `size` independent uniform draws, each with weight (n/P) p_i.

    Variance of the weighted sum: 1/P times the clients' own.
    """
    return _uniform(size, replace=True)


def drop_out(rate: float) -> Absence:
    """Return the rehearsal of drop-outs: each client asked fails to reply with this probability.

    Whether one does depends on the exchange and the client, never on who else was asked.

    Example:
        >>> import jax, numpy as np
        >>> drop_out(0.5)(jax.random.key(0), np.arange(4)).tolist()
        [False, True, False, True]
    """
    if not 0 <= rate < 1:
        raise UserError(f"The rate of drop-outs must lie in [0, 1), got {rate}.")

    def absent(key: jax.Array, ids: np.ndarray) -> np.ndarray:
        return host_rng(key, _ABSENCE).random(int(ids.max()) + 1)[ids] < rate

    return absent


def _uniform(size: int, replace: bool) -> Sampler:
    """Return the uniform sampler of `size` clients."""

    def sample(key: jax.Array, p: np.ndarray) -> Cohort:
        n = len(p)
        if size < 1 or (size > n and not replace):
            raise UserError(f"A cohort of {size} cannot be drawn from {n} clients.")
        ids = host_rng(key, _PURPOSE).choice(n, size, replace=replace)
        ids = np.sort(ids).astype(np.int32)
        return Cohort(ids, p[ids] * (n / size))

    return sample
