"""rho = sum_j p_j ||a_j||_1, the mean amount of local work, as the server knows it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from simfbo.core.federation import Federation
from simfbo.core.problem import Scalar
from simfbo.core.sampling import Cohort


def mean_work(
    federation: Federation, cohort: Cohort, key: jax.Array, norm: jax.Array, state: Any
) -> Scalar:
    """Return rho, exact where it is known, else the mean of earlier rounds.

    This round's own estimate is correlated with its messages and would make them biased.

    Args:
        federation: which knows rho where the server assigns the local work.
        cohort: the clients of this round.
        key: of this round.
        norm: the cohort's own estimate, exact if it is everyone.
        state: with `norm_sum` and `norm_count` of earlier estimates.
    """
    rho = federation.mean_norm(key)
    if rho is not None:
        return rho
    if len(cohort.ids) != federation.n:
        return earlier_mean(state)
    return jnp.where(jnp.all(cohort.ids == np.arange(federation.n, dtype=np.int32)), norm,
                     earlier_mean(state))  # fmt: skip


def earlier_mean(state: Any) -> jax.Array:
    """Return the mean estimate of rho over earlier rounds; 1 before there is any."""
    return jnp.where(state.norm_count > 0, state.norm_sum / jnp.maximum(state.norm_count, 1), 1.0)
