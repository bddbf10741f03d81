"""Automatic steps: on quadratics of any scale, against the closed form."""

import copy
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from functional import Changed

from simfbo import (
    BilevelProblem,
    DebugFederation,
    Ledger,
    Point,
    SimulatedFederation,
    algorithms,
    cost,
    from_clients,
    run,
)
from simfbo.algorithms import auto_steps, simfbo
from simfbo.algorithms.steps.pacing import size_of
from simfbo.core.federation import View
from simfbo.core.gate import Gate
from simfbo.core.local_work import constant, fixed
from simfbo.core.sampling import drop_out, without_replacement
from simfbo.privacy import Privacy, Protected, private
from simfbo.tasks import random_quadratic
from simfbo.tasks._quadratic import PROBLEM

MODULE = importlib.import_module("simfbo.algorithms.steps.auto")
T, DIM_X, DIM_Y, N = 120, 2, 3, 3
P = np.array([0.5, 0.3, 0.2])
KEY = jax.random.key(4)
BUILDS = {
    "simfbo": lambda plan: simfbo(PROBLEM, plan.local, plan.server),
    "shrofbo": lambda plan: algorithms.shrofbo(PROBLEM, plan.local, plan.server),
    "memfbo": lambda plan: algorithms.memfbo(PROBLEM, plan.local, plan.server, penalty=1e4),
    "fedbio": lambda plan: algorithms.fedbio(PROBLEM, plan.plain),
    "fednest": lambda plan: algorithms.fednest(PROBLEM, plan.plain, 1, 6),
}
PLAIN = {"fedbio": 1, "fednest": 1 + 1 + 1 + 6 + 2}  # exchanges of an iteration


def quadratic(lower=1.0, upper=1.0, seed=2, heterogeneity=1.0):
    """Return coefficients whose losses are multiplied; the solutions x* and y* stay."""
    q = random_quadratic(N, DIM_X, DIM_Y, heterogeneity, seed)
    return q._replace(
        A=lower * q.A, B=lower * q.B, c=lower * q.c, C=upper * q.C, D=upper * q.D
    )  # fmt: skip


TASK = quadratic().task(P)
TRUTH = quadratic().closed_form(P)
SIZE = np.linalg.norm(TRUTH.x())


def finish(method, federation, rounds=T, seed=3, **options):
    federation.ledger = Ledger()
    return run(
        method, federation, TASK.x0, TASK.y0, rounds=rounds, every=rounds, seed=seed, **options
    )


def made(name, build=None, rounds=T):
    return auto_steps(build or BUILDS[name], PROBLEM, TASK.x0, rounds, plain=name in PLAIN)


@pytest.fixture(scope="module")
def federation():
    return SimulatedFederation(TASK.data)


@pytest.fixture(scope="module")
def method():
    return made("simfbo")


@pytest.fixture(scope="module")
def whole(method, federation):
    federation.data = TASK.data
    history = finish(method, federation)
    return history, copy.deepcopy(federation.ledger)


def error_of(state, truth=TRUTH):
    return np.linalg.norm(state.x - truth.x()) / SIZE


# Accuracy at any scale


SCALES = {"simfbo": [(100.0, 100.0), (0.01, 0.01)], "fedbio": [(100.0, 100.0), (0.01, 0.01)]}


@pytest.mark.parametrize("name", BUILDS)
def test_losses_may_have_any_scale(name):
    """Multiplied by 100 or by 0.01, the losses leave x the same: one step size would not."""
    method, federation, ends = made(name), SimulatedFederation(TASK.data), []
    for lower, upper in SCALES.get(name, [(100.0, 0.01)]):
        q = quadratic(lower, upper)
        federation.data = q.task(P).data
        history = finish(method, federation)
        assert history.end == {"status": "finished"}
        assert error_of(history.state) < (0.2 if name == "memfbo" else 0.1)
        assert history.method_state.halvings == 0
        np.testing.assert_allclose(history.state.y, q.closed_form(P).y(history.state.x), atol=0.06)
        spectrum = np.linalg.eigvalsh(np.tensordot(P, q.A, 1))
        np.testing.assert_allclose(
            history.method_state.found, [spectrum[0], spectrum[-1], 1.0, 0.0], rtol=1e-10
        )
        ends.append(history.state.x)
    np.testing.assert_allclose(ends[0], ends[-1], atol=1e-6)
    # mu and L, at first and at the end; the hypergradient's size; the shift of y
    extra = DIM_Y * 2 + (30 if name in PLAIN else 0) + 1 + DIM_Y
    checks = federation.ledger.by_step["check"].rounds
    assert T / 10 <= checks <= T / 5
    assert federation.ledger.total.rounds == extra + checks + T * PLAIN.get(name, 1)


