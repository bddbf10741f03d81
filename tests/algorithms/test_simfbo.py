"""SimFBO and ShroFBO against closed forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from simfbo import Point, SimulatedFederation
from simfbo.algorithms import shrofbo, simfbo
from simfbo.algorithms._common import drawn_directions, local_steps, project
from simfbo.core.federation import Client
from simfbo.core.local_work import (
    LocalWork,
    coefficients,
    constant,
    effective,
    fixed,
    momentum,
    uniform,
)
from simfbo.core.sampling import Cohort, with_replacement, without_replacement
from simfbo.diagnostics import effective_weights
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TAUS = [1, 2, 3, 5, 9]
QUADRATIC = random_quadratic(5, 3, 4, seed=1)
TASK = QUADRATIC.task()
NOISY = QUADRATIC.task(np.arange(1, 6), samples=6, noise=1.0, batch_size=2)
P = TASK.data.p
SERVER = Point(x=0.02, y=0.04, v=0.04)
KEY = jax.random.key(0)


def alike(eta):
    return Point(x=eta, y=eta, v=eta)


def rounds(algorithm, federation, count, task=TASK):
    """Return all states of a walk, the first included."""
    states = [algorithm.init(task.x0, task.y0)]
    for key in jax.random.split(KEY, count):
        states.append(algorithm.round(states[-1], federation, key))
    return states


def variables(state):
    return np.concatenate(getattr(state, "base", state)[:3])


def messages(x, y, v):
    """Return every client's directions at a point, from NumPy."""
    q = QUADRATIC
    return np.stack([
        np.concatenate([q.D[i] @ (x - q.s[i]) + q.B[i].T @ v, q.A[i] @ y - q.B[i] @ x - q.c[i],
                        q.A[i] @ v - q.C[i] @ (y - q.t[i])])
        for i in range(5)
    ])  # fmt: skip


def test_equal_norms_make_shrofbo_simfbo_also_for_some_clients():
    data = QUADRATIC.task(np.arange(1, 6)).data
    federation = SimulatedFederation(data, without_replacement(2), constant(3, momentum(0.6)))
    ends = [
        rounds(factory(TASK.problem, alike(0.05), SERVER, radius=0.3), federation, 12)[-1]
        for factory in (simfbo, shrofbo)
    ]
    np.testing.assert_allclose(*map(variables, ends), rtol=0, atol=1e-12)
    acted = [int(getattr(state, "base", state).projected) for state in ends]
    assert acted[0] == acted[1] > 0


@pytest.mark.parametrize("factory", [simfbo, shrofbo])
def test_unequal_work_ends_at_w_or_p_and_the_bias_is_linear_in_eta(factory, affine):
    norms = np.asarray(TAUS, float)
    weights = effective_weights(P, norms) if factory is simfbo else P
    goal = QUADRATIC.closed_form(weights).x()
    federation = SimulatedFederation(TASK.data, local_work=fixed(TAUS))
    errors = []
    for eta in 0.004 * 0.5 ** np.arange(5):
        walk = affine(factory(TASK.problem, alike(eta), SERVER), federation, TASK.x0, TASK.y0)
        assert walk.rate < 0.93
        errors.append(np.linalg.norm(walk.fixed_point[:3] - goal))
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    np.testing.assert_allclose(ratios, 2, atol=0.1)
    other = QUADRATIC.closed_form(P if factory is simfbo else effective_weights(P, norms)).x()
    assert errors[-1] < 0.01 * np.linalg.norm(goal - other)


def test_the_walk_is_the_affine_map(affine):
    """What the fixed points of this file rest on."""
    federation = SimulatedFederation(TASK.data, local_work=fixed(TAUS))
    algorithm = simfbo(TASK.problem, alike(0.004), SERVER)
    walk = affine(algorithm, federation, TASK.x0, TASK.y0)
    z = np.zeros(11)
    for state in rounds(algorithm, federation, 6)[1:]:
        z = walk.matrix @ z + walk.offset
        np.testing.assert_allclose(variables(state), z, rtol=1e-12, atol=1e-12)


def solution(weights):
    """Return x*, y*(x*) and v*(x*) for client weights."""
    truth = QUADRATIC.closed_form(weights)
    return Point(truth.x(), truth.y(truth.x()), truth.v(truth.x()))


