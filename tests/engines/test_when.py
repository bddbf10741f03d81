"""Exchanges that take place in some rounds only."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import DebugFederation, Method, Point, SimulatedFederation, run
from simfbo.core import BilevelProblem, client_step, grad_lower_y
from simfbo.tasks import random_quadratic
from simfbo.tasks._quadratic import PROBLEM

TASK = random_quadratic(3, 2, 3, seed=1).task()


class EveryThird(Method):
    """A method that adds one gradient to v in every third round, two in every sixth."""

    problem: BilevelProblem = eqx.field(static=True)

    def init(self, x, y):
        return Point(jnp.asarray(x), jnp.asarray(y), jnp.zeros(4))

    def round(self, state, federation, key):
        t, total = state.v[0] + 1, state.v[1:]

        def added():
            return total + federation.sum(self.slope, state, federation.cohort(key), key).y

        def branch():
            one = added()
            return federation.when(t % 6 == 0, lambda: one + added() - total, one)

        v = jnp.append(t, federation.when(t % 3 == 0, branch, total))
        return state._replace(y=0.9 * state.y + 0.1, v=v)

    @client_step
    def slope(self, at, client):
        return Point(y=grad_lower_y(self.problem, at.x, at.y, client.data.lower_batch(client.key)))


@pytest.mark.parametrize("engine", ["compiled", "lanes", "debug"])
def test_the_ledger_counts_the_exchanges_that_took_place(engine):
    """In 13 rounds four times one exchange and, in rounds 6 and 12, one more."""
    federation = (
        DebugFederation(TASK.data)
        if engine == "debug"
        else SimulatedFederation(TASK.data, strategy="lanes" if engine == "lanes" else "batches")
    )
    history = run(EveryThird(PROBLEM), federation, TASK.x0, TASK.y0, rounds=13)
    truth, y, expected = random_quadratic(3, 2, 3, seed=1).closed_form(), TASK.y0, np.zeros(3)
    for t in range(1, 14):
        if t % 3 == 0:
            expected = expected + (2 if t % 6 == 0 else 1) * (truth.A @ y - truth.c)
        y = 0.9 * y + 0.1
    np.testing.assert_allclose(history.method_state.v[1:], expected, rtol=1e-12)
    assert federation.ledger.by_step["slope"].rounds == 6
    assert federation.ledger.total.floats_up == 6 * 3 * 3
