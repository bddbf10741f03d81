"""SimFBO and ShroFBO against closed forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from simfbo import Server, SimulatedFederation, Steps, run, shrofbo, simfbo
from simfbo.algorithms._simfbo import drawn_directions, local_steps, project
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
from simfbo.core.problem import Point
from simfbo.core.sampling import with_replacement, without_replacement
from simfbo.diagnostics import effective_weights
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TAUS = [1, 2, 3, 5, 9]
QUADRATIC = random_quadratic(5, 3, 4, seed=1)
TASK = QUADRATIC.task()
P = TASK.data.p
SERVER = Steps(y=0.04, v=0.04, x=0.02)


def alike(eta):
    return Steps(y=eta, v=eta, x=eta)


def end(algorithm, federation, rounds=800, task=TASK, seed=0):
    """Return the last state of a run."""
    return run(
        algorithm, federation, task.x0, task.y0, rounds=rounds, every=rounds, seed=seed
    ).state


@pytest.mark.parametrize("rule", [momentum(0.0), momentum(0.6)])
def test_equal_norms_make_shrofbo_simfbo_also_for_some_clients(rule):
    task = QUADRATIC.task(np.arange(1, 6), samples=4, noise=0.5, batch_size=2)
    states = [
        end(
            factory(task.problem, alike(0.05), SERVER, radius=0.5),
            SimulatedFederation(task.data, without_replacement(2), constant(3, rule)),
            50,
            task,
        )
        for factory in (simfbo, shrofbo)
    ]
    for name in ("x", "y", "v"):
        np.testing.assert_allclose(*(getattr(s, name) for s in states), rtol=0, atol=1e-12)


@pytest.mark.parametrize("factory", [simfbo, shrofbo])
def test_unequal_work_ends_at_w_or_p_and_the_bias_is_linear_in_eta(factory):
    norms = np.asarray(TAUS, float)
    weights = effective_weights(P, norms) if factory is simfbo else P
    goal = QUADRATIC.closed_form(weights).x()
    federation = SimulatedFederation(TASK.data, local_work=fixed(TAUS))
    etas = 0.004 * 0.5 ** np.arange(5)
    errors = [
        np.linalg.norm(end(factory(TASK.problem, alike(eta), SERVER), federation).x - goal)
        for eta in etas
    ]
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    np.testing.assert_allclose(ratios, 2, atol=0.1)
    other = QUADRATIC.closed_form(P if factory is simfbo else effective_weights(P, norms)).x()
    assert errors[-1] < 0.01 * np.linalg.norm(goal - other)


def test_simfbo_redrawing_tau_every_round_tends_to_p():
    goal, wrong = (
        QUADRATIC.closed_form(P).x(),
        QUADRATIC.closed_form(effective_weights(P, TAUS)).x(),
    )
    federation = SimulatedFederation(TASK.data, local_work=uniform(1, 9, every_round=True))
    algorithm = simfbo(TASK.problem, alike(1e-5), Steps(y=0.01, v=0.01, x=0.002))
    state, xs = algorithm.init(TASK.x0, TASK.y0), []
    for key in jax.random.split(jax.random.key(0), 6000):
        state = algorithm.round(state, federation, key)
        xs.append(state.x)
    mean = np.mean(np.stack(xs[2000:]), axis=0)
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

    def moves(work, sampler, rounds=3):
        federation = SimulatedFederation(TASK.data, sampler, work)
        algorithm = shrofbo(TASK.problem, alike(1e-12), Steps(y=1e-12, v=1e-12, x=1e-9))
        states = [algorithm.init(TASK.x0, TASK.y0)]
        for key in jax.random.split(jax.random.key(5), rounds):
            states.append(algorithm.round(states[-1], federation, key))
        return np.array([np.linalg.norm(b.x - a.x) for a, b in itertools.pairwise(states)])

    taus = [3, 5, 3, 5, 5]
    known = fixed(taus, momentum(0.5))
    secret = fixed(taus, momentum(0.5), assigned=False)
    sampler = without_replacement(2)
    rho = P @ known(jax.random.key(0), 5).norm
    assert min(norms) < rho < max(norms)
    by_known, by_secret = moves(known, sampler), moves(secret, sampler)
    # The first step uses rho = 1, the second the first cohort's estimate, the third a mean.
    estimates = rho * by_secret / by_known
    assert estimates[0] == pytest.approx(1, rel=1e-6)
    cohorts = [sampler(key, P).ids for key in jax.random.split(jax.random.key(5), 3)]
    own = [2.5 * P[ids] @ known(jax.random.key(0), 5).norm[ids] for ids in cohorts]
    assert estimates[1] == pytest.approx(own[0], rel=1e-6)
    assert estimates[2] == pytest.approx(np.mean(own[:2]), rel=1e-6)
    # Everyone takes part: exact at once, whoever knows tau.
    np.testing.assert_allclose(moves(known, None), moves(secret, None), rtol=1e-12)


def test_projection_keeps_v_in_its_ball_and_counts():
    federation = SimulatedFederation(TASK.data, local_work=fixed(TAUS))
    radius = 0.3
    algorithm = simfbo(TASK.problem, alike(0.02), Steps(y=0.05, v=0.05, x=0.02), radius=radius)
    state = algorithm.init(TASK.x0, TASK.y0)
    norms = []
    for key in jax.random.split(jax.random.key(0), 30):
        state = algorithm.round(state, federation, key)
        norms.append(float(jnp.linalg.norm(state.v)))
    assert max(norms) <= radius * (1 + 1e-12)
    acted = sum(norm > radius * (1 - 1e-9) for norm in norms)
    assert int(state.projected) == acted > 0


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


def test_local_v_stays_within_the_papers_bound():
    """With r = L_f/mu and a_k eta <= 1/L, v_i stays within (1 + a_max/a_min) r unprojected."""
    rule, tau, i = coefficients([1.0, 2.0, 0.5, 1.0] * 3), 12, 2
    start_x, start_y = jnp.ones(3), QUADRATIC.closed_form(np.eye(5)[i]).y(np.ones(3))
    slope = np.linalg.norm(QUADRATIC.C[i] @ (start_y - QUADRATIC.t[i]))
    spectrum = np.linalg.eigvalsh(QUADRATIC.A[i])
    radius, bound = slope / spectrum[0], (1 + 2.0 / 0.5) * slope / spectrum[0]
    start = Point(x=start_x, y=start_y, v=radius * jnp.eye(4)[0])

    def largest(eta):
        @jax.jit
        def norm(coefs):
            client = Client(TASK.data.client(i), coefs, jax.random.key(0))
            q = local_steps(drawn_directions(TASK.problem), Steps(y=0.0, v=eta, x=0.0))(
                start, client
            )
            return jnp.linalg.norm(start.v - eta * q.v)

        plans = [LocalWork(lambda key, n, k=k: np.full(n, k), tau, rule) for k in range(1, tau + 1)]
        return max(float(norm(plan(jax.random.key(0), 5)[i])) for plan in plans)

    assert largest(1 / (2 * spectrum[-1])) <= bound
    assert largest(3 / spectrum[-1]) > bound


def test_server_may_be_any_optax_transformation():
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    server = Server(y=optax.sgd(schedule), v=optax.sgd(0.0), x=optax.adam(0.1))
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


def test_independent_batches_agree_on_full_batches_and_differ_on_minibatches():
    for size, same in ((None, True), (2, False)):
        task = QUADRATIC.task(samples=6, noise=1.0, batch_size=size)
        ends = [
            end(
                simfbo(task.problem, alike(0.05), SERVER, independent_batches=independent),
                SimulatedFederation(task.data, local_work=constant(2)),
                3,
                task,
            ).x
            for independent in (False, True)
        ]
        assert (np.abs(ends[0] - ends[1]).max() < 1e-14) == same


def test_minibatch_directions_are_unbiased():
    """The mean over many keys tends to the full batch's, within its standard error."""
    task = QUADRATIC.task(samples=6, noise=1.0, batch_size=2)
    start = Point(x=jnp.ones(3), y=jnp.ones(4), v=jnp.ones(4))
    work = local_steps(drawn_directions(task.problem), alike(0.1))
    coefs = constant(1)(jax.random.key(0), 5)[0]
    draw = jax.jit(jax.vmap(lambda key: work(start, Client(task.data.client(0), coefs, key))))
    q = np.concatenate(draw(jax.random.split(jax.random.key(1), 20_000)), axis=1)
    exact = Client(TASK.data.client(0), coefs, jax.random.key(0))
    full = local_steps(drawn_directions(TASK.problem), alike(0.1))(start, exact)
    error = np.abs(q.mean(axis=0) - np.concatenate(full))
    assert (error <= 5 * q.std(axis=0) / np.sqrt(len(q)) + 1e-12).all()
    assert q.std(axis=0).max() > 0.1


