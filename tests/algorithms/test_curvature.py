"""mu and L found through the federation, against NumPy's eigenvalues of the true Hessian."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Ledger, Point, SimulatedFederation, from_clients
from simfbo.algorithms.steps.curvature import (
    Curvature,
    Probes,
    begin_shift,
    continue_shift,
    measure_cohort,
    orthonormal,
    refresh,
)
from simfbo.core.local_work import fixed
from simfbo.core.problem import BilevelProblem
from simfbo.core.sampling import Cohort, drop_out, without_replacement
from simfbo.tasks import random_quadratic
from simfbo.tasks._quadratic import PROBLEM

DIM, TAUS, P = 7, [1, 2, 3, 4], np.array([0.1, 0.2, 0.3, 0.4])
Q = random_quadratic(4, 2, DIM, heterogeneity=1.0, seed=3)
TASK = Q.task(P)
PROBES = Probes(PROBLEM)
KEY = jax.random.key(5)
MODULE = importlib.import_module("simfbo.algorithms.steps.curvature")
SPECTRUM = np.linalg.eigvalsh(np.tensordot(P, Q.A, 1))


@pytest.fixture(autouse=True)
def never_known(monkeypatch, request):
    """Go on until all eigenvalues are exact, except where a test is about stopping earlier."""
    if "early" not in request.node.name:
        monkeypatch.setattr(MODULE, "_KNOWN", 0.0)


@pytest.fixture(scope="module")
def federation():
    return SimulatedFederation(TASK.data, local_work=fixed(TAUS))


def found(federation, key=KEY, exchanges=15, y=TASK.y0, probes=PROBES, x=TASK.x0):
    federation.ledger = Ledger()
    return measure_cohort(probes, federation, x, y, key, exchanges)


def test_with_as_many_exchanges_as_dimensions_both_ends_are_exact(federation):
    curvature = found(federation)
    assert curvature[:2] == pytest.approx((SPECTRUM[0], SPECTRUM[-1]), rel=1e-11)
    assert curvature.work == pytest.approx(P @ TAUS, rel=1e-14)
    assert not curvature.noisy
    H = np.tensordot(P, Q.A, 1)
    for value, vector in zip(SPECTRUM[[-1, 0]], curvature.vectors, strict=False):
        np.testing.assert_allclose(H @ vector, value * vector, atol=1e-9)


def test_unequal_weights_matter(federation):
    even = np.linalg.eigvalsh(Q.A.mean(0))
    assert abs(found(federation).L - even[-1]) > 1e-3


def test_with_fewer_they_lie_within_the_spectrum_and_come_nearer(federation):
    ends = [found(federation, exchanges=k) for k in range(1, DIM + 1)]
    for before, after in itertools.pairwise(ends):
        assert SPECTRUM[0] - 1e-12 <= after.mu <= before.mu + 1e-12
        assert before.L - 1e-12 <= after.L <= SPECTRUM[-1] + 1e-12
    assert ends[0].mu == ends[0].L
    gaps = [(end.mu - SPECTRUM[0], SPECTRUM[-1] - end.L) for end in ends]
    assert min(gaps[0]) > 0.05
    assert max(gaps[-1]) < 1e-11


def test_few_exchanges_are_a_rayleigh_ritz_of_the_krylov_space(federation):
    """After k products, the ends are those of H within span(u, Hu, .., H^(k-1) u)."""
    H, first = np.tensordot(P, Q.A, 1), []

    class Recorder:
        def cohort(self, key):
            return federation.cohort(key)

        def sum(self, client_step, payload, cohort, key):
            first.append(np.asarray(payload.v))
            return federation.sum(client_step, payload, cohort, key)

    got = measure_cohort(PROBES, Recorder(), TASK.x0, TASK.y0, KEY, 3)
    np.testing.assert_allclose(np.stack(first) @ np.stack(first).T, np.eye(3), atol=1e-13)
    basis = np.linalg.qr(np.stack([first[0], H @ first[0], H @ H @ first[0]], axis=1))[0]
    ritz = np.linalg.eigvalsh(basis.T @ H @ basis)
    assert got[:2] == pytest.approx((ritz[0], ritz[-1]), rel=1e-10)


def test_every_product_is_an_exchange(federation):
    for exchanges, expected in ((1, 1), (4, 4), (DIM, DIM), (15, DIM)):
        found(federation, exchanges=exchanges)
        total = federation.ledger.total
        assert (total.rounds, total.floats_down, total.floats_up) == (
            expected, expected * 4 * (2 + 2 * DIM), expected * 4 * (DIM + 2),
        )  # fmt: skip
        assert set(federation.ledger.by_step) == {"curvature"}


@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e6])
def test_a_multiple_of_the_identity_ends_after_one_exchange(factor):
    same = Q._replace(A=np.stack([factor * np.eye(DIM)] * 4))
    federation = SimulatedFederation(same.task(P).data)
    assert found(federation)[:3] == pytest.approx((factor, factor, 1), rel=1e-12)
    assert federation.ledger.total.rounds == 1


def test_two_distinct_eigenvalues_end_after_two():
    two = Q._replace(A=np.stack([np.diag([3.0, 3, 3, 0.5, 0.5, 3, 3])] * 4))
    federation = SimulatedFederation(two.task().data)
    assert found(federation)[:2] == pytest.approx((0.5, 3), rel=1e-12)
    assert federation.ledger.total.rounds == 2


def test_negative_eigenvalues_are_found():
    bent = Q._replace(A=Q.A - 2.5 * np.eye(DIM))
    mu, L = found(SimulatedFederation(bent.task(P).data))[:2]
    assert (mu, L) == pytest.approx((SPECTRUM[0] - 2.5, SPECTRUM[-1] - 2.5), rel=1e-10)
    assert mu < 0


def test_a_cohort_sees_its_own_weighted_matrix():
    """One cohort for all products, whose weights, which may add up to anything, count as shares."""
    federation = SimulatedFederation(TASK.data, without_replacement(2))
    keys = jax.random.split(KEY, 12)
    odd = [key for key in keys if abs(federation.cohort(key).weights.sum() - 1) > 0.3]
    for key in odd[:2]:
        ids, weights = federation.cohort(key)
        own = np.linalg.eigvalsh(np.tensordot(weights / weights.sum(), Q.A[ids], 1))
        assert found(federation, key)[:3] == pytest.approx((own[0], own[-1], 1), rel=1e-11)
        assert federation.ledger.total.floats_up == DIM * 2 * (DIM + 2)
    assert odd


def test_who_fails_to_reply_fails_every_time():
    federation = SimulatedFederation(TASK.data, absence=drop_out(0.5))
    keys = jax.random.split(KEY, 8)
    key = next(k for k in keys if 0 < federation.absent(k, np.arange(4)).sum() < 4)
    there = ~federation.absent(key, np.arange(4))
    own = np.linalg.eigvalsh(np.tensordot(P * there * 4 / there.sum(), Q.A, 1))
    assert found(federation, key)[:2] == pytest.approx((own[0], own[-1]), rel=1e-11)


def ridge_clients(sizes, dtype=float):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(size, 4)).astype(dtype) for size in sizes]


def ridge(x, y, batch):
    """A pytree of two leaves: 1/2 mean (a'w + b)^2 + 1/2 (||w||^2 + b^2) / 10."""
    fit = 0.5 * jnp.mean((batch @ y["w"].ravel() + y["b"]) ** 2)
    return fit + 0.05 * (jnp.sum(y["w"] ** 2) + y["b"] ** 2)


def ridge_hessian(clients, p):
    hessian = 0.1 * np.eye(5)
    for weight, rows in zip(p, clients, strict=True):
        wide = np.column_stack([np.ones(len(rows)), rows])  # b comes before w in the tree
        hessian = hessian + weight * wide.T @ wide / len(rows)
    return hessian


def test_trees_and_clients_of_unequal_size():
    clients = ridge_clients([3, 8, 2])
    data = from_clients(clients, clients, batch_size=1)  # curvature looks at all samples
    truth = np.linalg.eigvalsh(ridge_hessian(clients, np.array([3, 8, 2]) / 13))
    y = {"w": jnp.ones((2, 2)), "b": jnp.zeros(())}
    probes = Probes(BilevelProblem(ridge, ridge))
    got = found(SimulatedFederation(data), y=y, probes=probes, x=jnp.zeros(1))
    assert got[:2] == pytest.approx((truth[0], truth[-1]), rel=1e-11)


@pytest.mark.usefixtures("single_precision")
def test_single_precision():
    clients = ridge_clients([6, 6], np.float32)
    truth = np.linalg.eigvalsh(ridge_hessian(clients, [0.5, 0.5]))
    y = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(())}
    probes = Probes(BilevelProblem(ridge, ridge))
    federation = SimulatedFederation(from_clients(clients, clients))
    got = found(federation, y=y, probes=probes, x=jnp.zeros(1))
    assert got[:2] == pytest.approx((truth[0], truth[-1]), rel=2e-5)
    assert federation.ledger.total.bytes_down == 5 * 2 * (1 + 2 * 5) * 4


