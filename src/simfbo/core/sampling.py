"""Samplers: which clients take part in a round, and with which weights.

A sampler is a function (key, p) -> Cohort whose weights make every weighted sum unbiased:

    E sum_{i in C} w_i z_i = sum_i p_i z_i

It is asked once per round, in order. One that depends on its arguments alone declares that with
`keyed`, one that is the same in every round with `constant`: then rounds run in compiled blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from simfbo.core.keys import Purpose, constant, host_rng, keyed
from simfbo.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "Cohort",
    "constant",
    "drop_out",
    "everyone",
    "keyed",
    "with_replacement",
    "without_replacement",
]


class Cohort(NamedTuple):
    """The clients sampled for a round.

    Attributes:
        ids: their numbers, in ascending order.
        weights: w_i, the weight of each client's message in a sum.
    """

    ids: Int[np.ndarray, " cohort"]
    weights: Float[np.ndarray, " cohort"]


Sampler = Callable[[jax.Array, np.ndarray], Cohort]
Absence = Callable[[jax.Array, np.ndarray], np.ndarray]


def everyone() -> Sampler:
    """All clients, with weights p_i."""
    return constant(lambda key, p: Cohort(np.arange(len(p), dtype=np.int32), p))


def without_replacement(size: int) -> Sampler:
    """P = `size` distinct clients, drawn uniformly, with weights (n/P) p_i.

    Variance of the weighted sum: (n-P)/(P(n-1)) times the clients' own; zero at P = n.

    Example:
        >>> import jax, numpy as np
        >>> cohort = without_replacement(2)(jax.random.key(0), np.full(4, 0.25))
        >>> cohort.weights.tolist()
        [0.5, 0.5]
    """
    return _uniform(size, replace=False)


def with_replacement(size: int) -> Sampler:
    """P = `size` independent uniform draws, each with weight (n/P) p_i.

    Variance of the weighted sum: 1/P times the clients' own.
    """
    return _uniform(size, replace=True)


def drop_out(rate: float) -> Absence:
    """Simulate drop-outs: each sampled client fails to reply with probability `rate`.

    Whether a client drops out depends on the exchange and the client, never on who else was
    sampled. Pass the result as `absence` to an engine.

    Example:
        >>> import jax, numpy as np
        >>> drop_out(0.5)(jax.random.key(0), np.arange(4)).tolist()
        [True, True, True, False]
    """
    if not 0 <= rate < 1:
        raise UserError(f"The rate of drop-outs must lie in [0, 1), got {rate}.")

    @keyed
    def absent(key: jax.Array, ids: np.ndarray) -> np.ndarray:
        return host_rng(key, Purpose.DROP_OUT).random(int(ids.max()) + 1)[ids] < rate

    return absent


def _uniform(size: int, replace: bool) -> Sampler:
    """Return the uniform sampler of `size` clients."""

    @keyed
    def sample(key: jax.Array, p: np.ndarray) -> Cohort:
        n = len(p)
        if size < 1 or (size > n and not replace):
            raise UserError(f"A cohort of {size} cannot be drawn from {n} clients.")
        ids = host_rng(key, Purpose.COHORT).choice(n, size, replace=replace)
        ids = np.sort(ids).astype(np.int32)
        return Cohort(ids, p[ids] * (n / size))

    return sample
