"""Tuning-free steps: against NumPy, from far too large to far too small beginnings, and resumed."""

import jax
import numpy as np
import pytest

from simfbo import Point, SimulatedFederation, checks, run
from simfbo.algorithms import fedbio, memfbo, shrofbo, simfbo, tuning_free
from simfbo.config.build import build_method
from simfbo.config.run import checked
from simfbo.core.local_work import constant, fixed
from simfbo.core.sampling import without_replacement
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TAUS = [1, 2, 3, 5, 9]
WEIGHTS = np.arange(1, 6) / 15
Q = random_quadratic(5, 3, 4, seed=1)
TASK = Q.task(np.arange(1, 6))
TRUTH = Q.closed_form(WEIGHTS)
NOISY = Q.task(np.arange(1, 6), samples=6, noise=0.3, batch_size=2)
SIZES = [3, 4, 4]


def made(factory, task=TASK, initial=Point(1.0, 1.0, 1.0)):
    return tuning_free(lambda plan: factory(task.problem, plan.local, plan.server), initial)


def direction(i, z):
    """Return D_i(z), of x, y and v one after the other."""
    x, y, v = np.split(z, [3, 7])
    d_x = Q.D[i] @ (x - Q.s[i]) + Q.B[i].T @ v
    return np.concatenate(
        [d_x, Q.A[i] @ y - Q.B[i] @ x - Q.c[i], Q.A[i] @ v - Q.C[i] @ (y - Q.t[i])]
    )


def sizes(squares):
    a, b, c = np.sqrt(squares)
    phi = max(b, c)
    return np.repeat([1 / (a * phi), 1 / b, 1 / phi], SIZES)


@pytest.mark.parametrize("factory", [simfbo, shrofbo])
@pytest.mark.parametrize("taus", [[1] * 5, TAUS], ids=["one step", "unequal"])
def test_it_is_its_equations_over_several_rounds(factory, taus):
    """Clients step with the server's sizes over the mean local work, not at all in the first."""
    initial = Point(x=0.5, y=0.03, v=2.0)
    algorithm, squares = made(factory, initial=initial), np.square(initial)
    federation = SimulatedFederation(TASK.data, local_work=fixed(taus))
    state, z, eta = algorithm.init(TASK.x0, TASK.y0), np.zeros(11), np.zeros(11)
    for key in jax.random.split(jax.random.key(0), 5):
        state = algorithm.round(state, federation, key)
        total = np.zeros(11)
        for i, tau in enumerate(taus):
            q = np.zeros(11)
            for _ in range(tau):
                q = q + direction(i, z - eta * q)
            share = WEIGHTS @ taus / tau if factory is shrofbo else 1.0
            total = total + WEIGHTS[i] * share * q
        squares = squares + [part @ part for part in np.split(total, [3, 7])]
        z, eta = z - sizes(squares) * total, sizes(squares) / (WEIGHTS @ taus)
        found = np.concatenate(algorithm.point(state))
        np.testing.assert_allclose(found, z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("begin", "rounds"), [(1e-2, 4_000), (1.0, 4_000), (1e2, 80_000)])
def test_it_finds_the_solution_wherever_it_begins(begin, rounds):
    """From a, b and c that are too small to matter, to such that first steps are tiny."""
    algorithm = made(simfbo, initial=Point(begin, begin, begin))
    end = run(algorithm, SimulatedFederation(TASK.data), TASK.x0, TASK.y0, rounds=rounds).state
    assert np.linalg.norm(end.x - TRUTH.x()) < 1e-2 * np.linalg.norm(TRUTH.x())


@pytest.mark.parametrize("name", ["repeatable", "engines agree", "ledger is cost", "any pytree"])
def test_laws(name):
    law = next(law for law in checks.LAWS if law.name == name)
    found = checks.examine(
        lambda problem, local, server: made(shrofbo, TASK._replace(problem=problem)), law
    )
    assert found.passed, checks.describe(found)


class Stop(BaseException):
    """What a kill looks like from within."""


def test_killed_and_resumed_runs_are_the_same_to_the_bit(tmp_path):
    """Clients take three steps; tests/engines/test_blocks.py compares blocks with single rounds."""
    algorithm = made(simfbo, NOISY)

    def go(kill=None, **options):
        def on_round(t, record):
            if t == kill:
                raise Stop

        federation = SimulatedFederation(NOISY.data, without_replacement(2), constant(3))
        return run(algorithm, federation, NOISY.x0, NOISY.y0, rounds=12, on_round=on_round,
                   checkpoint_seconds=0.0, **options).state  # fmt: skip

    whole = go()
    with pytest.raises(Stop):
        go(kill=7, directory=tmp_path)
    resumed = go(directory=tmp_path, resume=True)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_take_them_says_so():
    with pytest.raises(UserError, match="MemFBO must move y and u alike"):
        made(memfbo)
    single = tuning_free(lambda plan: fedbio(TASK.problem, plan.plain))
    with pytest.raises(UserError, match="this method has none: use simfbo, shrofbo or mimefbo"):
        single.init(TASK.x0, TASK.y0)
    with pytest.raises(UserError, match="must be positive numbers, got 0"):
        made(simfbo, initial=Point(1.0, 0.0, 1.0))


def test_configurations():
    base = {"task": {"name": "quadratic"}, "steps": "tuning-free"}
    for name in ("simfbo", "shrofbo"):
        config = checked({**base, "algorithm": {"name": name}}, {})
        assert config.algorithm.radius is None
        state = build_method(config, TASK).init(TASK.x0, TASK.y0)
        assert jax.tree.leaves(getattr(state, "base", state).server.squares) == [1.0, 1.0, 1.0]
    for name in ("fednest", "memfbo", "fedbio", "fedmsa"):
        with pytest.raises(UserError, match=f"'{name}' cannot take tuning-free steps.*use simfbo"):
            checked({**base, "algorithm": {"name": name}}, {})
