"""Privacy: what is clipped, how noisy it is, and what epsilon says, each against a second way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

from simfbo import DebugFederation, SimulatedFederation, Steps, UserError, from_clients
from simfbo.algorithms import fedmbo, shrofbo, simfbo
from simfbo.core import privacy
from simfbo.core.federation import Algorithm, client_key
from simfbo.core.privacy import Channels, Privacy, clip, epsilon, noisy, private
from simfbo.core.problem import BilevelProblem, Point
from simfbo.core.sampling import Cohort, without_replacement
from simfbo.runs.runner import run
from simfbo.tasks._quadratic import random_quadratic
from simfbo.tasks.models import Linear

TASK = random_quadratic(5, 2, 3, heterogeneity=1.0, seed=3).task(p=[1, 2, 3, 4, 5])
STEPS = Steps(y=0.2, v=0.2, x=0.1)
ENGINES = [SimulatedFederation, DebugFederation]


def test_clipping_by_hand():
    message = (Point(x={"a": jnp.array([3.0]), "b": jnp.array([4.0])}, v=jnp.array([0.3])), 9.0)
    message = jax.tree.map(jnp.asarray, message)
    found, rest = clip(message, Channels(x=2.0, v=0.5))
    np.testing.assert_allclose([found.x["a"][0], found.x["b"][0]], [1.2, 1.6], rtol=1e-12)
    np.testing.assert_array_equal(found.v, [0.3])
    assert rest == 9.0


def test_clipping_keeps_zeros_and_what_is_not_finite():
    found = clip(Point(x=jnp.zeros(2), y=jnp.array([jnp.nan])), Channels())
    np.testing.assert_array_equal(found.x, [0, 0])
    assert bool(jnp.isnan(found.y).all())  # the gate refuses it, by name


def test_noise_has_the_asked_for_spread_on_each_channel():
    zeros = (Point(x=jnp.zeros(20_000), y=jnp.zeros(20_000), v=jnp.zeros(20_000)), jnp.zeros(5))
    found, rest = noisy(zeros, Channels(1.0, 2.0, 0.5), jax.random.key(0))
    for values, deviation in zip(found, (1.0, 2.0, 0.5)):
        assert stats.kstest(np.asarray(values) / deviation, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found.x, found.y)[0, 1]) < 0.03
    np.testing.assert_array_equal(rest, np.zeros(5))


def echo():
    """Return an algorithm whose only exchange asks every client for 50."""

    def work(payload, client):
        return Point(x=jnp.zeros(4000).at[0].set(50.0))

    def round(state, federation, key):
        cohort = federation.cohort(key)
        return Point(*federation.aggregate(work, np.zeros(()), cohort, key)[:1], state.y)

    return Algorithm("echo", lambda x, y: Point(jnp.zeros(4000), y), round, (work,))


def sum_of(engine, privacy, absence=None):
    federation = engine(TASK.data, absence=absence)
    history = run(private(echo(), privacy), federation, np.zeros(1), np.zeros(1), rounds=1)
    return np.asarray(history.state.x)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_servers_noise_follows_the_largest_weight(engine):
    """Every message is clipped to C = 2, so the sum is 2; noise is z C w_max = 3 * 2 * 5/15."""
    total = sum_of(engine, Privacy(Channels(x=2.0), Channels(x=3.0)))
    noise = total - np.eye(4000)[0] * 2.0
    np.testing.assert_allclose(noise.std(), 2.0, rtol=0.05)


def test_the_servers_noise_does_not_tell_who_came():
    """With P = 2 of 5 the largest weight is 5/2 * 5/15, whether or not that client was drawn."""
    privacy = Privacy(noise=Channels(x=3.0))
    for seed in range(3):
        federation = SimulatedFederation(TASK.data, without_replacement(2))
        history = run(
            private(echo(), privacy), federation, np.zeros(1), np.zeros(1), rounds=1, seed=seed
        )
        noise = np.asarray(history.state.x)[1:]
        np.testing.assert_allclose(noise.std(), 3.0 * 5 / 2 * 5 / 15, rtol=0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_servers_noise_grows_with_the_weights_of_those_left(engine):
    """One of five does not reply: the others weigh 5/4 as much, and so must the noise."""
    total = sum_of(engine, Privacy(noise=Channels(x=3.0)), lambda key, ids: ids == 0)
    np.testing.assert_allclose(total[1:].std(), 3.0 * 5 / 15 * 5 / 4, rtol=0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_clients_noise_adds_up(engine):
    total = sum_of(engine, Privacy(noise=Channels(x=3.0), where="client"))
    weights = np.arange(1, 6) / 15
    np.testing.assert_allclose(total[1:].std(), 3.0 * np.sqrt((weights**2).sum()), rtol=0.05)


def test_a_client_cannot_move_the_sum_by_more_than_its_clip():
    """The sensitivity that epsilon rests on, tried on a client with wild data."""
    privacy = Privacy(Channels(0.1, 0.2, 0.3), Channels(1e-12, 1e-12, 1e-12))
    method = private(simfbo(TASK.problem, STEPS), privacy)

    def direction(scale):
        parts = [np.ones((1, 2)) * i for i in range(5)]
        parts[4] = parts[4] * scale
        data = from_clients(parts, parts)
        federation = SimulatedFederation(data)
        cohort = federation.cohort(jax.random.key(0))

        def work(payload, client):
            batch = client.data.lower_batch(client.key)
            return Point(x=batch[0], y=10 * batch[0], v=-batch[0])

        echo = Algorithm("w", lambda x, y: Point(x, y), lambda s, f, k: f.aggregate(
            work, np.zeros(()), cohort, k), (work,))  # fmt: skip
        return private(echo, privacy).round(None, federation, jax.random.key(1))

    honest, wild = direction(1.0), direction(-1e9)
    for name, limit in privacy.clip._asdict().items():
        gap = np.linalg.norm(np.asarray(getattr(honest, name)) - np.asarray(getattr(wild, name)))
        np.testing.assert_allclose(gap, 2 * limit / 5, rtol=1e-9)
    assert method.works[0].__name__ == "simfbo_step"


@pytest.mark.parametrize("method", [simfbo, shrofbo])
@pytest.mark.parametrize("where", ["server", "client"])
def test_engines_agree(method, where):
    algorithm = private(method(TASK.problem, STEPS), Privacy(where=where))

    def end(engine):
        federation = engine(TASK.data, without_replacement(3))
        return run(algorithm, federation, TASK.x0, TASK.y0, rounds=3).state

    a, b = map(end, ENGINES)
    np.testing.assert_allclose(a.x, b.x, rtol=1e-9)
    np.testing.assert_allclose(a.v, b.v, rtol=1e-9)


def test_wide_clips_and_little_noise_are_the_plain_method():
    privacy = Privacy(Channels(1e6, 1e6, 1e6), Channels(1e-15, 1e-15, 1e-15))
    plain = simfbo(TASK.problem, STEPS)

    def end(algorithm):
        return run(algorithm, SimulatedFederation(TASK.data), TASK.x0, TASK.y0, rounds=5).state

    np.testing.assert_allclose(end(private(plain, privacy)).x, end(plain).x, atol=1e-7)


def gaussian_epsilon(sigma, delta):
    """Return epsilon of one Gaussian mechanism of sensitivity 1, exactly (Balle and Wang 2018)."""

    def gap(e):
        a, b = 1 / (2 * sigma) - e * sigma, -1 / (2 * sigma) - e * sigma
        return stats.norm.cdf(a) - np.exp(e) * stats.norm.cdf(b) - delta

    return optimize.brentq(gap, 1e-6, 500)


@pytest.mark.parametrize("exchanges", [1, 10, 100])
def test_epsilon_bounds_the_exact_one_when_everyone_takes_part(exchanges):
    """T Gaussian mechanisms of sensitivity 2C on three channels are one with sigma smaller."""
    noise = Channels(20.0, 30.0, 40.0)
    sigma = (sum(z**-2 for z in noise) ** -0.5) / 2 / np.sqrt(exchanges)
    exact = gaussian_epsilon(sigma, 1e-5)
    found = epsilon(exchanges, 50, 50, noise)
    assert exact <= found <= 1.35 * exact


def test_sampling_helps_and_exchanges_cost():
    noise = Channels(6.0, 6.0, 6.0)
    whole, some = epsilon(200, 100, 100, noise), epsilon(200, 100, 5, noise)
    assert some < whole / 4
    assert epsilon(400, 100, 5, noise) > some > epsilon(200, 100, 5, Channels(7.0, 7.0, 7.0))
    assert epsilon(0, 100, 5, noise) == 0


@pytest.mark.parametrize(
    "privacy", [Privacy(clip=Channels(x=0.0)), Privacy(noise=Channels(v=float("inf")))]
)
def test_mistakes(privacy):
    with pytest.raises(UserError, match="must be positive"):
        private(simfbo(TASK.problem, STEPS), privacy)


@pytest.mark.parametrize("bare", [lambda g: g, lambda g: {"x": g}])
def test_a_message_without_channels_is_refused(bare):
    def work(payload, client):
        return bare(payload * jnp.ones(2))

    def round(state, federation, key):
        return federation.aggregate(work, np.ones(()), federation.cohort(key), key)

    algorithm = private(Algorithm("bare", lambda x, y: Point(x, y), round, (work,)), Privacy())
    with pytest.raises(UserError, match="only if it names its channels"):
        algorithm.round(None, SimulatedFederation(TASK.data), jax.random.key(0))


def test_noise_shares_no_key_with_a_client():
    key = jax.random.key(0)
    own = {tuple(np.asarray(jax.random.key_data(k))) for k in jax.random.split(
        jax.random.fold_in(key, privacy._NOISE), 3)}  # fmt: skip
    theirs = {
        tuple(np.asarray(jax.random.key_data(client_key(key, client, repeat))))
        for client in range(30)
        for repeat in range(3)
    }
    assert not own & theirs


@pytest.mark.parametrize(
    "wrong", [(5, 6, 1.0, 0.1), (5, 0, 1.0, 0.1), (5, 2, 0.0, 0.1), (5, 2, 1.0, 0)]
)
def test_epsilon_is_asked_sensibly(wrong):
    clients, cohort, z, delta = wrong
    with pytest.raises(UserError, match="epsilon needs"):
        epsilon(1, clients, cohort, Channels(x=z), delta)
    assert epsilon(1, 5, 2, Channels(x=1e-200)) == np.inf


def test_single_messages_are_never_shown():
    algorithm = private(fedmbo(TASK.problem, STEPS), Privacy())
    with pytest.raises(UserError, match="looks at single messages cannot be made private"):
        run(algorithm, SimulatedFederation(TASK.data), TASK.x0, TASK.y0, rounds=1)


def first_messages():
    """Return five clients' one upper input; their q_x plain, clipped and with their noise."""
    rng = np.random.default_rng(0)
    lower, upper = (
        [(rng.normal(size=(1, 300)), rng.normal(size=1)) for _ in range(5)] for _ in "gf"
    )

    def loss(x, y, batch):
        return jnp.mean((jax.nn.relu(x(batch[0])) @ y - batch[1]) ** 2)

    plain = simfbo(BilevelProblem(loss, loss), STEPS)
    methods = [plain, *(private(plain, Privacy(where=who)) for who in ("server", "client"))]
    hidden = Linear(rng.normal(size=(300, 12)), rng.normal(size=12))
    start = Point(hidden, rng.normal(size=12), np.zeros(12))
    cohort = Cohort(np.arange(5, dtype=np.int32), np.eye(5))

    def work(payload, client):
        return [method.works[0](payload, client).x for method in methods]

    federation = SimulatedFederation(from_clients(lower, upper))
    found = federation.aggregate(work, start, cohort, jax.random.key(0))
    return np.concatenate([u for u, _ in upper]), *jax.tree.map(np.asarray, found)


def test_only_noise_keeps_the_upper_input_out_of_the_first_message():
    """Unit j's weights get delta_j u and its bias delta_j, and clipping leaves their ratio."""
    inputs, *bare, hidden = first_messages()
    for q in bare:
        for u, weight, bias in zip(inputs, *q):
            unit = np.abs(bias).argmax()
            np.testing.assert_allclose(weight[:, unit] / bias[unit], u, rtol=1e-6, atol=1e-6)
    for u, weight in zip(inputs, hidden.weight):
        assert np.abs(np.corrcoef(u, weight.T)[0, 1:]).max() < 0.5
