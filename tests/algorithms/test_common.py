"""What methods share: the keys and the lengths of local steps, seen through directions of our own.

The directions here do not depend on the iterate, so a walk is the sum of what its keys draw.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Point
from simfbo.algorithms._common import local_steps, start
from simfbo.algorithms._nested import descend, draw_terms, drift, is_released, require_counts
from simfbo.core.federation import Client
from simfbo.core.local_work import LocalWork, momentum
from simfbo.errors import UserError

KEY, TAU, STEP, ETA = jax.random.key(7), 3, 0.3, Point(0.1, 0.2, 0.3)
DRAWS = [float(jax.random.uniform(jax.random.fold_in(KEY, k))) for k in range(TAU)]


def client(tau=TAU, most=TAU, rule=None):
    """Return a client that takes tau of at most so many steps; it needs no data."""
    work = LocalWork(lambda key, n: np.full(n, tau), most, *([rule] if rule else []))
    return Client(None, work(KEY, 1)[0], KEY)


def drawn(z, key):
    return jax.random.uniform(key) * jnp.ones_like(z)


def test_every_local_step_draws_for_itself():
    def draw(at, client, key):
        return Point(*(drawn(part, key) for part in at))

    at = Point(jnp.zeros(2), jnp.zeros(1), jnp.zeros(1))
    for tau in (1, 2, 3):
        q = local_steps(draw, at, client(tau), ETA)
        np.testing.assert_allclose(np.concatenate(q), sum(DRAWS[:tau]), rtol=1e-12)
    assert float(local_steps(draw, at, client(1, 1), ETA).y[0]) == DRAWS[0]


@pytest.mark.parametrize(("tau", "most"), [(1, 1), (1, 3), (2, 3), (3, 3)])
def test_descend_takes_tau_steps_of_size_step_over_tau(tau, most):
    change = descend(jnp.ones(2), drawn, client(tau, most), STEP)
    np.testing.assert_allclose(change, -STEP / tau * sum(DRAWS[:tau]), rtol=1e-12)


@pytest.mark.parametrize(("tau", "most"), [(1, 1), (1, 3), (2, 3), (3, 3)])
def test_drift_compares_both_gradients_on_the_same_draw(tau, most):
    """gradient(z) = u z with u drawn: the gap at step k is u_k times how far z has moved."""
    z, mean = 2.0, 0.7
    change = drift(
        jnp.full(2, z), lambda z, key: drawn(z, key) * z, jnp.full(2, mean), client(tau, most), STEP
    )
    here = z
    for k in range(tau):
        gap = DRAWS[k] * here - DRAWS[k] * z
        here = here - STEP / tau * (gap + mean)
    np.testing.assert_allclose(change, here - (z - STEP * mean), rtol=1e-12, atol=1e-15)


def test_methods_with_plain_steps_refuse_other_local_rules():
    momentous = client(2, 2, momentum(0.5))
    with pytest.raises(UserError, match="takes plain local steps"):
        descend(jnp.ones(2), drawn, momentous, STEP)
    with pytest.raises(UserError, match="takes plain local steps"):
        drift(jnp.ones(2), drawn, jnp.ones(2), momentous, STEP)


def test_v_starts_at_zero_with_the_shape_of_y():
    state = start(np.ones(2), {"a": np.ones((2, 3), "float32")})
    assert jax.tree.leaves(state.v)[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert jax.tree.leaves(state.v)[0].dtype == np.float32
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_numbers_of_terms_are_drawn_uniformly():
    counts = np.bincount([draw_terms(key, 4) for key in jax.random.split(KEY, 400)])
    assert len(counts) == 4
    assert np.abs(counts - 100).max() < 4 * np.sqrt(400 * 0.25 * 0.75)
    assert draw_terms(KEY, 1) == 0


def test_modes_and_counts():
    assert (is_released("paper"), is_released("as_released")) == (False, True)
    with pytest.raises(UserError, match="must be one of paper, as_released, got 'other'"):
        is_released("other")
    require_counts(a=1, b=2)
    with pytest.raises(UserError, match="b must be at least 1, got 0"):
        require_counts(a=1, b=0)
