"""MimeFBO, private lower levels and client momenta, each against a second version in NumPy.

On a quadratic of five clients that differ, in double precision and with full batches; see
test_methods.py for its gradients.
"""

import jax
import numpy as np
import pytest
from functional import Functional

from simfbo import Point, SimulatedFederation, UserError, run
from simfbo.algorithms import (
    aggitd,
    auto_steps,
    fedavg,
    fedbio,
    fedbioacc_local,
    fednest,
    memfbo,
    mimefbo,
    shrofbo,
    simfbo,
    with_momenta,
)
from simfbo.codecs import Codecs, top_k
from simfbo.core.local_work import coefficients, effective, fixed, momentum, proximal, sgd
from simfbo.core.sampling import Cohort, without_replacement
from simfbo.engines import cost
from simfbo.privacy import Privacy, private
from simfbo.robust import aggregation
from simfbo.tasks import random_quadratic

TAUS = [1, 2, 3, 5, 9]
RULES = [sgd(), momentum(0.5), coefficients([0.5, 2.0, 1.0]), proximal(0.2), sgd()]
WEIGHTS = np.arange(1, 6) / 15
Q = random_quadratic(5, 3, 4, seed=1)
TASK = Q.task(np.arange(1, 6))
ETA = np.repeat([0.03, 0.05, 0.04], [3, 4, 4])
GAMMA = np.repeat([0.02, 0.03, 0.05], [3, 4, 4])
LOCAL, SERVER = Point(x=0.03, y=0.05, v=0.04), Point(x=0.02, y=0.03, v=0.05)
COHORTS = [[0, 3], [1, 3], [2, 4], [0, 1]]


def direction(i, z):
    """Return D_i at z = (x, y, v)."""
    x, y, v = np.split(z, [3, 7])
    d_x = Q.D[i] @ (x - Q.s[i]) + Q.B[i].T @ v
    return np.concatenate(
        [d_x, Q.A[i] @ y - Q.B[i] @ x - Q.c[i], Q.A[i] @ v - Q.C[i] @ (y - Q.t[i])]
    )


def path(i, z, h, own=None):
    """Return the weighted mean direction of a client's corrected path."""
    keep, m, steps = RULES[i]
    at, speed, total, a = z, 0, 0, effective(RULES[i], TAUS[i])
    for k in range(TAUS[i]):
        d = direction(i, at)
        correct = d - (direction(i, z) if own is None else own) + h
        speed = m * speed + (steps[k] if steps else 1.0) * correct
        at = z + keep * (at - z) - ETA * speed
        total = total + a[k] * d
    return total / a.sum()


def rounds(algorithm, cohorts, rules=sgd()):
    """Return the state after a round with each of the cohorts, and the federation."""
    drawn = iter(cohorts)

    def sample(key, p):
        ids = np.array(next(drawn))
        return Cohort(ids, p[ids] * 5 / len(ids))

    federation = SimulatedFederation(TASK.data, sample, fixed(TAUS, rules))
    federation.remember(algorithm, TASK.x0, TASK.y0)
    state = algorithm.init(TASK.x0, TASK.y0)
    for k in range(len(cohorts)):
        state = algorithm.round(state, federation, jax.random.key(k))
    return state, federation


def variables(state):
    return np.concatenate(getattr(state, "base", state)[:3])


def mean_of(ids, values):
    return sum(WEIGHTS[i] * 5 / len(ids) * value for i, value in zip(ids, values, strict=True))


RHO = WEIGHTS @ TAUS
OWN_RHO = WEIGHTS @ [effective(*client).sum() for client in zip(RULES, TAUS, strict=True)]


@pytest.mark.parametrize("theta", [1.0, 0.3])
def test_mimefbo_is_its_equations(theta):
    z, h = np.zeros(11), np.zeros(11)
    for ids in COHORTS:
        m = mean_of(ids, [path(i, z, h) for i in ids])
        z, h = z - OWN_RHO * GAMMA * m, (1 - theta) * h + theta * m
    state, _ = rounds(mimefbo(TASK.problem, LOCAL, SERVER, theta=theta), COHORTS, RULES)
    np.testing.assert_allclose(variables(state), z, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(state.h), h, rtol=1e-12, atol=1e-12)