def test_simfbo_redrawing_tau_every_round_stays_at_p_in_the_mean():
    """There the mean of many rounds moves nothing; where fixed tau_i would end, it moves away."""
    federation = SimulatedFederation(TASK.data, local_work=uniform(1, 9, every_round=True))
    algorithm = simfbo(TASK.problem, alike(1e-9), Point(x=1.0, y=1.0, v=1.0))

    def scores(at):
        """Return the mean move in standard errors, the largest of all coordinates."""
        state = algorithm.init(at.x, at.y)._replace(v=jnp.asarray(at.v))
        keys = jax.random.split(jax.random.key(1), 150)
        moves = np.stack([variables(algorithm.round(state, federation, k)) for k in keys])
        moves = moves - np.concatenate(at)
        assert moves.std(0).min() > 0.1
        return np.abs(moves.mean(0) / moves.std(0) * len(keys) ** 0.5).max()

    assert scores(solution(P)) < 4
    assert scores(solution(effective_weights(P, np.asarray(TAUS, float)))) > 8


@pytest.mark.slow
def test_simfbo_redrawing_tau_every_round_tends_to_p():
    goal, wrong = (
        QUADRATIC.closed_form(P).x(),
        QUADRATIC.closed_form(effective_weights(P, TAUS)).x(),
    )
    federation = SimulatedFederation(TASK.data, local_work=uniform(1, 9, every_round=True))
    algorithm = simfbo(TASK.problem, alike(1e-5), Point(x=0.002, y=0.01, v=0.01))
    states = rounds(algorithm, federation, 6000)
    mean = np.mean(np.stack([state.x for state in states[2000:]]), axis=0)
    assert np.linalg.norm(mean - goal) < 0.05 * np.linalg.norm(wrong - goal)


def direction_bias(use):
    """Return how far the mean of ShroFBO's scaled x-direction is from its target, relative.

    Over all cohorts of two, with a rho that `use` picks from (exact rho, the cohort's own).
    """
    norms = np.asarray(TAUS, float)
    rng = np.random.default_rng(0)
    h = norms[:, None] * rng.normal(size=3) + rng.normal(size=(5, 3))
    rho = P @ norms
    total, pairs = np.zeros(3), [(i, j) for i in range(5) for j in range(i)]
    for pair in pairs:
        cohort = list(pair)
        weights = P[cohort] * 5 / 2
        total += use(rho, weights @ norms[cohort]) * (weights @ h[cohort])
    goal = rho * (P @ h)
    return np.linalg.norm(total / len(pairs) - goal) / np.linalg.norm(goal)


def test_this_rounds_own_rho_would_bring_the_bias_back():
    assert direction_bias(lambda exact, own: exact) < 1e-14
    assert direction_bias(lambda exact, own: own) > 0.05


def test_rho_is_exact_or_the_mean_of_earlier_rounds():
    """With x-steps only, one round moves x by rho gamma h: read rho off the iterates."""
    norms = effective(momentum(0.5), 3).sum(), effective(momentum(0.5), 5).sum()

    def moves(work, sampler):
        federation = SimulatedFederation(TASK.data, sampler, work)
        algorithm = shrofbo(TASK.problem, alike(1e-12), Point(x=1e-9, y=1e-12, v=1e-12))
        states = rounds(algorithm, federation, 3)
        return np.array(
            [np.linalg.norm(b.base.x - a.base.x) for a, b in itertools.pairwise(states)]
        )

    taus = [3, 5, 3, 5, 5]
    known = fixed(taus, momentum(0.5))
    secret = fixed(taus, momentum(0.5), assigned=False)
    sampler = without_replacement(2)
    rho = P @ known(KEY, 5).norm
    assert min(norms) < rho < max(norms)
    by_known, by_secret = moves(known, sampler), moves(secret, sampler)
    # The first step uses rho = 1, the second the first cohort's estimate, the third a mean.
    estimates = rho * by_secret / by_known
    assert estimates[0] == pytest.approx(1, rel=1e-6)
    cohorts = [sampler(key, P).ids for key in jax.random.split(KEY, 3)]
    own = [2.5 * P[ids] @ known(KEY, 5).norm[ids] for ids in cohorts]
    assert estimates[1] == pytest.approx(own[0], rel=1e-6)
    assert estimates[2] == pytest.approx(np.mean(own[:2]), rel=1e-6)
    # Everyone takes part: exact at once, whoever knows tau.
    np.testing.assert_allclose(moves(known, None), moves(secret, None), rtol=1e-12)


