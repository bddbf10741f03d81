"""Privacy: what is clipped, how noisy it is, and what epsilon says, each against a second way."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Functional
from scipy import optimize, stats

from simfbo import DebugFederation, Point, SimulatedFederation, UserError, run
from simfbo.algorithms import auto_steps, fedmbo, simfbo, with_momenta
from simfbo.core.data import from_clients
from simfbo.core.keys import keyed
from simfbo.core.problem import BilevelProblem
from simfbo.core.sampling import without_replacement
from simfbo.privacy import Privacy, clip, epsilon, noisy, private, spent
from simfbo.tasks import random_quadratic
from simfbo.tasks.models import Linear

TASK = random_quadratic(5, 3, 4, seed=1).task(p=[1, 2, 3, 4, 5])
STEPS = Point(x=0.1, y=0.2, v=0.2)
ENGINES = [SimulatedFederation, DebugFederation]
KEY = jax.random.key(1)


def alike(number):
    return Point(number, number, number)


def test_defaults():
    assert Privacy() == Privacy(alike(1.0), alike(1.0), "server")


def test_clipping_by_hand():
    message = (Point(x={"a": jnp.array([3.0]), "b": jnp.array([4.0])}, v=jnp.array([0.3])), 9.0)
    message = jax.tree.map(jnp.asarray, message)
    found, rest = clip(message, Point(2.0, 1.0, 0.5))
    np.testing.assert_allclose([found.x["a"][0], found.x["b"][0]], [1.2, 1.6], rtol=1e-12)
    np.testing.assert_array_equal(found.v, [0.3])
    assert rest == 9.0


def test_clipping_keeps_zeros_and_what_is_not_finite():
    found = clip(Point(x=jnp.zeros(2), y=jnp.array([jnp.nan])), alike(1.0))
    np.testing.assert_array_equal(found.x, [0, 0])
    assert bool(jnp.isnan(found.y).all())  # the gate refuses it, by name


def test_noise_has_the_asked_for_spread_on_each_channel():
    zeros = (Point(x=jnp.zeros(20_000), y=jnp.zeros(20_000), v=jnp.zeros(20_000)), jnp.zeros(5))
    found, rest = jax.jit(noisy)(zeros, Point(1.0, 2.0, 0.5), KEY)
    for values, deviation in zip(found, (1.0, 2.0, 0.5)):
        assert stats.kstest(np.asarray(values) / deviation, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found.x, found.y)[0, 1]) < 0.03
    np.testing.assert_array_equal(rest, np.zeros(5))


SIZE = 4000


def fifty(payload, client):
    return Point(x=jnp.zeros(SIZE).at[0].set(50.0))


def ask(client_step):
    """Return an algorithm whose only exchange is this; its state is the sum."""

    def round(state, federation, key):
        return federation.sum(client_step, np.ones(()), federation.cohort(key), key)

    return Functional("ask", Point, round, (client_step,))


def sum_of(federation, privacy, key=KEY):
    return np.asarray(private(ask(fifty), privacy).round(None, federation, key).x)


def x_noise(number):
    return Point(number, 1.0, 1.0)


def test_the_servers_noise_follows_the_largest_weight():
    """Every message is clipped to C = 2, so the sum is 2; noise is z C w_max = 3 * 2 * 5/15."""
    total = sum_of(SimulatedFederation(TASK.data), Privacy(Point(2.0, 1.0, 1.0), x_noise(3.0)))
    noise = total - np.eye(SIZE)[0] * 2.0
    np.testing.assert_allclose(noise.std(), 2.0, rtol=0.05)
    assert abs(noise[0]) < 5 * 2.0


def test_the_servers_noise_does_not_tell_who_came():
    """With P = 2 of 5 the largest weight is 5/2 * 5/15, whether or not that client was drawn."""
    federation, came = SimulatedFederation(TASK.data, without_replacement(2)), set()
    algorithm = private(ask(fifty), Privacy(noise=x_noise(3.0)))
    for key in jax.random.split(KEY, 8):
        noise = np.asarray(algorithm.round(None, federation, key).x)[1:]
        np.testing.assert_allclose(noise.std(), 3.0 * 5 / 2 * 5 / 15, rtol=0.05)
        came.add(4 in federation.cohort(key).ids)
    assert came == {True, False}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_servers_noise_grows_with_the_weights_of_those_left(engine):
    """One of five does not reply: the others weigh 5/4 as much, and so must the noise."""
    federation = engine(TASK.data, absence=keyed(lambda key, ids: ids == 0))
    total = sum_of(federation, Privacy(noise=x_noise(3.0)))
    np.testing.assert_allclose(total[1:].std(), 3.0 * 5 / 15 * 5 / 4, rtol=0.05)


def test_the_clients_noise_adds_up():
    privacy = Privacy(noise=x_noise(3.0), where="client")
    total = sum_of(SimulatedFederation(TASK.data), privacy)
    weights = np.arange(1, 6) / 15
    np.testing.assert_allclose(total[1:].std(), 3.0 * np.sqrt((weights**2).sum()), rtol=0.05)


@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_is_new_in_every_exchange(where):
    federation, privacy = SimulatedFederation(TASK.data), Privacy(where=where)
    algorithm = private(ask(fifty), privacy)
    once, again, other = (
        np.asarray(algorithm.round(None, federation, key).x)[1:]
        for key in (KEY, KEY, jax.random.key(2))
    )
    np.testing.assert_array_equal(once, again)
    assert abs(np.corrcoef(once, other)[0, 1]) < 0.1


def test_a_secret_federation_draws_noise_that_nobody_can_draw_again():
    federation = SimulatedFederation(TASK.data)
    federation.secret = True
    algorithm = private(ask(fifty), Privacy())
    once, again = (np.asarray(algorithm.round(None, federation, KEY).x)[1:] for _ in range(2))
    assert abs(np.corrcoef(once, again)[0, 1]) < 0.1


def sample(payload, client):
    own = client.data.lower_batch(client.key)[0]
    return Point(x=own, y=10 * own, v=-own)


def test_a_client_cannot_move_the_sum_by_more_than_its_clip():
    """The sensitivity that epsilon rests on, tried on a client with extreme data."""
    privacy = Privacy(Point(0.1, 0.2, 0.3), alike(1e-12))
    algorithm = private(ask(sample), privacy)

    def total(scale):
        parts = [np.ones((1, 2)) * i for i in range(5)]
        parts[4] = parts[4] * scale
        return algorithm.round(None, SimulatedFederation(from_clients(parts, parts)), KEY)

    honest, extreme = total(1.0), total(-1e9)
    for name, limit in privacy.clip._asdict().items():
        gap = np.linalg.norm(np.asarray(getattr(honest, name)) - np.asarray(getattr(extreme, name)))
        np.testing.assert_allclose(gap, 2 * limit / 5, rtol=1e-9)


def test_client_steps_keep_their_names():
    method = simfbo(TASK.problem, STEPS)
    (name, protected), *others = private(method, Privacy()).client_steps.items()
    assert name == protected.__name__ == "simfbo_step"
    assert not others


def both(payload, client):
    """A message as ShroFBO's: three channels of a client's own, and a number outside them."""
    own = client.data.lower_batch(client.key)[0]
    return Point(x=own, y=own[:1], v=-own), client.plan.norm


def test_engines_agree():
    parts = [np.array([[i, i - 2.0]]) for i in range(3)]
    algorithm = private(ask(both), Privacy(alike(0.7), alike(1.0)))
    federations = [engine(from_clients(parts, parts), without_replacement(2)) for engine in ENGINES]
    (a, norm), (b, other) = (algorithm.round(None, federation, KEY) for federation in federations)
    for one, two in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9)
    assert norm == other == 1.0


def test_wide_clips_and_little_noise_are_the_plain_method():
    parts = [np.array([[i, i - 2.0]]) for i in range(3)]
    federation = SimulatedFederation(from_clients(parts, parts, p=[1, 2, 3]))
    (found, norm), (plain, other) = (
        algorithm.round(None, federation, KEY)
        for algorithm in (private(ask(both), Privacy(alike(1e6), alike(1e-15))), ask(both))
    )
    for one, two in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-8)
    assert norm == other
    assert np.abs(plain.x).min() > 0.1


def gaussian_epsilon(sigma, delta):
    """Return epsilon of one Gaussian mechanism of sensitivity 1, exactly (Balle and Wang 2018)."""

    def gap(e):
        a, b = 1 / (2 * sigma) - e * sigma, -1 / (2 * sigma) - e * sigma
        return stats.norm.cdf(a) - np.exp(e) * stats.norm.cdf(b) - delta

    return optimize.brentq(gap, 1e-6, 500)


@pytest.mark.parametrize("exchanges", [1, 10, 100])
def test_epsilon_bounds_the_exact_one_when_everyone_takes_part(exchanges):
    """T Gaussian mechanisms of sensitivity 2C on three channels are one with sigma smaller."""
    noise = Point(20.0, 30.0, 40.0)
    sigma = (sum(z**-2 for z in noise) ** -0.5) / 2 / np.sqrt(exchanges)
    exact = gaussian_epsilon(sigma, 1e-5)
    found = epsilon(exchanges, 50, 50, noise)
    assert exact <= found <= 1.35 * exact


def test_sampling_helps_and_exchanges_cost():
    whole, some = epsilon(200, 100, 100, alike(6.0)), epsilon(200, 100, 5, alike(6.0))
    assert some < whole / 4
    assert epsilon(400, 100, 5, alike(6.0)) > some > epsilon(200, 100, 5, alike(7.0))
    assert epsilon(0, 100, 5, alike(6.0)) == 0


@pytest.mark.parametrize(
    ("privacy", "number"),
    [
        (Privacy(clip=Point(0.0, 1.0, 1.0)), "0.0"),
        (Privacy(noise=Point(1.0, 1.0, float("inf"))), "inf"),
        (Privacy(noise=Point(1.0, -1.0, 1.0)), "-1.0"),
        (Privacy(clip=Point(x=1.0, y=1.0)), "None"),
    ],
)
def test_mistakes(privacy, number):
    with pytest.raises(UserError) as caught:
        private(simfbo(TASK.problem, STEPS), privacy)
    assert str(caught.value) == (
        f"Give a positive clipping norm and noise multiplier for each of x, y and v, got {number}."
    )


@pytest.mark.parametrize("bare", [lambda g: g, lambda g: {"x": g}])
def test_a_message_without_channels_is_refused(bare):
    algorithm = private(ask(lambda payload, client: bare(payload * jnp.ones(2))), Privacy())
    with pytest.raises(UserError, match="only if it names its channels"):
        algorithm.round(None, SimulatedFederation(TASK.data), KEY)


@pytest.mark.parametrize(
    "wrong", [(5, 6, 1.0, 0.1), (5, 0, 1.0, 0.1), (5, 2, 0.0, 0.1), (5, 2, 1.0, 0)]
)
def test_epsilon_is_asked_sensibly(wrong):
    clients, cohort, z, delta = wrong
    with pytest.raises(UserError, match="epsilon needs"):
        epsilon(1, clients, cohort, Point(z, 1.0, 1.0), delta)


def test_hardly_any_noise_is_no_privacy():
    assert epsilon(1, 5, 2, Point(1e-200, 1.0, 1.0)) == np.inf


def test_gathered_messages_are_never_shown():
    algorithm = private(fedmbo(TASK.problem, STEPS), Privacy())
    with pytest.raises(UserError, match="looks at single messages cannot be made private"):
        algorithm.round(algorithm.init(TASK.x0, TASK.y0), SimulatedFederation(TASK.data), KEY)


INPUTS, UNITS = 100, 8


def first_messages():
    """Return five clients' one upper input; their q_x plain, clipped and with their noise."""
    rng = np.random.default_rng(0)
    lower, upper = (
        [(rng.normal(size=(1, INPUTS)), rng.normal(size=1)) for _ in range(5)] for _ in "gf"
    )

    def loss(x, y, batch):
        return jnp.mean((jax.nn.relu(x(batch[0])) @ y - batch[1]) ** 2)

    plain = simfbo(BilevelProblem(loss, loss), STEPS)
    methods = [plain, *(private(plain, Privacy(where=who)) for who in ("server", "client"))]
    hidden = Linear(rng.normal(size=(INPUTS, UNITS)), rng.normal(size=UNITS))
    start = Point(hidden, rng.normal(size=UNITS), np.zeros(UNITS))

    def messages(payload, client):
        return [method.client_steps["simfbo_step"](payload, client).x for method in methods]

    federation = SimulatedFederation(from_clients(lower, upper))
    found = federation.gather(messages, start, federation.cohort(KEY), KEY)
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


def test_spent_is_epsilon_of_the_cohorts_and_runs_warn_above_ten():
    federation = SimulatedFederation(TASK.data, without_replacement(2))
    noise = alike(60.0)
    plain = private(simfbo(TASK.problem, STEPS), Privacy(noise=noise))
    assert spent(plain, federation, 7, 1e-3) == epsilon(7, 5, 2, noise, 1e-3)
    memory = private(with_momenta(simfbo(TASK.problem, STEPS), 0.5), Privacy(noise=noise))
    assert spent(memory, federation, 7) == epsilon(7, 5, 5, noise)
    start = TASK.x0, TASK.y0
    auto = auto_steps(lambda plan: simfbo(TASK.problem, plan.local, plan.server), TASK.problem,
                      TASK.x0, rounds=20)  # fmt: skip
    # Measuring asks one cohort several times.
    assert spent(private(auto, Privacy(noise=noise)), federation, 7) == epsilon(7, 5, 5, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(plain, federation, *start, rounds=2)
    weak = private(simfbo(TASK.problem, STEPS), Privacy())
    with pytest.warns(UserWarning, match=r"^This run ends at epsilon 31\.8, and above 10 "):
        run(weak, federation, *start, rounds=2)