def test_one_step_size_would_not_do(federation):
    algorithm, fates = simfbo(PROBLEM, Point(x=0.1, y=0.3, v=0.3)), []
    for scale in (100.0, 0.01):
        federation.data = quadratic(scale, scale).task(P).data
        fates.append(finish(algorithm, federation, rounds=40))
    assert fates[0].end["status"] == "diverged"
    assert error_of(fates[1].state) > 0.8


@pytest.mark.parametrize(("seed", "heterogeneity"), [(5, 0.0), (6, 2.0)])
def test_other_quadratics(method, federation, seed, heterogeneity):
    q = quadratic(10.0, 0.1, seed, heterogeneity)
    federation.data = q.task(P).data
    history, truth = finish(method, federation), q.closed_form(P)
    before = np.linalg.norm(truth.x())
    assert np.linalg.norm(history.state.x - truth.x()) < 0.1 * before
    assert history.method_state.halvings == 0


def test_a_bad_condition_only_slows_x_down(method, federation):
    """With kappa = 100, x waits and then moves slowly: it comes closer, and nothing diverges."""
    q = quadratic()
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(DIM_Y, DIM_Y)))[0]
    q = q._replace(A=np.stack([basis * [0.02, 0.5, 2.0] @ basis.T] * N), B=0.02 * q.B, c=0.02 * q.c)
    federation.data = q.task(P).data
    history, truth = finish(method, federation), q.closed_form(P)
    assert history.method_state.found[1] / history.method_state.found[0] == pytest.approx(
        100, rel=1e-9
    )
    assert history.method_state.halvings == 0
    first = np.linalg.norm(truth.hypergradient(TASK.x0))
    assert np.linalg.norm(truth.hypergradient(history.state.x)) < 0.95 * first
    assert history.verdict["converged"] is False


@pytest.mark.parametrize(("name", "work"), [("simfbo", constant(5)), ("shrofbo", fixed([1, 3, 5]))])
def test_local_work(name, work):
    federation = SimulatedFederation(TASK.data, local_work=work)
    history = finish(made(name), federation)
    assert error_of(history.state) < 0.1
    assert history.method_state.halvings == 0
    assert float(history.method_state.found[2]) == pytest.approx(P @ work(KEY, N).norm)


def test_local_steps_on_x_do_not_depend_on_the_units_of_the_upper_loss(method):
    """Adam on the server does not feel them, and the clients' steps must not either."""
    federation, ends = SimulatedFederation(TASK.data, local_work=constant(5)), []
    for unit in (1.0, 1e4):
        federation.data = quadratic(upper=unit).task(P).data
        ends.append(finish(method, federation))
    assert error_of(ends[1].state) < 0.1
    np.testing.assert_allclose(ends[1].state.x, ends[0].state.x, rtol=1e-3, atol=1e-4)
    pulls = [float(end.method_state.pull) for end in ends]
    assert pulls[1] == pytest.approx(1e4 * pulls[0], rel=1e-6)


def test_noise_and_cohorts_are_no_divergence(method):
    """Steps are halved where noise is as large as y and v, and x comes closer nevertheless."""
    noisy = quadratic().task(samples=4, noise=0.3, batch_size=1)
    history = finish(method, SimulatedFederation(noisy.data, without_replacement(2)))
    assert history.end == {"status": "finished"}
    assert history.method_state.halvings <= 4
    assert error_of(history.state, quadratic().closed_form()) < 0.7


# The steps themselves


def test_steps_follow_the_formulas(method, federation, whole):
    """After one iteration y = -grad / L and v = grad_y F / L; x waits; eta = gamma / sqrt(T)."""
    federation.data, sent = TASK.data, []

    def spy(client_step, payload, cohort, key):
        sent.append(client_step)
        return federation.sum(client_step, payload, cohort, key)

    view = View(federation, spy, federation.gather)
    state = method.prepare(method.init(TASK.x0, TASK.y0), view, KEY)
    states = [state := method.round(state, view, key) for key in jax.random.split(KEY, 3)]
    states = [method.point(state) for state in states]
    assert [step.__name__ for step in sent] == ["curvature"] * DIM_Y + ["simfbo_step"] * 3
    spectrum = np.linalg.eigvalsh(TRUTH.A)
    gamma, rate = 1 / spectrum[-1], math.sqrt(spectrum[0] / spectrum[-1])
    eta = gamma / T**0.5
    np.testing.assert_allclose(jax.tree.leaves(sent[-1])[:3], [0.0, eta, eta], rtol=1e-10)
    y1, v1 = gamma * TRUTH.c, -gamma * TRUTH.Ct
    np.testing.assert_allclose(states[0].y, y1, rtol=1e-10)
    np.testing.assert_allclose(states[0].v, v1, rtol=1e-10)
    y2 = y1 - gamma * (TRUTH.A @ y1 - TRUTH.c) + (1 - rate) ** 2 * y1
    np.testing.assert_allclose(states[1].y, y2, rtol=1e-10)
    assert not np.any(states[2].x)


