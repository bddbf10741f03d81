"""FedMSA and FedBiOAcc, against second implementations in NumPy and closed forms.

On the quadratic of test_methods.py: five clients that differ, in double precision; with full
batches unless a test says otherwise.
"""

import itertools

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import fedbioacc, fedmsa
from simfbo.core.local_work import constant, fixed
from simfbo.core.sampling import Cohort, without_replacement
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TAUS = [1, 2, 3, 5, 9]
WEIGHTS = np.arange(1, 6) / 15
Q = random_quadratic(5, 3, 4, seed=1)
TASK = Q.task(np.arange(1, 6))
TRUTH = Q.closed_form(WEIGHTS)
STEPS = Point(x=0.02, y=0.06, v=0.05)
PER_NUMBER = np.repeat(STEPS, [3, 4, 4])
UNEQUAL = SimulatedFederation(TASK.data, local_work=fixed(TAUS))
RNG = np.random.default_rng(0)
START = RNG.normal(size=3), RNG.normal(size=4)


def direction(i, z):
    """Return D_i(z), of x, y and v one after the other."""
    x, y, v = np.split(z, [3, 7])
    d_x = Q.D[i] @ (x - Q.s[i]) + Q.B[i].T @ v
    return np.concatenate(
        [d_x, Q.A[i] @ y - Q.B[i] @ x - Q.c[i], Q.A[i] @ v - Q.C[i] @ (y - Q.t[i])]
    )


def mean(values, weights=WEIGHTS):
    return sum(w * value for w, value in zip(weights, values, strict=True))


def projected(z, radius):
    """Return z with v in the ball, and whether that moved it."""
    size = np.linalg.norm(z[7:])
    return np.concatenate([z[:7], z[7:] * min(1, radius / size) if size else z[7:]]), size > radius


def flat(point):
    return np.concatenate([point.x, point.y, point.v])


def rounds_of(algorithm, count, federation=UNEQUAL, state=None):
    """Return the states after 1, 2, ... iterations."""
    found, state = [], algorithm.init(*START) if state is None else state
    for key in jax.random.split(jax.random.key(3), count):
        state = algorithm.round(state, federation, key)
        found.append(state)
    return found


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


# FedMSA


def test_fedmsa_is_its_equations_over_several_rounds():
    """With unequal tau_i and a projection that acts in some rounds only."""
    a, radius = 0.3, 1.1
    z = before = np.concatenate([*START, np.zeros(4)])
    h, acted = None, []
    for state in rounds_of(fedmsa(TASK.problem, STEPS, a, radius), 4):
        now, past = (mean(direction(i, at) for i in range(5)) for at in (z, before))
        h = now if h is None else now + (1 - a) * (h - past)
        ends = []
        for i, tau in enumerate(TAUS):
            own, d = z, h
            for _ in range(tau):
                after = own - PER_NUMBER * d
                d = d + direction(i, after) - direction(i, own)
                own = after
            ends.append(own - z)
        before, (z, moved) = z, projected(z + mean(ends), radius)
        acted.append(moved)
        close(flat(state), z)
        close(flat(state.h), h)
    assert set(acted) == {True, False}
    assert int(state.projected) == sum(acted)
    assert int(state.iteration) == 4


def test_fedmsa_weighs_its_own_estimate_where_weights_do_not_sum_to_one():
    """h of a sampled cohort: (1-a) h_{t-1} counts once, whatever the clients weigh together."""
    ids, a = np.array([0, 4]), 0.25
    weights = np.array([0.9, 0.8])  # not those of a sampler: their sum is 1.7
    federation = SimulatedFederation(TASK.data, lambda key, p: Cohort(ids, weights))
    one, two = rounds_of(fedmsa(TASK.problem, STEPS, a), 2, federation)
    z = np.concatenate([*START, np.zeros(4)])
    h = mean((direction(i, z) for i in ids), weights)
    close(flat(one.h), h)
    after = z - 1.7 * PER_NUMBER * h
    close(flat(one), after)
    news = mean((direction(i, after) - (1 - a) * direction(i, z) for i in ids), weights)
    close(flat(two.h), (1 - a) * h + news)


def test_fedmsa_is_unbiased_over_all_pairs_of_cohorts():
    """The two cohorts of an iteration are drawn apart: their mean is that of everyone."""
    algorithm, pairs = fedmsa(TASK.problem, STEPS), list(itertools.combinations(range(5), 2))
    state, drawn = rounds_of(algorithm, 2)[-1], []

    def sample(key, p):
        ids = np.array(drawn.pop(0))
        return Cohort(ids, p[ids] * 5 / 2)

    sampled = SimulatedFederation(TASK.data, sample)  # one local step each

    def after(first, second):
        drawn[:] = [first, second]
        return flat(rounds_of(algorithm, 1, sampled, state)[0])

    found = np.mean([after(*both) for both in itertools.product(pairs, repeat=2)], axis=0)
    everyone = rounds_of(algorithm, 1, SimulatedFederation(TASK.data), state)[0]
    close(found, flat(everyone))