def test_at_the_point_where_it_is_asked():
    """Of a loss that is no quadratic: Hessian diag(12 y^2 + 1) of sum y^4 + y^2 / 2."""

    def quartic(x, y, batch):
        return jnp.sum(y**4 + 0.5 * y**2) + 0 * jnp.sum(batch)

    probes = Probes(BilevelProblem(quartic, quartic))
    federation = SimulatedFederation(from_clients([np.ones(2)] * 2, [np.ones(2)] * 2))
    got = found(federation, y=jnp.array([0.0, 0.5, -2.0]), probes=probes, x=jnp.zeros(1))
    assert got[:2] == pytest.approx((1, 49), rel=1e-11)


def test_the_first_direction_depends_on_the_key_alone(federation):
    once, again = found(federation, exchanges=2), found(federation, exchanges=2)
    other = found(federation, key=jax.random.key(6), exchanges=2)
    assert once[:2] == again[:2]
    assert once[:2] != other[:2]


def test_an_own_cohort_rule_is_asked_once():
    asked = []

    def sampler(key, p):
        asked.append(key)
        return Cohort(np.arange(4), p)

    found(SimulatedFederation(TASK.data, sampler))
    assert len(asked) == 1


@pytest.mark.parametrize("kappa", [3.0, 1e3])
def test_it_stops_early_where_both_ends_are_known_to_ten_per_cent(kappa):
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.normal(size=(40, 40)))[0]
    A = (basis * np.geomspace(1 / kappa, 1, 40)) @ basis.T
    many = random_quadratic(2, 2, 40)._replace(A=np.stack([A, A]))
    federation = SimulatedFederation(many.task().data)
    mu, L = found(federation, exchanges=40, y=np.zeros(40), x=np.zeros(2))[:2]
    assert federation.ledger.total.rounds < 40
    assert 1 / kappa <= mu < 1.1 / kappa
    assert 0.9 < L <= 1 + 1e-12