def test_what_is_sent(federation, whole):
    """SimFBO's own messages, and before them the curvature's."""
    ledger = whole[1]
    own, probe = ledger.by_step["simfbo_step"], ledger.by_step["curvature"]
    check, message = ledger.by_step["check"], DIM_X + 2 * DIM_Y
    assert (own.rounds, own.floats_down, own.floats_up) == (
        T, T * N * message, T * N * message,
    )  # fmt: skip
    times = 3 * DIM_Y  # mu and L, at first and at the end; how far y*(x) moves with x
    assert (probe.rounds, probe.floats_down) == (times, times * N * message)
    assert probe.floats_up == times * N * (DIM_Y + 2)
    # Two points and six vectors down; three directions, six products and four numbers up.
    assert check.floats_down == check.rounds * N * (2 * message + 6 * DIM_Y)
    assert check.floats_up == check.rounds * N * (message + 6 * DIM_Y + 4)
    pushed = ledger.by_step["response"]
    assert (pushed.rounds, pushed.floats_down, pushed.floats_up) == (
        1, N * (2 * DIM_X + DIM_Y), N * DIM_Y,
    )  # fmt: skip


def test_an_iteration_costs_what_its_method_costs(federation):
    federation.data = TASK.data
    steps = cost(made("fedbio"), federation, TASK.x0, TASK.y0).by_step
    assert {name: sent.rounds for name, sent in steps.items()} == {"fedbio_step": 1}


def test_under_privacy_the_upper_loss_is_clipped_as_part_of_channel_x(federation):
    federation.data, sent = quadratic(upper=1e4).task(P).data, []

    def spy(client_step, payload, cohort, key):
        sent.append((client_step, federation.sum(client_step, payload, cohort, key)))
        return sent[-1][1]

    privacy = Privacy(clip=Point(0.5, 1.0, 1.0), noise=Point(1e-3, 1e-3, 1e-3))
    method = private(made("simfbo", rounds=12), privacy)
    view = View(federation, spy, federation.gather)
    state = method.prepare(method.init(TASK.x0, TASK.y0), view, KEY)
    for key in jax.random.split(KEY, 5):
        state = method.round(state, view, key)
    step, reply = next(one for one in sent if one[0].__name__ == "check")
    assert isinstance(step, Protected)
    h, numbers = reply.x
    assert 0.4 < np.sqrt(np.sum(np.square(h)) + np.sum(np.square(numbers))) <= 0.5 + 1e-9


def test_sizes():
    zero = np.zeros(2)
    assert size_of(zero) == 1.0
    assert size_of({"a": np.array([3.0, 4.0]), "b": zero}) == {
        "a": pytest.approx(math.sqrt(12.5)),
        "b": pytest.approx(math.sqrt(12.5)),
    }
    sizes = size_of([np.full(3, 2.0), np.full((2, 2), -4.0), zero, np.float32(0)])
    assert sizes == [2.0, 4.0, 3.0, 3.0]


# Units


def in_units(q, x=1.0, y=1.0, f=1.0, g=1.0):
    """Return the same problem with x, y, f and g measured in smaller units: numbers are larger."""
    return q._replace(
        A=q.A * g / y**2, B=q.B * g / (x * y), c=q.c * g / y,
        C=q.C * f / y**2, t=q.t * y, D=q.D * f / x**2, s=q.s * x,
    )  # fmt: skip


@pytest.mark.parametrize("units", [
    {"x": 1e6}, {"x": 1e-6}, {"y": 1e6}, {"y": 1e-6}, {"f": 1e6}, {"f": 1e-6}, {"g": 1e6},
    {"g": 1e-6}, {"x": 1e-3, "y": 1e3, "f": 1e4, "g": 1e-4},
], ids=str)  # fmt: skip
def test_units_do_not_matter(method, federation, whole, units):
    """x, y and v are the same points in other units, and the verdict is word for word the same."""
    federation.data = in_units(quadratic(), **units).task(P).data
    history, expected = finish(method, federation), whole[0]
    x, y, f, g = (units.get(name, 1.0) for name in "xyfg")
    for name, unit in (("x", x), ("y", y), ("v", y * f / g)):
        got, want = getattr(history.state, name), getattr(expected.state, name)
        np.testing.assert_allclose(got / unit, want, rtol=1e-6, atol=1e-9)
    assert history.verdict["text"] == expected.verdict["text"]
    assert history.verdict["converged"] is True
    assert history.method_state.halvings == 0