def test_fedmsa_stays_at_the_solution_whatever_the_local_work():
    x = TRUTH.x()
    algorithm = fedmsa(TASK.problem, Point(x=0.1, y=0.2, v=0.2))
    state = algorithm.init(x, TRUTH.y(x))
    state = state._replace(v=TRUTH.v(x), before=Point(x, TRUTH.y(x), TRUTH.v(x)))
    after = rounds_of(algorithm, 2, state=state)[-1]
    np.testing.assert_allclose(flat(after), flat(state), atol=1e-13)


NOISY = Q.task(np.arange(1, 6), samples=40, noise=1.0, batch_size=1)


def spread(algorithm, part):
    """Return the variance of the estimates in a noisy run that stands still."""
    federation, found = SimulatedFederation(NOISY.data), []
    for state in rounds_of(algorithm, 100, federation):
        found.append(flat(getattr(state, part)))
    return np.var(found[20:], axis=0).sum()


@pytest.mark.parametrize("name", ["fedmsa", "fedbioacc"])
def test_momentum_takes_the_noise_out_of_the_estimates(name):
    """z stands still, so that h is a moving average with weight a: variance a / (2 - a)."""
    still, a = Point(x=0.0, y=0.0, v=0.0), 0.1
    if name == "fedmsa":
        slow, fast = (spread(fedmsa(NOISY.problem, still, b), "h") for b in (a, 1.0))
    else:
        shape = {"delta": 1e4, "u": 1e12}  # alpha is 1, and stays
        slow, fast = (spread(fedbioacc(NOISY.problem, still, c=b, **shape), "d") for b in (a, 1.0))
    assert slow / fast == pytest.approx(a / (2 - a), rel=0.4)


# FedBiOAcc


def test_fedbioacc_is_its_equations_over_several_rounds():
    """With unequal tau_i, step sizes that fall fast and a projection that acts."""
    delta, u, c, radius = 2.0, 3.0, 0.4, 0.8
    z, d, t, acted = np.concatenate([*START, np.zeros(4)]), np.zeros(11), 0.0, False
    for state in rounds_of(fedbioacc(TASK.problem, STEPS, radius, delta, u, c), 4):
        ends = []
        for i, tau in enumerate(TAUS):
            own, est = z, d
            for k in range(tau):
                alpha = delta / (u + t + k) ** (1 / 3)
                after, moved = projected(own - alpha * PER_NUMBER * est, radius)
                acted |= bool(moved)
                keep = 1 - c * alpha**2 if t + k else 0.0
                est = direction(i, after) + keep * (est - direction(i, own))
                own = after
            ends.append(np.concatenate([own - z, est - d]))
        change = mean(ends)
        z, d, t = z + change[:11], d + change[11:], t + WEIGHTS @ TAUS
        close(flat(state), z)
        close(flat(state.d), d)
        assert float(state.t) == pytest.approx(t, rel=1e-14)
    assert acted


def test_fedbioacc_begins_with_the_mean_direction():
    """One local step of everyone: the first round moves nothing, the second along the mean."""
    one, two = rounds_of(fedbioacc(TASK.problem, STEPS, delta=1e4, u=1e12), 2,
                         SimulatedFederation(TASK.data))  # fmt: skip
    z = np.concatenate([*START, np.zeros(4)])
    d = mean(direction(i, z) for i in range(5))
    close(flat(one), z)
    close(flat(one.d), d)
    np.testing.assert_allclose(flat(two), z - PER_NUMBER * d, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tau", [1, 4])
def test_fedbioacc_counts_local_steps_whatever_a_cohort_weighs(tau):
    federation = SimulatedFederation(TASK.data, without_replacement(2), constant(tau))
    states = rounds_of(fedbioacc(TASK.problem, STEPS), 3, federation)
    np.testing.assert_allclose([float(state.t) for state in states], [tau, 2 * tau, 3 * tau])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: fedmsa(p, STEPS, momentum=0.0), r"must lie in \(0, 1\], got 0.0."),
        (lambda p: fedmsa(p, STEPS, radius=-1.0), "The radius of v must be positive, got -1.0"),
        (lambda p: fedbioacc(p, STEPS, c=0.0), "c must be a positive number, got 0.0."),
        (lambda p: fedbioacc(p, STEPS, c=1.5), r"The momentum c alpha\^2 begins at 1.5, above 1"),
    ],
)
def test_wrong_settings(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make(TASK.problem)