def test_mimefbo_with_storm_is_its_equations():
    z, h, theta = np.zeros(11), np.zeros(11), 0.3
    before = z
    for k, ids in enumerate(COHORTS):
        old = 1 - theta if k else 0.0
        sent = [path(i, z, h) - old * direction(i, before) for i in ids]
        h = old * h + mean_of(ids, sent)
        before, z = z, z - OWN_RHO * GAMMA * h
    state, _ = rounds(
        mimefbo(TASK.problem, LOCAL, SERVER, control="storm", theta=theta), COHORTS, RULES
    )
    np.testing.assert_allclose(variables(state), z, rtol=1e-12, atol=1e-12)


def test_mimefbo_with_memory_is_scaffold():
    z, c = np.zeros(11), np.zeros((5, 11))
    for ids in COHORTS:
        h = WEIGHTS @ c
        found = {i: path(i, z, h, c[i]) for i in ids}
        m = h + mean_of(ids, [found[i] - c[i] for i in ids])
        for i in ids:
            c[i] = found[i]
        z = z - OWN_RHO * GAMMA * m
    state, federation = rounds(
        mimefbo(TASK.problem, LOCAL, SERVER, control="memory"), COHORTS, RULES
    )
    np.testing.assert_allclose(variables(state), z, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(state.h), WEIGHTS @ c, rtol=1e-12, atol=1e-12)
    kept = np.concatenate(federation.client_memory, axis=1)
    np.testing.assert_allclose(kept, c, rtol=1e-12, atol=1e-12)


def test_with_memory_sampled_clients_lead_to_the_exact_solution():
    """Which neither SimFBO nor MimeFBO without memory do: the noise of sampling stays."""
    ends = {}
    for name, algorithm in {
        "simfbo": simfbo(TASK.problem, LOCAL, SERVER),
        "mean": mimefbo(TASK.problem, LOCAL, SERVER),
        "memory": mimefbo(TASK.problem, LOCAL, SERVER, control="memory"),
    }.items():
        federation = SimulatedFederation(TASK.data, without_replacement(2), fixed(TAUS))
        history = run(algorithm, federation, TASK.x0, TASK.y0, rounds=1500)
        ends[name] = TASK.evaluate(history.state)["x_error"]
    assert ends["memory"] < 1e-10
    assert min(ends["simfbo"], ends["mean"]) > 0.01


TOP = Codecs(up=Point(top_k(0.5), top_k(0.5), top_k(0.5)))
FEDERATIONS = {
    "an aggregator": {"aggregators": Point(x=aggregation.median())},
    "a codec that loses digits": {"codecs": TOP},
    "a client that is sampled twice": {
        "sampler": lambda key, p: Cohort(np.array([1, 1]), p[[1, 1]])
    },
}


@pytest.mark.parametrize("what", FEDERATIONS)
def test_memory_of_clients_needs_messages_as_they_were_sent(what):
    """Otherwise h would no longer be the mean of what clients remember, and never again."""
    algorithm = mimefbo(TASK.problem, LOCAL, control="memory")
    with pytest.raises(UserError, match=f"which {what} would falsify"):
        run(algorithm, SimulatedFederation(TASK.data, **FEDERATIONS[what]), TASK.x0, TASK.y0,
            rounds=1)  # fmt: skip


def test_memory_of_clients_refuses_what_changes_messages_or_goes_back():
    def build(plan):
        return mimefbo(TASK.problem, plan.local, plan.server, control="memory")

    plain = mimefbo(TASK.problem, LOCAL, control="memory")
    with pytest.raises(UserError, match="a moving average would falsify"):
        with_momenta(plain, 0.5)
    with pytest.raises(UserError, match="clipping would falsify"):
        private(plain, Privacy())
    with pytest.raises(UserError, match="automatic step sizes do, would falsify"):
        auto_steps(build, TASK.problem, TASK.x0, 10)
    with pytest.raises(UserError, match="step sizes of a personal lower level yourself"):
        auto_steps(build, PRIVATE, TASK.x0, 10)


def test_momenta_refuse_messages_of_another_shape():
    steps = with_momenta(fedbioacc_local(PRIVATE, LOCAL))
    with pytest.raises(UserError, match="Momenta need messages with one Point"):
        rounds(steps, [[0, 1]])