def test_a_start_in_other_units_ends_the_same(federation):
    units, start = 50.0, np.array([1.0, -1.0])

    def end(coefficients, x0):
        federation.data = coefficients.task(P).data
        algorithm = auto_steps(BUILDS["simfbo"], PROBLEM, x0, 40)
        return run(algorithm, federation, x0, TASK.y0, rounds=40, every=40).state.x

    moved = end(quadratic(), start)
    assert abs(moved - start).max() > 0.1
    np.testing.assert_allclose(
        end(in_units(quadratic(), x=units), units * start) / units, moved, rtol=1e-6
    )


# The safeguard


LONGER = 100


def fifty_times(plan):
    """Return SimFBO with steps fifty times what they should be."""
    rules = (optax.chain(rule, optax.scale(50.0)) for rule in plan.server)
    return simfbo(PROBLEM, plan.local, type(plan.server)(*rules))


@pytest.fixture(scope="module")
def hasty():
    return made("simfbo", fifty_times, LONGER)


@pytest.fixture(scope="module")
def saved(hasty, federation):
    federation.data = TASK.data
    return finish(hasty, federation, LONGER)


def test_steps_that_are_too_large_are_halved(saved):
    history = saved
    assert history.end == {"status": "finished"}
    assert 4 <= int(history.method_state.halvings) <= 8
    assert error_of(history.state) < 0.3
    np.testing.assert_allclose(history.state.y, TRUTH.y(history.state.x), atol=0.05)


def test_without_the_safeguard_they_diverge(federation, monkeypatch):
    federation.data = TASK.data
    monkeypatch.setattr(
        MODULE, "_after_round", lambda method, state, after, pull, step: state._replace(base=after)
    )
    history = finish(made("simfbo", fifty_times, LONGER), federation)
    assert history.end["status"] == "diverged"
    assert history.method_state.halvings == 0


def test_going_back_halves_once_and_restores_the_best_state(method, whole):
    earlier = method.init(TASK.x0, TASK.y0 + 1.0).base
    state = whole[0].method_state._replace(best=earlier, age=np.int32(7))
    far = state.base._replace(v=state.base.v + 1e9)
    for lost in (far, state.base._replace(y=state.base.y * np.nan)):
        back = MODULE._after_round(method, state, lost, None, 0.0)
        assert (int(back.halvings), int(back.age)) == (1, 0)
        np.testing.assert_array_equal(back.pace, state.pace / 2)
        for name in "xyv":
            np.testing.assert_array_equal(getattr(back.base, name), getattr(earlier, name))
        x, y, v = back.base.server
        assert (x.pace, x.iteration) == (back.pace[0], back.t)
        for rule in (y, v):
            assert rule.gamma == pytest.approx(state.base.server.y.gamma / 2)
            assert not np.any(rule.speed)


def test_the_upper_loss_with_y_solved_never_ends_above_its_start():
    """Each x_j weighs a coefficient by exp(x_j), so L grows as x moves; y*(x) is known exactly."""
    rng = np.random.default_rng(1)
    scales = np.array([0.5, 1.0, 10.0])
    rows = [(rng.normal(size=(20, 3)) * scales, rng.normal(size=20)) for _ in range(4)]
    a, b = (np.concatenate(part) for part in zip(*rows[:2], strict=True))
    av, bv = (np.concatenate(part) for part in zip(*rows[2:], strict=True))

    def upper(x, y, batch):
        return jnp.mean((batch[0] @ y - batch[1]) ** 2)

    def lower(x, y, batch):
        return upper(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)

    def solved(x):
        y = np.linalg.solve(a.T @ a / 40 + np.diag(np.exp(x)), a.T @ b / 40)
        return y, np.mean((av @ y - bv) ** 2)

    problem, x0 = BilevelProblem(upper, lower), np.full(3, -4.0)
    method = auto_steps(
        lambda plan: simfbo(problem, plan.local, plan.server), problem, x0, rounds=400
    )
    federation = SimulatedFederation(from_clients(rows[:2], rows[2:]))
    history = run(method, federation, x0, np.zeros(3), rounds=400, every=400)
    state, evidence = history.state, method.evidence(history.method_state)
    y, loss = solved(state.x)
    start = solved(x0)[1]
    assert loss < start
    assert np.linalg.norm(state.y - y) <= 1.1 * evidence["y"] * np.linalg.norm(state.y) + 1e-9
    assert evidence["gain"] == pytest.approx(start - loss, rel=0.1)