# While x moves


@pytest.mark.parametrize("noisy", [0.0, 1.0])
def test_refreshed_ends_follow_a_changing_matrix(noisy):
    """As L2 weights grow or fall by 3 % a step, six products a step keep up with both ends."""
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(60, 20)) * np.geomspace(0.3, 3, 20)
    weights, drift = np.full(20, 0.1), rng.choice([0.97, 1.03], 20)
    values, vectors = np.linalg.eigh(rows.T @ rows / 60 + np.diag(weights))
    start = np.concatenate([vectors.T[[-1, 0]], np.zeros((4, 20))])
    curvature = Curvature(values[0], values[-1], 1.0, noisy, start)
    for _ in range(60):
        weights = weights * drift
        H = rows.T @ rows / 60 + np.diag(weights)
        values, basis = np.linalg.eigvalsh(H), orthonormal(curvature.vectors)
        curvature = refresh(curvature, basis, basis @ H)
        assert 1 - 1e-12 <= curvature.mu / values[0] < 1.2
        assert 0.9 < curvature.L / values[-1] <= 1 + 1e-12


@pytest.mark.parametrize("mu", [-1e-9, 0.0])
def test_a_mu_that_was_not_positive_is_forgotten(mu):
    """Rounding may make it negative once; then the cap on its growth must not keep it there."""
    start = np.concatenate([np.eye(2, 20), np.zeros((4, 20))])
    values = np.geomspace(4.0, 0.5, 20)
    found = refresh(Curvature(mu, 4.0, 1.0, 0.0, start), start, start * values)
    assert found.mu == pytest.approx(values[1])


