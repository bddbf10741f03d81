"""What a newcomer gets wrong is answered before the first round, in one sentence."""

import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import BilevelProblem, Point, SimulatedFederation, UserError, run, solve
from simfbo.algorithms import auto_steps, simfbo
from simfbo.core.data import from_clients
from simfbo.tasks import quadratic

RNG = np.random.default_rng(0)
FEATURES = [RNG.normal(size=(8, 3)) for _ in range(3)]
PARTS = [(a, a @ np.ones(3)) for a in FEATURES]
DATA = from_clients(PARTS, PARTS)
FEDERATION = SimulatedFederation(DATA)
STEPS = Point(x=0.05, y=0.1, v=0.1)
ZEROS = np.zeros(3)


def fit(x, y, batch):
    return jnp.mean((batch[0] @ y - batch[1]) ** 2)


def ridge(x, y, batch):
    return fit(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


METHOD = simfbo(BilevelProblem(upper=fit, lower=ridge), STEPS)


def go(x0=ZEROS, y0=ZEROS, method=METHOD, federation=FEDERATION, **options):
    return run(method, federation, x0, y0, **{"rounds": 2, **options})


@pytest.fixture(scope="module")
def usual():
    return go().state


@pytest.mark.parametrize("zeros", [[0, 0, 0], [0.0] * 3, np.zeros(3, int), np.zeros(3, bool)])
def test_whole_numbers_and_lists_are_taken_as_float_arrays(zeros, usual):
    found = go(zeros, zeros).state
    assert found.x.dtype == found.y.dtype == float
    np.testing.assert_array_equal(found.x, usual.x)
    np.testing.assert_array_equal(found.y, usual.y)


def test_automatic_steps_take_the_same(usual):
    def build(plan):
        return simfbo(BilevelProblem(upper=fit, lower=ridge), plan.local, plan.server)

    problem = BilevelProblem(upper=fit, lower=ridge)
    for x0 in ([1, 2, 3], np.array([1, 2, 3])):
        assert auto_steps(build, problem, x0, 20).name == auto_steps(build, problem, ZEROS, 20).name
    with pytest.raises(UserError, match="x0 holds 'a'"):
        auto_steps(build, problem, "a", 20)


def test_whole_floats_count_as_rounds(usual):
    np.testing.assert_array_equal(go(rounds=2.0, every=1e0, seed=0.0).state.x, usual.x)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"y0": np.zeros(4)}, r"The loss .* fails: .*Here x0 is float64\[3\], y0 float64\[4\], "
         r"the samples \(float64\[8, 3\], float64\[8\]\): y0 must be of shape \(3,\)\."),
        ({"x0": np.zeros(5)}, r"fails: .*: x0 must be of shape \(3,\)\."),
        ({"y0": 1.0}, r"y0 must be of shape \(3,\)\."),
        ({"x0": {"a": np.zeros(3)}}, r"fails: .*Here x0 is \{'a': float64\[3\]\}"),
        ({"x0": None}, "x0 is None: give an array"),
        ({"y0": "a"}, "y0 holds 'a': give arrays of numbers"),
        ({"y0": [[1], [1, 2]]}, "y0 has rows of different lengths"),
        ({"x0": ZEROS * np.nan}, "x0 holds NaN or infinite numbers"),
        ({"federation": DATA}, "The federation of a run must be such as simfbo.Simulated"),
        ({"method": simfbo}, "The algorithm of a run must be such as .* got 'simfbo'"),
        ({"rounds": "5"}, "rounds must be a whole number of at least 1, got '5'"),
        ({"rounds": 2.5}, "rounds must be a whole number of at least 1, got 2.5"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"evaluate": lambda state: 1.0}, "evaluate must return numbers by name, .* got float"),
        ({"evaluate": lambda state: {"a": ZEROS}}, "evaluate must return one number per name"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_sentences(options, sentence):
    with pytest.raises(UserError, match=sentence):
        go(**options)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda x, y, batch: (batch[0] @ y - batch[1]) ** 2, r"A loss must return one number, .*"
         r"got shape \(8,\)"),
        (lambda x, y, batch: None, "A loss must return one number, .* got NoneType"),
        (lambda x, y: jnp.sum(y**2), "A loss fails: .* takes 2 positional arguments but 3"),
        (lambda x, y, batch: jnp.asarray(float(jnp.sum(y**2))), "write it with jax.numpy"),
        (lambda x, y, batch: np.mean(np.asarray(batch[0]) @ y), "write it with jax.numpy"),
    ],
)  # fmt: skip
def test_losses_that_are_none_are_sentences(loss, sentence):
    with pytest.raises(UserError, match=sentence):
        go(method=simfbo(BilevelProblem(upper=fit, lower=loss), STEPS))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SimulatedFederation(PARTS[:1]), "its data come from simfbo.from_clients"),
        (lambda: SimulatedFederation(DATA, 2), "a sampler is such as"),
        (lambda: SimulatedFederation(DATA, None, 3), "cannot take 3: local work is such as"),
        (lambda: SimulatedFederation(DATA, gate=3.0), "a gate is such as"),
        (lambda: SimulatedFederation(DATA, codecs="small"), "cannot take 'small'"),
        (lambda: simfbo(METHOD.problem, 0.1), r"Give local as Point\(x=.*, got 0.1"),
        (lambda: simfbo(METHOD.problem, {"x": 1}), "Give local as Point"),
        (lambda: simfbo(METHOD.problem, Point(x=0.1, y=0.1)), "Give a step size for"),
        (lambda: solve(METHOD), "solve takes a task, .* got SimFBO"),
        (lambda: solve(quadratic(), method="simfbo"), "method cannot be 'simfbo': give a function"),
        (lambda: solve(quadratic(), rounds="3"), "rounds must be a whole number"),
    ],
)
def test_what_is_no_part_of_a_run_is_a_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