def noise_floor(sampler, rounds=2500, settled=300):
    """Return the mean of ||grad Phi||^2 long after convergence; noise comes from sampling alone."""
    quadratic = random_quadratic(20, 3, 4, heterogeneity=0.4, seed=3)
    task, truth = quadratic.task(), quadratic.closed_form()
    algorithm = simfbo(task.problem, alike(0.1), Steps(y=0.1, v=0.1, x=0.05))
    federation = SimulatedFederation(task.data, sampler)
    state, xs = algorithm.init(task.x0, task.y0), []
    fold = jax.jit(jax.random.fold_in)
    for t in range(rounds):
        state = algorithm.round(state, federation, fold(jax.random.key(11), t))
        xs.append(state.x)
    hypergradients = np.stack([truth.hypergradient(x) for x in np.stack(xs[settled:])])
    return (hypergradients**2).sum(axis=1).mean()


def test_linear_speed_up_with_replacement():
    sizes = np.array([1, 4, 16])
    floors = [noise_floor(with_replacement(int(size))) for size in sizes]
    slope = np.polyfit(np.log(sizes), np.log(floors), 1)[0]
    assert -1.2 <= slope <= -0.8


def test_speed_up_without_replacement_follows_its_variance():
    sizes = np.array([1, 4, 16])
    floors = np.array([noise_floor(without_replacement(int(size))) for size in sizes])
    factors = (20 - sizes) / (sizes * 19)
    constant_ = np.exp(np.mean(np.log(floors / factors)))
    np.testing.assert_allclose(floors, constant_ * factors, rtol=0.25)
    assert noise_floor(without_replacement(20), 1500, 1490) < 1e-20