def private_solution():
    """Return x* of sum_i p_i f_i(x, y_i*(x)), by linear algebra."""
    hessian, target = np.zeros((3, 3)), np.zeros(3)
    for w, A, B, c, C, t, D, s in zip(WEIGHTS, Q.A, Q.B, Q.c, Q.C, Q.t, Q.D, Q.s, strict=True):
        J, offset = np.linalg.solve(A, B), np.linalg.solve(A, c)
        hessian += w * (D + J.T @ C @ J)
        target += w * (D @ s - J.T @ C @ (offset - t))
    return np.linalg.solve(hessian, target)


PRIVATE = TASK.problem._replace(lower_level="private")


@pytest.mark.parametrize("factory", [simfbo, shrofbo])
def test_private_lower_levels_are_their_equations(factory):
    x, own = np.zeros(3), np.zeros((5, 8))
    for ids in COHORTS:
        sent = []
        for i in ids:
            z, q = np.concatenate([x, own[i]]), np.zeros(11)
            for _ in range(TAUS[i]):
                d = direction(i, z)
                z, q = z - ETA * d, q + d
            own[i] = z[3:]
            sent.append(q[:3] / (TAUS[i] if factory is shrofbo else 1))
        x = x - GAMMA[:3] * (RHO if factory is shrofbo else 1) * mean_of(ids, sent)
    state, federation = rounds(factory(PRIVATE, LOCAL, SERVER), COHORTS)
    np.testing.assert_allclose(state.x, x, rtol=1e-12, atol=1e-12)
    kept = np.concatenate([federation.client_memory.y, federation.client_memory.v], axis=1)
    np.testing.assert_allclose(kept, own, rtol=1e-12, atol=1e-12)


def test_a_private_lower_level_has_a_solution_of_its_own():
    steps = Point(x=0.2, y=0.4, v=0.4)
    federation = SimulatedFederation(TASK.data)
    algorithm = simfbo(PRIVATE, steps)
    federation.remember(algorithm, TASK.x0, TASK.y0)
    state = algorithm.init(TASK.x0, TASK.y0)
    for k in range(150):
        state = algorithm.round(state, federation, jax.random.key(k))
    np.testing.assert_allclose(state.x, private_solution(), atol=1e-8)
    assert np.linalg.norm(private_solution() - Q.closed_form(WEIGHTS).x()) > 0.05
    for i in range(5):
        best = np.linalg.solve(Q.A[i], Q.B[i] @ np.asarray(state.x) + Q.c[i])
        np.testing.assert_allclose(federation.client_memory.y[i], best, atol=1e-8)


def test_only_x_travels():
    federation = SimulatedFederation(TASK.data)
    for factory, more in ((simfbo, 0), (shrofbo, 1)):
        found = cost(factory(PRIVATE, LOCAL), federation, TASK.x0, TASK.y0).total
        assert (found.floats_down, found.floats_up) == (5 * 3, 5 * (3 + more))
    shared = cost(simfbo(TASK.problem, LOCAL), federation, TASK.x0, TASK.y0).total
    own = cost(simfbo(PRIVATE, LOCAL), federation, TASK.x0, TASK.y0).total
    assert own.bytes_up + own.bytes_down < 0.6 * (shared.bytes_up + shared.bytes_down)


@pytest.mark.parametrize("factory", [fednest, aggitd, fedbio, memfbo, mimefbo])
def test_other_methods_refuse_a_private_lower_level(factory):
    with pytest.raises(UserError, match="needs a lower problem that all clients share"):
        factory(PRIVATE, LOCAL)


def test_momenta_are_their_equations():
    z, kept, theta = np.zeros(11), {}, 0.3
    for ids in COHORTS:
        for i in ids:
            own, q = z, np.zeros(11)
            for _ in range(TAUS[i]):
                d = direction(i, own)
                own, q = own - ETA * d, q + d
            kept[i] = (1 - theta) * kept[i] + theta * q if i in kept else q
        z = z - GAMMA * mean_of(ids, [kept[i] for i in ids])
    state, _ = rounds(with_momenta(simfbo(TASK.problem, LOCAL, SERVER), theta), COHORTS)
    np.testing.assert_allclose(variables(state), z, rtol=1e-12, atol=1e-12)


