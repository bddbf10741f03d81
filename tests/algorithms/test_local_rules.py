"""Clients with local optimisers of their own: where the methods end, in closed form.

On quadratics with full batches a round is an affine map, so SimFBO's and ShroFBO's fixed points are
solved for; MimeFBO, whose state is larger, is run.
"""

import jax
import numpy as np
import pytest

from simfbo import DebugFederation, Point, SimulatedFederation, run
from simfbo.algorithms import fedbio, mimefbo, shrofbo, simfbo
from simfbo.core.local_work import (
    coefficients,
    constant,
    effective,
    fixed,
    momentum,
    proximal,
    sgd,
    uniform,
)
from simfbo.core.sampling import without_replacement
from simfbo.diagnostics import effective_weights
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

TAUS = [3, 5, 4, 2, 6]
RULES = [sgd(), momentum(0.9), proximal(0.3), coefficients([0.5, 2.0]), momentum(0.5)]
NORMS = np.array([effective(rule, tau).sum() for rule, tau in zip(RULES, TAUS, strict=True)])
QUADRATIC = random_quadratic(5, 3, 4, seed=1)
TASK = QUADRATIC.task(np.arange(1, 6))
P = TASK.data.p
SERVER = Point(x=0.01, y=0.02, v=0.02)
FEDERATION = SimulatedFederation(TASK.data, local_work=fixed(TAUS, RULES))


def alike(eta):
    return Point(x=eta, y=eta, v=eta)


@pytest.mark.parametrize("factory", [simfbo, shrofbo])
def test_the_fixed_point_is_the_solution_for_w_or_p_up_to_a_drift_linear_in_eta(factory, affine):
    w = effective_weights(P, NORMS)
    right, wrong = (w, P) if factory is simfbo else (P, w)
    goal, other = (QUADRATIC.closed_form(weights).x() for weights in (right, wrong))

    def miss(eta):
        walk = affine(factory(TASK.problem, alike(eta), SERVER), FEDERATION, TASK.x0, TASK.y0)
        assert walk.rate < 1
        return np.linalg.norm(walk.fixed_point[:3] - goal)

    assert miss(1e-12) < 1e-8 < 1e-2 < np.linalg.norm(goal - other)
    errors = np.array([miss(eta) for eta in (0.002, 0.001, 0.0005, 0.00025)])
    np.testing.assert_allclose(errors[:-1] / errors[1:], 2, atol=0.1)


@pytest.mark.parametrize(
    "control", ["mean", *(pytest.param(one, marks=pytest.mark.slow) for one in ("storm", "memory"))]
)
def test_mimefbo_reaches_the_solution_at_any_stable_eta(control):
    goal, server = QUADRATIC.closed_form(P).x(), Point(x=0.03, y=0.06, v=0.06)
    for eta in (0.001, 0.03):
        algorithm = mimefbo(TASK.problem, alike(eta), server, control=control, theta=0.5)
        found = run(algorithm, FEDERATION, TASK.x0, TASK.y0, rounds=500).state.x
        np.testing.assert_allclose(found, goal, rtol=0, atol=1e-10)


def test_engines_agree():
    """Also in batches and in lanes, where each client is computed in a place of its own."""
    algorithm = simfbo(TASK.problem, alike(0.02), SERVER)
    work = uniform(2, 4, RULES[:3], every_round=True, rules_every_round=True)

    def end(engine, **options):
        federation = engine(TASK.data, without_replacement(3), work, **options)
        return run(algorithm, federation, TASK.x0, TASK.y0, rounds=3).state

    wanted = end(DebugFederation)
    for strategy in ("lanes", "batches"):
        found = end(SimulatedFederation, strategy=strategy)
        for one, other in zip(found[:3], wanted[:3], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_one_rule_for_all_is_the_case_of_equal_rules():
    algorithm = simfbo(TASK.problem, alike(0.02), SERVER)
    ends = [
        run(algorithm, SimulatedFederation(TASK.data, local_work=fixed(TAUS, rules)), TASK.x0,
            TASK.y0, rounds=20).state
        for rules in (momentum(0.7), [momentum(0.7)] * 5)
    ]  # fmt: skip
    for one, other in zip(*(end[:3] for end in ends), strict=True):
        np.testing.assert_array_equal(one, other)


def test_methods_with_plain_steps_refuse_a_single_client_with_another_rule():
    for rule in (momentum(0.5), proximal(0.5), coefficients([1.0, 0.5])):
        federation = SimulatedFederation(TASK.data, local_work=constant(2, [sgd()] * 4 + [rule]))
        algorithm = fedbio(TASK.problem, alike(0.1))
        state = algorithm.init(TASK.x0, TASK.y0)
        with pytest.raises(UserError, match="takes plain local steps"):
            algorithm.round(state, federation, jax.random.key(0))