def test_projection_keeps_v_in_its_ball_and_counts():
    federation = SimulatedFederation(TASK.data, local_work=fixed(TAUS))
    radius = 0.3
    algorithm = simfbo(TASK.problem, alike(0.02), Point(x=0.02, y=0.05, v=0.05), radius=radius)
    states = rounds(algorithm, federation, 30)
    norms = [np.linalg.norm(state.v) for state in states[1:]]
    assert max(norms) <= radius * (1 + 1e-12)
    acted = sum(norm > radius * (1 - 1e-9) for norm in norms)
    assert int(states[-1].projected) == acted > 0


def test_projection_formula_and_no_radius():
    v = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    inside, acted = project(v, 10.0)
    np.testing.assert_allclose(inside["b"], 4.0, rtol=1e-15)
    assert int(acted) == 0
    outside, acted = project(v, 1.0)
    np.testing.assert_allclose([outside["a"][0], outside["b"][0]], [0.6, 0.8], rtol=1e-14)
    assert int(acted) == 1
    assert project(v, None)[0] is v
    with pytest.raises(UserError, match="radius of v must be positive"):
        simfbo(TASK.problem, alike(0.1), radius=0.0)
    with pytest.raises(UserError, match="radius of v must be positive"):
        simfbo(TASK.problem, alike(0.1), radius=np.inf)


def test_local_v_stays_within_the_papers_bound():
    """With r = L_f/mu and a_k eta <= 1/L, v_i stays within (1 + a_max/a_min) r unprojected."""
    rule, tau, i = coefficients([1.0, 2.0, 0.5, 1.0] * 3), 12, 2
    start_x, start_y = jnp.ones(3), QUADRATIC.closed_form(np.eye(5)[i]).y(np.ones(3))
    slope = np.linalg.norm(QUADRATIC.C[i] @ (start_y - QUADRATIC.t[i]))
    spectrum = np.linalg.eigvalsh(QUADRATIC.A[i])
    radius, bound = slope / spectrum[0], (1 + 2.0 / 0.5) * slope / spectrum[0]
    start = Point(x=start_x, y=start_y, v=radius * jnp.eye(4)[0])

    @jax.jit
    def norm(plan, eta):
        client = Client(TASK.data.client(i), plan, KEY)
        q = local_steps(drawn_directions(TASK.problem), start, client, Point(0.0, 0.0, eta))
        return jnp.linalg.norm(start.v - eta * q.v)

    def largest(eta):
        plans = [LocalWork(lambda key, n, k=k: np.full(n, k), tau, rule) for k in range(1, tau + 1)]
        return max(float(norm(plan(KEY, 5)[i], eta)) for plan in plans)

    assert largest(1 / (2 * spectrum[-1])) <= bound
    assert largest(3 / spectrum[-1]) > bound


def test_server_may_be_any_optax_transformation():
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    server = Point(x=optax.adam(0.1), y=optax.sgd(schedule), v=optax.sgd(0.0))
    federation = SimulatedFederation(TASK.data)
    algorithm = simfbo(TASK.problem, alike(0.1), server)
    state = algorithm.init(TASK.x0, TASK.y0)
    truth, x, y = QUADRATIC.closed_form(), np.zeros(3), np.zeros(4)
    first, second = np.zeros(3), np.zeros(3)
    for t in range(4):
        with jax.numpy_dtype_promotion("standard"):  # Optax's Adam promotes freely
            state = algorithm.round(state, federation, jax.random.key(t))
        d_x, d_y = truth.D @ x - truth.Ds, truth.A @ y - truth.B @ x - truth.c
        first, second = 0.9 * first + 0.1 * d_x, 0.999 * second + 0.001 * d_x**2
        corrected = first / (1 - 0.9 ** (t + 1)), second / (1 - 0.999 ** (t + 1))
        x = x - 0.1 * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
        y = y - 0.1 * 0.5**t * d_y
    np.testing.assert_allclose(state.x, x, rtol=1e-6)
    np.testing.assert_allclose(state.y, y, rtol=1e-6)
    np.testing.assert_array_equal(state.v, 0)


