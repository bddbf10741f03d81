"""The true hypergradient against closed forms and central differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import diagnostics, from_clients
from simfbo.core.data import pooled
from simfbo.core.local_work import constant, fixed
from simfbo.core.problem import BilevelProblem, Point
from simfbo.engines.base import PROGRAMS
from simfbo.errors import UserError
from simfbo.tasks import random_quadratic

P = np.array([0.1, 0.2, 0.3, 0.4])
QUADRATIC = random_quadratic(4, seed=2)


def logistic_problem():
    """Return a nonlinear problem on three clients of unequal sizes."""
    rng = np.random.default_rng(0)
    sizes = (7, 3, 5)
    lower = [(rng.normal(size=(m, 3)), rng.choice([-1.0, 1.0], m)) for m in sizes]
    upper = [(rng.normal(size=(m, 3)), rng.choice([-1.0, 1.0], m)) for m in sizes]

    def loss(y, batch):
        return jnp.mean(jnp.log1p(jnp.exp(-batch[1] * jnp.tanh(batch[0]) @ y)))

    problem = BilevelProblem(
        upper=lambda x, y, batch: loss(y, batch),
        lower=lambda x, y, batch: loss(y, batch) + jnp.sum(jnp.exp(x["log"]) * y**2),
    )
    return problem, from_clients(lower, upper, p=[1, 2, 1]), {"log": np.array([-2.0, -1.0, 0.0])}


def test_closed_form_on_quadratics():
    task, truth = QUADRATIC.task(P), QUADRATIC.closed_form(P)
    x = np.array([0.3, -1.0, 2.0, 0.5])
    found = diagnostics.hypergradient(task.problem, task.data, x, task.y0)
    np.testing.assert_allclose(found.y, truth.y(x), rtol=1e-10)
    np.testing.assert_allclose(found.v, truth.v(x), rtol=1e-10)
    np.testing.assert_allclose(found.gradient, truth.hypergradient(x), rtol=1e-10)


def test_closed_form_is_the_gradient_by_central_differences():
    truth = QUADRATIC.closed_form(P)

    def phi(x):
        y = truth.y(x)
        of_y = sum(p * (y - t) @ C @ (y - t) for p, C, t in zip(P, QUADRATIC.C, QUADRATIC.t))
        of_x = sum(p * (x - s) @ D @ (x - s) for p, D, s in zip(P, QUADRATIC.D, QUADRATIC.s))
        return 0.5 * (of_y + of_x)

    x, h = np.array([0.3, -1.0, 2.0, 0.5]), 1e-5
    slopes = [(phi(x + h * e) - phi(x - h * e)) / (2 * h) for e in np.eye(4)]
    np.testing.assert_allclose(truth.hypergradient(x), slopes, rtol=0, atol=1e-6)
    np.testing.assert_allclose(truth.hypergradient(truth.x()), np.zeros(4), atol=1e-12)


def test_hypergradient_is_that_of_central_differences_on_a_nonlinear_problem():
    problem, data, x = logistic_problem()
    upper = pooled(problem.upper, data.upper, data.p)

    def phi(log):
        point = {"log": log}
        return float(upper(point, diagnostics.solve_lower(problem, data, point, np.zeros(3))))

    along, h = np.array([1.0, -2.0, 0.5]), 1e-5  # no component of the gradient is left out
    slope = (phi(x["log"] + h * along) - phi(x["log"] - h * along)) / (2 * h)
    found = diagnostics.hypergradient(problem, data, x, np.zeros(3)).gradient["log"]
    assert found @ along == pytest.approx(slope, abs=1e-6)
    assert np.abs(found).min() > 1e-4


def test_averaging_the_clients_own_hypergradients_is_biased():
    truth = QUADRATIC.closed_form(P)
    x = np.ones(4)
    own = [QUADRATIC.closed_form(np.eye(4)[i]).hypergradient(x) for i in range(4)]
    assert np.linalg.norm(P @ np.stack(own) - truth.hypergradient(x)) > 0.1


def test_errors_are_distances_from_the_truth():
    task, truth = QUADRATIC.task(P), QUADRATIC.closed_form(P)
    state = Point(x=np.ones(4), y=np.ones(5), v=np.zeros(5))
    found = diagnostics.errors(task.problem, task.data, state)
    assert found["grad_norm_squared"] == pytest.approx(
        np.sum(truth.hypergradient(state.x) ** 2), rel=1e-9
    )
    assert found["y_error"] == pytest.approx(np.linalg.norm(state.y - truth.y(state.x)), rel=1e-9)
    assert found["v_error"] == pytest.approx(np.linalg.norm(truth.v(state.x)), rel=1e-9)


def test_lower_problem_without_a_minimum_is_refused():
    data = from_clients([np.ones((1, 1))], [np.ones((1, 1))])
    flat = BilevelProblem(upper=lambda x, y, b: y @ y, lower=lambda x, y, b: jnp.sum(y))
    with pytest.raises(UserError, match="strongly convex"):
        diagnostics.solve_lower(flat, data, np.zeros(1), np.zeros(1))


def test_concave_lower_problem_is_refused():
    data = from_clients([np.ones((1, 1))], [np.ones((1, 1))])
    concave = BilevelProblem(lambda x, y, b: y @ y, lambda x, y, b: x @ y - y @ y)
    with pytest.raises(UserError, match="strongly convex"):
        diagnostics.hypergradient(concave, data, np.ones(1), np.ones(1))


def test_too_few_newton_steps_are_no_solution():
    problem, data, x = logistic_problem()
    with pytest.raises(UserError, match="not found in 1 Newton steps"):
        diagnostics.solve_lower(problem, data, x, np.ones(3), iterations=1)


@pytest.mark.usefixtures("single_precision")
def test_single_precision_ends_where_rounding_does():
    problem, data, x = logistic_problem()
    y = diagnostics.solve_lower(problem, data, x, np.zeros(3, "float32"))
    lower = pooled(problem.lower, data.lower, data.p)
    assert float(np.linalg.norm(jax.grad(lower, 1)(x, y))) < 1e-6


def drift(heterogeneity, eta, work):
    task = random_quadratic(4, heterogeneity=heterogeneity, seed=2).task()
    start = Point(x=np.ones(4), y=np.ones(5), v=np.ones(5))
    steps = Point(x=eta, y=eta, v=eta)
    key = jax.random.key(0)
    return diagnostics.client_drift(task.problem, task.data, start, steps, work, key)


def test_drift_vanishes_for_identical_clients_and_work():
    assert max(drift(0.0, 0.1, constant(4)).values()) < 1e-14
    assert min(drift(0.0, 0.1, fixed([1, 2, 4, 8])).values()) > 1e-4
    assert min(drift(1.0, 0.1, constant(4)).values()) > 1e-4


def test_drift_grows_with_the_square_of_small_steps():
    small = drift(1.0, 1e-4, constant(4))
    compiled = len(PROGRAMS.compiled)
    large = drift(1.0, 2e-4, constant(4))
    assert len(PROGRAMS.compiled) == compiled  # step sizes are inputs
    for name in ("x", "y", "v"):
        assert large[name] / small[name] == pytest.approx(4, rel=0.01)


def test_warning_where_unequal_work_moves_the_weights():
    norms = np.array([1.0, 1.0, 1.0, 5.0])
    w = diagnostics.effective_weights(P, norms)
    np.testing.assert_allclose(w, np.array([0.1, 0.2, 0.3, 2.0]) / 2.6)
    warning = diagnostics.work_warning(P, norms)
    assert warning is not None
    assert warning.startswith("unequal local work biases SimFBO: use ShroFBO")
    assert "37% of the weight" in warning
    assert diagnostics.work_warning(P, np.full(4, 3.0)) is None


def test_a_private_lower_level_has_no_shared_solution():
    task = random_quadratic(3).task()
    problem = task.problem._replace(lower_level="private")
    with pytest.raises(UserError, match="y\\*\\(x\\) of its own"):
        diagnostics.hypergradient(problem, task.data, task.x0, task.y0)