def not_finite_once(build, calls):
    """Return a build whose third exchange is not finite."""

    def change(round, state, federation, key):
        calls.append(key)
        if len(calls) == 3:
            state = state._replace(y=state.y * np.nan)
        return round(state, federation, key)

    return lambda plan: Changed(build(plan), change)


def test_replies_that_are_not_finite_lead_back_too():
    one_by_one, calls = SimulatedFederation(TASK.data, strategy="lanes"), []
    history = finish(made("simfbo", not_finite_once(BUILDS["simfbo"], calls)), one_by_one, rounds=6)
    assert history.end == {"status": "finished"}
    assert history.method_state.halvings == 1
    assert len(history.refusals) == N
    assert np.isfinite(history.state.y).all()


# Resuming, and the other engine


@pytest.mark.parametrize("kill", [1, 9, 31])
def test_resumed_runs_are_exact_to_the_bit(hasty, saved, federation, tmp_path, kill):
    """Interrupted before, amid and after the halvings; the last by another process' method."""

    def on_round(t, record):
        if t == kill:
            raise KeyboardInterrupt

    federation.data, expected = TASK.data, saved
    cut = finish(hasty, federation, LONGER, directory=tmp_path, on_round=on_round)
    assert cut.end == {"status": "interrupted"}
    assert (int(cut.method_state.halvings) > 0) == (kill > 1)
    again = made("simfbo", fifty_times, LONGER) if kill == 31 else hasty
    history = finish(again, federation, LONGER, directory=tmp_path, resume=True)
    pairs = map(jax.tree.leaves, (history.method_state, expected.method_state))
    for got, want in zip(*pairs, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    for key in ("communication_rounds", "floats_down", "floats_up"):
        assert history.records[-1][key] == expected.records[-1][key]


def test_engines_agree():
    small = random_quadratic(2, 1, 1, seed=1).task()
    method = auto_steps(BUILDS["simfbo"], PROBLEM, small.x0, rounds=2)
    ends = []
    for engine in (SimulatedFederation, DebugFederation):
        federation = engine(small.data)
        state = method.prepare(method.init(small.x0, small.y0), federation, KEY)
        for key in jax.random.split(KEY, 2):
            state = method.round(state, federation, key)
        ends.append((state, federation.ledger))
    (one, ledger), (other, books) = ends
    assert ledger == books
    assert np.abs(one.base.y).max() > 1e-3
    for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


# In blocks


def slower(plan):
    """Return SimFBO whose clients take a fifth of their steps: the same but for the numbers."""
    local = Point(0.0, 0.2 * plan.local.y, 0.2 * plan.local.v)
    return simfbo(PROBLEM, local, plan.server)


def test_what_a_build_makes_of_the_steps_is_no_other_ones():
    """Programs of equal forms are shared: those of the first method must not serve the second."""
    ends = {}
    for name, build in (("plain", BUILDS["simfbo"]), ("slower", slower)):
        for strategy in ("lanes", "batches"):
            federation = SimulatedFederation(TASK.data, local_work=constant(3), strategy=strategy)
            method = auto_steps(build, PROBLEM, TASK.x0, 20)
            ends[name, strategy] = finish(method, federation, rounds=20).state.y
    for name in ("plain", "slower"):
        np.testing.assert_allclose(ends[name, "batches"], ends[name, "lanes"], rtol=1e-9)
    assert np.abs(ends["plain", "lanes"] - ends["slower", "lanes"]).max() > 1e-4


WORLDS = {
    "refusals while measuring": ("fedbio", {}, {
        "sampler": without_replacement(2), "absence": drop_out(0.1),
    }),
    "too large where a window ends": ("simfbo", {"x": 0.1}, {"gate": Gate(max_norm=30.0)}),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_histories_are_those_of_lanes(world):
    """Refusals in the rounds in which they happened; failures of `finish` in their own round."""
    (name, units, options), found = WORLDS[world], []
    for strategy in ("lanes", "batches"):
        data = in_units(quadratic(), **units).task(P).data
        federation = SimulatedFederation(data, strategy=strategy, **options)
        history = finish(made(name, rounds=60), federation, rounds=60, seed=1)
        lines = [(line["round"], line["client"], line["reason"]) for line in history.refusals]
        end = {key: history.end[key] for key in history.end if key != "reason"}
        found.append((lines, end, history.records[-1]["refused"], history.records[-1]["round"]))
    assert found[0] == found[1]
    assert found[0][0]
