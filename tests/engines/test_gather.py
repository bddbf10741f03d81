"""`gather`: messages one by one, on every engine that computes or counts them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import DebugFederation, Gate, PerClient, Point, SimulatedFederation, UserError
from simfbo.core.data import from_clients
from simfbo.core.exchange import Reason
from simfbo.core.keys import client_key, keyed
from simfbo.core.local_work import fixed
from simfbo.core.sampling import Cohort
from simfbo.engines import CountingFederation
from simfbo.errors import TooFewReplies

KEY = jax.random.key(11)
ENGINES = [SimulatedFederation, DebugFederation]
NUMBERS = np.array([1.0, 2.0, 3.0, 5.0, 8.0])
SAMPLES = [np.full((1, 2), number) for number in NUMBERS]
DATA = from_clients(SAMPLES, SAMPLES, p=[1, 2, 3, 4, 5])


def own(payload, client):
    """Return a message of two leaves: the client's sample times the payload, and a number."""
    sample = client.data.lower_batch(client.key)[0]
    return Point(y=payload * sample), sample[0]


def cohort(*ids, weights=None):
    return Cohort(np.array(ids, np.int32), np.ones(len(ids)) if weights is None else weights)


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_are_raw_and_in_the_order_of_the_cohort(engine):
    """Whatever the weights are, and however the clients' work is dealt to the two lanes."""
    federation = engine(DATA, local_work=fixed([1, 5, 2, 4, 3]))
    for weights in (np.ones(4), np.array([0.1, -7.0, 0.0, 1e9])):
        members = cohort(0, 1, 3, 4, weights=weights)
        found, number = federation.gather(own, jnp.array([1.0, -1.0]), members, KEY)
        np.testing.assert_array_equal(found.y, NUMBERS[[0, 1, 3, 4], None] * [1, -1])
        np.testing.assert_array_equal(number, NUMBERS[[0, 1, 3, 4]])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_weighted_sum_is_the_sum_of_what_is_gathered(engine):
    federation, members = engine(DATA), cohort(0, 2, 2, 4, weights=np.array([0.5, 2.0, -1.0, 0.3]))
    total, number = federation.sum(own, jnp.ones(2), members, KEY)
    found, numbers = federation.gather(own, jnp.ones(2), members, KEY)
    np.testing.assert_allclose(total.y, members.weights @ np.asarray(found.y), rtol=1e-12)
    np.testing.assert_allclose(number, members.weights @ np.asarray(numbers), rtol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_refused_are_zero_and_the_others_weigh_more(engine):
    """Five asked, one too large and one silent: zeros in their places, the others times 5/3."""
    federation = engine(DATA, gate=Gate(max_norm=10.0), absence=keyed(lambda key, ids: ids == 1))
    found, number = federation.gather(own, jnp.ones(2), cohort(*range(5)), KEY)
    left = np.array([1, 0, 1, 1, 0])
    np.testing.assert_allclose(number, NUMBERS * left * 5 / 3, rtol=1e-14)
    np.testing.assert_allclose(found.y, (NUMBERS * left * 5 / 3)[:, None] * [1, 1], rtol=1e-14)
    refused = {refusal.client: refusal.reason for refusal in federation.refusals}
    assert refused == {1: Reason.NO_REPLY, 4: Reason.TOO_LARGE}
    assert federation.ledger.total.floats_up == 4 * 3  # one message came and was refused


@pytest.mark.parametrize("engine", ENGINES)
def test_too_few_replies_gather_nothing(engine):
    federation = engine(DATA, gate=Gate(min_replies=5), absence=keyed(lambda key, ids: ids == 1))
    with pytest.raises(TooFewReplies, match="only 4 of 5 replies to 'own' count: client 1 did not"):
        federation.gather(own, jnp.ones(2), cohort(*range(5)), KEY)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_receives_its_own_slice(engine):
    def answer(payload, client):
        common, mine = payload
        return common + mine["a"] * 10 + mine["b"], client.data.lower_batch(client.key)[0, 0]

    slices = {"a": np.arange(4.0)[:, None] * np.ones(2), "b": np.array([0.1, 0.2, 0.3, 0.4])}
    members, federation = cohort(1, 2, 2, 4), engine(DATA)
    payload = jnp.array([100.0, 200.0]), PerClient(slices)
    found, number = federation.gather(answer, payload, members, KEY)
    expected = np.array([100, 200]) + 10 * np.arange(4)[:, None] + slices["b"][:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    np.testing.assert_array_equal(number, NUMBERS[[1, 2, 2, 4]])
    assert federation.ledger.total.floats_down == 4 * 2 + 4 * 2 + 4
    total, _ = federation.sum(answer, payload, members, KEY)
    np.testing.assert_allclose(total, expected.sum(0), rtol=1e-14)


def draw(payload, client):
    return jax.random.uniform(client.key)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_and_every_repeat_has_a_key_of_its_own(engine):
    federation = engine(DATA)
    draws = federation.gather(draw, jnp.zeros(()), cohort(0, 1, 1, 1, 4), KEY)
    assert len(set(np.asarray(draws).tolist())) == 5
    keys = [client_key(KEY, *who) for who in ((0, 0), (1, 0), (1, 1), (1, 2), (4, 0))]
    assert np.asarray(draws).tolist() == [float(jax.random.uniform(key)) for key in keys]
    other = federation.gather(draw, jnp.zeros(()), cohort(0, 1, 1, 1, 4), jax.random.key(12))
    assert not set(np.asarray(other).tolist()) & set(np.asarray(draws).tolist())


class Sized(eqx.Module):
    eta: Point

    def stepped(self, payload, client):
        return jnp.stack(list(self.eta)) * client.plan.norm


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_receive_the_numbers_of_their_step_and_their_plans(engine):
    federation = engine(DATA, local_work=fixed([1, 2, 3, 4, 5]))
    eta = Point(x=0.1, y=0.2, v=0.4)
    found = federation.gather(Sized(eta).stepped, np.zeros(()), cohort(0, 3), KEY)
    np.testing.assert_allclose(found, np.outer([1, 4], eta), rtol=1e-14)
    assert federation.ledger.total.floats_down == 2  # numbers travel with the request


def test_the_counting_engine_gathers_zeros_of_the_right_shape():
    federation = CountingFederation(DATA)
    payload = PerClient(np.ones((3, 2)))
    found, number = federation.gather(own, payload, cohort(0, 3, 3), KEY)
    assert (found.y.shape, number.shape) == ((3, 2), (3,))
    assert not found.y.any()
    total, number = federation.sum(own, payload, cohort(0, 3, 3), KEY)
    assert (total.y.shape, number.shape) == ((2,), ())
    sent = federation.ledger.by_step["own"]
    assert (sent.rounds, sent.floats_down, sent.floats_up) == (2, 2 * 6, 2 * 9)


@pytest.mark.parametrize("engine", [*ENGINES, CountingFederation])
def test_messages_of_whole_numbers_are_refused(engine):
    def count(payload, client):
        return jnp.ones((), jnp.int32)

    with pytest.raises(UserError, match="'count' returns int32 numbers: return floats"):
        engine(DATA).gather(count, jnp.zeros(1), cohort(0, 1), KEY)