def test_orthonormal_rows_span_the_same_and_pad_with_zeros():
    rows = np.array([[3.0, 0, 0], [1.0, 1, 0], [2.0, 5, 0], [0, 0, 0]])
    basis = orthonormal(rows)
    np.testing.assert_allclose(basis @ basis.T, np.diag([1.0, 1, 0, 0]), atol=1e-12)
    np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-12)


def test_a_check_sends_the_upper_loss_with_y_solved_to_first_order(federation):
    """F(x, y) - <grad_y G(x, y), v> and its excess over the best point, against NumPy."""
    rng, truth = np.random.default_rng(6), Q.closed_form(P)
    at, best = (Point(rng.normal(size=2), *rng.normal(size=(2, DIM))) for _ in range(2))
    rows = rng.normal(size=(6, DIM))
    cohort = federation.cohort(KEY)
    (h, numbers), d_y, (d_v, images) = federation.sum(PROBES.check, (at, best, rows), cohort, KEY)
    losses = [[_upper(Q, i, one) - _correction(Q, i, one) for i in range(4)] for one in (at, best)]
    excess = np.subtract(*losses)
    expected = [P @ losses[0], P @ excess, P @ excess**2]
    expected.append(sum(P[i] * _correction(Q, i, at) for i in range(4)))
    np.testing.assert_allclose(numbers, expected, rtol=1e-10)
    np.testing.assert_allclose(d_y, truth.A @ at.y - truth.B @ at.x - truth.c, rtol=1e-10)
    np.testing.assert_allclose(images, rows @ truth.A, rtol=1e-9)
    assert np.shape(h) == (2,)
    assert np.shape(d_v) == (DIM,)


def _upper(q, i, at):
    y, x = at.y - q.t[i], at.x - q.s[i]
    return 0.5 * y @ q.C[i] @ y + 0.5 * x @ q.D[i] @ x


def _correction(q, i, at):
    return (q.A[i] @ at.y - q.B[i] @ at.x - q.c[i]) @ at.v


# How far y*(x) moves with x


def moved(exchanges, federation, u):
    federation.ledger = Ledger()
    at = Point(TASK.x0, TASK.y0)
    shift = begin_shift(PROBES, federation, at, u, KEY, exchanges)
    while shift.left:
        shift = continue_shift(PROBES, federation, at, shift)
    return float(np.linalg.norm(shift.z))


def test_the_shift_of_y_is_that_of_the_closed_form(federation):
    truth, u = Q.closed_form(P), np.array([0.7, -2.0])
    expected = np.linalg.norm(truth.y(u) - truth.y(np.zeros(2)))
    assert moved(DIM, federation, u) == pytest.approx(expected, rel=1e-3)
    assert federation.ledger.by_step["response"].rounds == 1
    assert federation.ledger.by_step["curvature"].rounds <= DIM
    few = [moved(k, federation, u) for k in (1, 2, 3)]
    assert 0 < few[0] < few[1] < few[2] < expected * (1 + 1e-3)


def test_x_that_does_not_act_on_y_shifts_nothing(federation):
    assert moved(DIM, federation, np.zeros(2)) == 0
    assert federation.ledger.total.rounds == 1