@pytest.mark.parametrize(("task", "count"), [(TASK, 2), (NOISY, 5000)], ids=["full", "mini"])
def test_directions_are_unbiased_with_shared_and_with_independent_batches(task, count):
    """Exact on full batches; on minibatches within the standard error of the mean over keys."""
    at = Point(x=np.ones(3), y=np.ones(4), v=np.ones(4))
    plan = constant(1)(KEY, 5)[0]

    @jax.jit
    @jax.vmap
    def both(key):
        client = Client(task.data.client(0), plan, key)
        draws = (drawn_directions(task.problem, own) for own in (False, True))
        return [local_steps(draw, at, client, alike(0.1)) for draw in draws]

    exact = messages(*at)[0]
    shared, own = (np.concatenate(q, axis=1) for q in both(jax.random.split(KEY, count)))
    for found in (shared, own):
        error = np.abs(found.mean(axis=0) - exact)
        assert (error <= 5 * found.std(axis=0) / np.sqrt(count) + 1e-12).all()
        assert (found.std(axis=0).max() > 0.1) == (task is NOISY)
    # Where they share a batch the noise of d_x, d_y and d_v is correlated, else it is not.
    if task is NOISY:
        pairs = [(x, 7 + v) for x in range(3) for v in range(4)]
        correlations = [
            max(abs(np.corrcoef(found[:, [x, v]].T)[0, 1]) for x, v in pairs)
            for found in (shared, own)
        ]
        assert correlations[0] > 0.2
        assert correlations[1] < 0.08


def test_independent_batches_are_another_client_step():
    methods = [
        simfbo(TASK.problem, SERVER, independent_batches=own) for own in (False, True, False)
    ]
    forms = [jax.tree.structure(method.simfbo_step) for method in methods]
    assert forms[0] == forms[2] != forms[1]


# Linear speed-up: the more clients take part, the less noise is left

TWENTY = random_quadratic(20, 3, 4, heterogeneity=0.4, seed=3)


def test_the_noise_of_a_round_falls_as_the_samplers_variance_does():
    """1/P with replacement, (n-P)/(P(n-1)) without, of the move itself; over all pairs."""
    drawn = []
    federation = SimulatedFederation(
        TASK.data, lambda key, p: Cohort(np.array(drawn[-1]), p[list(drawn[-1])] * 5 / 2)
    )
    algorithm = simfbo(TASK.problem, alike(0.1), SERVER)
    state = algorithm.init(np.ones(3), np.ones(4))

    def moves(pairs):
        found = []
        for ids in pairs:
            drawn.append(ids)
            found.append(variables(algorithm.round(state, federation, KEY)) - variables(state))
        return np.stack(found)

    alone = -np.repeat(SERVER, [3, 4, 4]) * messages(np.ones(3), np.ones(4), np.zeros(4))
    without = moves(itertools.combinations(range(5), 2))
    again = moves(itertools.product(range(5), repeat=2))
    for found, factor in ((without, 3 / 8), (again, 1 / 2)):
        np.testing.assert_allclose(found.mean(0), alone.mean(0), rtol=1e-10)
        np.testing.assert_allclose(found.var(0), factor * alone.var(0), rtol=1e-9)
    assert alone.var(0).min() > 1e-5


def noise_floor(sampler, count=2500, settled=300):
    """Return the mean of ||grad Phi||^2 long after convergence; noise comes from sampling alone."""
    task, truth = TWENTY.task(), TWENTY.closed_form()
    algorithm = simfbo(task.problem, alike(0.1), Point(x=0.05, y=0.1, v=0.1))
    states = rounds(algorithm, SimulatedFederation(task.data, sampler), count, task)
    hypergradients = np.stack([truth.hypergradient(state.x) for state in states[settled:]])
    return (hypergradients**2).sum(axis=1).mean()


@pytest.mark.slow
def test_linear_speed_up_with_replacement():
    sizes = np.array([1, 4, 16])
    floors = [noise_floor(with_replacement(int(size))) for size in sizes]
    slope = np.polyfit(np.log(sizes), np.log(floors), 1)[0]
    assert -1.2 <= slope <= -0.8


@pytest.mark.slow
def test_speed_up_without_replacement_follows_its_variance():
    sizes = np.array([1, 4, 16])
    floors = np.array([noise_floor(without_replacement(int(size))) for size in sizes])
    factors = (20 - sizes) / (sizes * 19)
    constant_ = np.exp(np.mean(np.log(floors / factors)))
    np.testing.assert_allclose(floors, constant_ * factors, rtol=0.25)
    assert noise_floor(without_replacement(20), 1500, 1490) < 1e-20
