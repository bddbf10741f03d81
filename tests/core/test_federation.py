"""A federation seen through other functions, and engines that tell refusals from silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import SimulatedFederation
from simfbo.core.federation import View
from simfbo.core.gate import Gate
from simfbo.core.keys import keyed
from simfbo.core.local_work import fixed
from simfbo.core.sampling import without_replacement
from simfbo.errors import TooFewReplies
from simfbo.tasks import quadratic

TASK = quadratic(clients=3, dim_x=2, dim_y=2)
KEY = jax.random.key(2)


def double(payload, client):
    return 2.0 * payload


def stepped(payload, client):
    return 0.2 * payload


@pytest.fixture(scope="module")
def federation():
    return SimulatedFederation(TASK.data, without_replacement(2), fixed([1, 2, 6]))


def test_sum_and_gather_are_others_and_all_else_is_the_federations(federation):
    calls = []

    def ten_times(*call):
        calls.append(call)
        return 10 * federation.sum(*call)

    def first_only(*call):
        calls.append(call)
        return federation.gather(*call)[:1]

    view = View(federation, ten_times, first_only)
    cohort = view.cohort(KEY)
    for seen, own in zip(cohort, federation.cohort(KEY), strict=True):
        np.testing.assert_array_equal(seen, own)
    got = view.sum(stepped, jnp.ones(3), cohort, KEY)
    np.testing.assert_allclose(got, 10 * 0.2 * cohort.weights.sum() * np.ones(3), rtol=1e-12)
    assert view.gather(stepped, jnp.ones(3), cohort, KEY).tolist() == [[0.2] * 3]
    for client_step, payload, members, key in calls:
        assert client_step is stepped
        assert (members, key) == (cohort, KEY)
        assert payload.tolist() == [1, 1, 1]
    assert len(calls) == 2
    assert view.n == 3
    np.testing.assert_array_equal(view.p, [1 / 3] * 3)
    assert view.mean_norm(KEY) == pytest.approx(3)
    assert view.latest is federation.latest
    assert view.latest.request.client_step == "stepped"


def test_the_books_are_the_federations(federation):
    view = View(federation, federation.sum, federation.gather)
    before = federation.ledger.total
    view.sum(double, jnp.ones(3), view.cohort(KEY), KEY)
    assert view.ledger is federation.ledger
    assert view.ledger.total.rounds == before.rounds + 1
    assert view.ledger.total.floats_up == before.floats_up + 2 * 3
    assert view.refusals is federation.refusals
    assert view.secret is federation.secret is False


def not_finite(payload, client):
    return payload / 0.0 * jnp.ones(2)


def large(payload, client):
    return payload * jnp.ones(2)


@pytest.mark.parametrize(
    ("step", "gate", "absent", "oversized"),
    [
        (not_finite, Gate(), [False] * 3, True),
        (large, Gate(max_norm=1.0), [False] * 3, True),
        (large, Gate(), [True] * 3, False),
        (not_finite, Gate(), [True, True, False], False),
        (not_finite, Gate(), [True, False, False], True),
    ],
)
def test_engines_tell_oversized_replies_from_missing_ones(step, gate, absent, oversized):
    federation = SimulatedFederation(
        TASK.data, gate=gate, absence=keyed(lambda key, ids: np.array(absent)[ids])
    )
    with pytest.raises(TooFewReplies) as caught:
        federation.sum(step, jnp.asarray(3.0), federation.cohort(KEY), KEY)
    assert caught.value.exchange.mostly_oversized is oversized
    assert federation.latest is caught.value.exchange
