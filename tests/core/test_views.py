"""A federation seen through another verb, and replies that are wild."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import SimulatedFederation
from simfbo.core.federation import Exchange
from simfbo.core.gate import Asked, Gate
from simfbo.core.local_work import fixed
from simfbo.core.sampling import without_replacement
from simfbo.core.views import View
from simfbo.errors import TooFewReplies
from simfbo.tasks import quadratic

TASK = quadratic(clients=3, dim_x=2, dim_y=2)
KEY = jax.random.key(2)


def double(payload, client):
    return 2.0 * payload


@pytest.fixture(scope="module")
def federation():
    return SimulatedFederation(TASK.data, without_replacement(2), fixed([1, 2, 6]))


def test_the_verb_is_another_and_all_else_is_the_federations(federation):
    calls = []

    def verb(work, payload, cohort, key):
        calls.append((work, payload, cohort, key))
        return 10 * federation.aggregate(work, payload + 1, cohort, key)

    view = View(federation, verb)
    cohort = view.cohort(KEY)
    for seen, own in zip(cohort, federation.cohort(KEY), strict=True):
        np.testing.assert_array_equal(seen, own)
    got = view.aggregate(double, jnp.ones(3), cohort, KEY)
    np.testing.assert_allclose(got, 10 * 2 * 2 * cohort.weights.sum() * np.ones(3), rtol=1e-12)
    assert len(calls) == 1
    assert calls[0][0] is double
    assert view.n == 3
    np.testing.assert_array_equal(view.p, [1 / 3] * 3)
    assert view.mean_norm(KEY) == pytest.approx(3)
    assert view.latest is federation.latest
    assert view.latest.asked.work == "double"


def test_the_books_are_the_federations(federation):
    view = View(federation, federation.aggregate)
    before = federation.ledger.total
    view.aggregate(double, jnp.ones(3), view.cohort(KEY), KEY)
    assert view.ledger is federation.ledger
    assert view.ledger.total.rounds == before.rounds + 1
    assert view.ledger.total.floats_up == before.floats_up + 2 * 3
    assert view.refusals is federation.refusals
    assert view.secret is federation.secret is False


def exchange(admitted, squares):
    asked = Asked(1, "work", np.arange(len(admitted)), np.zeros(1))
    return Exchange(asked, np.array(admitted), np.array(squares, float), [])


@pytest.mark.parametrize(
    ("admitted", "squares", "wild"),
    [
        ([True, True, True], [[1], [1], [1]], False),  # nobody is left out
        ([False, False, False], [[0], [0], [0]], False),  # nobody came
        ([False, False, False], [[np.nan], [np.inf], [1e9]], True),
        ([False, False, False], [[np.nan], [0], [0]], False),  # most never came
        ([False, False, False], [[np.nan], [9], [0]], True),
        ([False, False], [[np.nan], [0]], False),  # a half is not most
        ([True, False], [[5], [np.inf]], True),  # only those left out are asked about
        ([True, False], [[np.inf], [0]], False),
        ([False], [[0, np.nan]], True),  # any leaf will do
    ],
)
def test_wild_is_most_of_those_left_out(admitted, squares, wild):
    assert exchange(admitted, squares).wild is wild


def not_finite(payload, client):
    return payload / 0.0 * jnp.ones(2)


def large(payload, client):
    return payload * jnp.ones(2)


@pytest.mark.parametrize(
    ("work", "gate", "absent", "wild"),
    [
        (not_finite, Gate(), [False] * 3, True),
        (large, Gate(max_norm=1.0), [False] * 3, True),
        (large, Gate(), [True] * 3, False),
        (not_finite, Gate(), [True, True, False], False),
        (not_finite, Gate(), [True, False, False], True),
    ],
)
def test_engines_tell_wild_replies_from_missing_ones(work, gate, absent, wild):
    federation = SimulatedFederation(
        TASK.data, gate=gate, absence=lambda key, ids: np.array(absent)[ids]
    )
    with pytest.raises(TooFewReplies) as caught:
        federation.aggregate(work, jnp.asarray(3.0), federation.cohort(KEY), KEY)
    assert caught.value.exchange.wild is wild
    assert federation.latest is caught.value.exchange