def test_momenta_of_methods_that_remember_keep_both():
    """theta = 1 changes nothing, neither in what is sent nor in what is remembered."""
    plain = mimefbo(TASK.problem, LOCAL, SERVER, control="memory")
    ends = [rounds(one, COHORTS) for one in (plain, with_momenta(plain, 1.0))]
    np.testing.assert_allclose(*(variables(state) for state, _ in ends), atol=1e-12)
    memories = [federation.client_memory for _, federation in ends]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), memories[0], memories[1].own
    )
    federation = SimulatedFederation(TASK.data)
    sent = [
        cost(one, federation, TASK.x0, TASK.y0).total for one in (plain, with_momenta(plain, 1))
    ]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mimefbo(TASK.problem, LOCAL, control="both"), "control must be one of mean"),
        (lambda: mimefbo(TASK.problem, LOCAL, theta=0.0), "theta must lie above 0"),
        (lambda: with_momenta(simfbo(TASK.problem, LOCAL), 1.5), "theta must lie above 0"),
        (lambda: rounds(with_momenta(unnamed()), [[0, 1]]), "Momenta need messages with one Point"),
    ],
)
def test_wrong_settings_end_in_a_sentence(call, says):
    with pytest.raises(UserError, match=says):
        call()


def unnamed():
    """Return a method whose messages do not name their channels."""

    def bare_step(payload, client):
        return payload

    def round(state, federation, key):
        federation.sum(bare_step, state.y, federation.cohort(key), key)
        return state

    return Functional("unnamed", fedavg(TASK.problem, 0.1).init, round, (bare_step,))


def test_fedbioacc_local_is_its_equations():
    """y_i, v_i and their estimators stay with the client; x and its estimator are averaged."""
    eta, (delta, u, c) = np.repeat([0.02, 0.06, 0.05], [3, 4, 4]), (4.0, 100.0, 0.3)
    x, d_x, t = np.zeros(3), np.zeros(3), 0.0
    own, estimates, begun = np.zeros((5, 8)), np.zeros((5, 8)), np.zeros(5, bool)
    for ids in COHORTS:
        sent, weights = [], [WEIGHTS[i] * 5 / len(ids) for i in ids]
        for i in ids:
            z, d = np.concatenate([x, own[i]]), np.concatenate([d_x, estimates[i]])
            for k in range(TAUS[i]):
                alpha = delta / (u + t + k) ** (1 / 3)
                keep = 1 - c * alpha**2
                kept = np.concatenate([np.full(3, keep * (t + k > 0)), np.full(8, keep * begun[i])])
                after = z - alpha * eta * d
                d = direction(i, after) + kept * (d - direction(i, z))
                z, begun[i] = after, True
            own[i], estimates[i] = z[3:], d[3:]
            sent.append(np.concatenate([z[:3] - x, d[:3] - d_x]))
        change = mean_of(ids, sent)
        x, d_x = x + change[:3], d_x + change[3:]
        t += np.average([TAUS[i] for i in ids], weights=weights)
    steps = Point(x=0.02, y=0.06, v=0.05)
    algorithm = fedbioacc_local(PRIVATE, steps, delta=delta, u=u, c=c)
    state, federation = rounds(algorithm, COHORTS)
    np.testing.assert_allclose(state.x, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state.d, d_x, rtol=1e-12, atol=1e-12)
    kept = federation.client_memory
    np.testing.assert_allclose(np.hstack([kept.at.y, kept.at.v]), own, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.hstack([kept.d.y, kept.d.v]), estimates, rtol=1e-12, atol=1e-12)


def test_fedbioacc_local_finds_the_private_solution():
    federation = SimulatedFederation(TASK.data)
    algorithm = fedbioacc_local(PRIVATE, Point(x=0.1, y=0.2, v=0.2))
    state = run(algorithm, federation, TASK.x0, TASK.y0, rounds=600).state
    np.testing.assert_allclose(state.x, private_solution(), atol=1e-6)
    sent = cost(algorithm, federation, TASK.x0, TASK.y0).total
    assert (sent.floats_down, sent.floats_up) == (5 * (2 * 3 + 1), 5 * (2 * 3 + 2))


def test_fedbioacc_local_needs_a_private_lower_level():
    with pytest.raises(UserError, match='lower_level="private"'):
        fedbioacc_local(TASK.problem, LOCAL)
